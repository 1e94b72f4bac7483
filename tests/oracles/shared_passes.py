"""An executor that makes thousands of rows of one prompt cheap without changing what they say.

Rows that are alike (same text so far, same tree) are run once by the target; a row alike gets a copy of logits, features and of
the K/V in its own pages. And only some of the vocabulary is shown: where every text's top-k lies within it, the law after top-k is
that of the whole, and the step's work over it is a hundredth. All else (drafting, acceptance, commit) runs row by row.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from furcate.builder.network.inputs import PassInputs, TargetOutputs
from furcate.decoding.executors.torch import TorchExecutor


class SharedPasses:
    """`TorchExecutor` for rows whose first `num_shared` pages are the same ones.

    Token ids are places in `vocabulary`, ascending token ids; None shows all. `histories` say what each row has written so far.
    """

    def __init__(self, executor: TorchExecutor, num_shared: int, vocabulary: Tensor | None = None) -> None:
        self.alone = executor
        self.vocabulary = torch.arange(executor.manifest.target.vocab_size) if vocabulary is None else vocabulary
        self.histories: list[tuple[int, ...]] = []
        self._num_shared = num_shared
        self._draft_ids = torch.arange(0)
        if executor.head is not None:
            targets = executor.target_token_ids(torch.arange(executor.head.draft_vocab_size))
            self._draft_ids = torch.isin(targets, self.vocabulary).nonzero().squeeze(1)
            self._targets = torch.searchsorted(self.vocabulary, targets[self._draft_ids])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone, name)

    def head_pass(self, hidden: Tensor, inputs: PassInputs) -> Tensor:
        return self.alone.head_pass(hidden, replace(inputs, token_ids=self.vocabulary[inputs.token_ids]))

    def head_logits(self, hidden: Tensor) -> Tensor:
        return self.alone.head_logits(hidden)[..., self._draft_ids]

    def target_token_ids(self, draft_ids: Tensor) -> Tensor:
        return self._targets[draft_ids]

    def target_laws(self, laws: Tensor) -> Tensor:
        return laws.new_zeros(*laws.shape[:2], len(self.vocabulary)).index_copy_(2, self._targets, laws)

    def target_pass(self, inputs: PassInputs, logit_rows: Tensor | None = None) -> TargetOutputs:
        assert logit_rows is None and inputs.tree_mask is not None
        firsts: dict[tuple, int] = {}
        places = []
        for row, history in enumerate(self.histories):
            key = (history, *inputs.token_ids[row].tolist(), *inputs.tree_mask[row].flatten().tolist())
            places.append(firsts.setdefault(key, len(firsts)))
        place_of = torch.tensor(places)
        first_rows = torch.tensor([places.index(place) for place in range(len(firsts))])
        tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        alike = {name: value[first_rows] for name, value in tensors.items() if isinstance(value, Tensor)}
        alike["token_ids"] = self.vocabulary[alike["token_ids"]]
        outputs = self.alone.target_pass(replace(inputs, **alike))
        size = self.alone.manifest.page_size
        num_pages = -(-(int(inputs.cache_lengths.max()) + inputs.token_ids.shape[1]) // size)
        self._copy_pages(inputs.page_table[:, self._num_shared : num_pages].long(), first_rows, place_of)
        features = outputs.features[place_of] if outputs.features is not None else None
        return TargetOutputs(logits=outputs.logits[..., self.vocabulary][place_of], features=features)

    def _copy_pages(self, pages: Tensor, first_rows: Tensor, place_of: Tensor) -> None:
        is_copy = torch.ones(len(pages), dtype=torch.bool)
        is_copy[first_rows] = False
        sources = pages[first_rows[place_of[is_copy]]].flatten()
        pool = self.alone.target_pool
        pool[:, pages[is_copy].flatten()] = pool[:, sources]
