"""Log-probabilities of emitted tokens.

B batch rows, N nodes, A accepted nodes, V vocabulary. They are the log-softmax of the target's logits as they left it: before
penalties, bans, bias, temperature, top-k and top-p (TensorRT-LLM's output_log_probs), so they say how likely the model itself
found the text, whatever was asked of its sampling.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def path_log_probs(
    logits: Float[Tensor, "B N V"], path_nodes: Int64[Tensor, "B A"], token_ids: Int64[Tensor, "B A"]
) -> Float[Tensor, "B A"]:
    """The log-probability of token_ids[b, a] after node path_nodes[b, a]."""
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits[rows, path_nodes].float().log_softmax(-1).gather(2, token_ids[:, :, None]).squeeze(2)


def chosen_logits(
    logits: Float[Tensor, "B N V"], path_nodes: Int64[Tensor, "B A"], token_ids: Int64[Tensor, "B A"]
) -> Float[Tensor, "B A"]:
    """The logit of token_ids[b, a] after node path_nodes[b, a]: NaN or infinite where no token could rightly be chosen."""
    return logits.flatten(1).gather(1, path_nodes * logits.shape[2] + token_ids)
