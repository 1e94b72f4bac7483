"""The draft's laws, from which children are drawn.

B batch rows, K nodes, L laws, V vocabulary, Vd draft vocabulary.
"""

from dataclasses import fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from furcate.decoding.sampling import SamplingRows, target_law


def rows_per_node(rows: SamplingRows, num_nodes: int) -> SamplingRows:
    """The same rows, each repeated for its nodes: [B] becomes [B * num_nodes]."""
    tensors = {field.name: value for field in fields(rows) if isinstance(value := getattr(rows, field.name), Tensor)}
    return replace(rows, **{name: value.repeat_interleave(num_nodes, 0) for name, value in tensors.items()})


def draft_laws(logits: Float[Tensor, "B K Vd"], rows: SamplingRows) -> Float[Tensor, "B K Vd"]:
    """Float32 laws after each row's own temperature, top-k and top-p.

    Any law would do, the rules being exact for all of them; one shaped like the target's is accepted most often.
    """
    num_rows, num_nodes, num_tokens = logits.shape
    return target_law(logits.reshape(-1, num_tokens), rows_per_node(rows, num_nodes)).view(num_rows, num_nodes, -1)


def node_laws(logits: Float[Tensor, "B N V"], rows: SamplingRows) -> Float[Tensor, "B N V"]:
    """The target's law after every node. At temperature 0, and where a logit is NaN, all of it is on the argmax."""
    laws = draft_laws(logits, rows)
    is_law = (rows.temperature > 0)[:, None] & (laws[:, :, 0] >= 0)
    if logits.device.type == "cpu" and is_law.all():
        return laws
    best = torch.zeros_like(laws).scatter_(2, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_law[:, :, None], laws, best)
