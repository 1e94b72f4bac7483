"""How often each rank of each depth is what the target says, and what trees would have accepted: what tuning predicts tau from.

Text is decoded plainly once; then the drafter is led along it token by token, so that every depth's ranks are seen given that
all before were right. No target pass is needed for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from furcate.decoding.drafters.grow import Grower
from furcate.decoding.drafters.proposer import DraftRows, Proposer
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.known_text import TextPiece, committed, observe_prompt, target_pieces
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.tree import Tree
from furcate.decoding.tree_shape import TreeShape

NO_RANK = -1
"""Of a token that is none of the ranks looked at."""


@dataclass(kw_only=True)
class Ranks:
    """What rank the drafter gave to each token that the target wrote.

    texts[t][i][d]: at place i of text t, the rank of the token d + 1 places on, drafted behind the tokens before it; a row ends
    early with NO_RANK, where the token was not among the ranks looked at, or with the text.
    """

    max_depth: int
    num_ranks: int
    texts: list[list[list[int]]] = field(default_factory=list)

    def rates(self) -> list[list[float]]:
        """rates[d][r]: the chance of rank r at depth d + 1, given that the path above was right; every place counts alike."""
        tries = [0] * self.max_depth
        hits = [[0] * self.num_ranks for _ in range(self.max_depth)]
        for row in (row for text in self.texts for row in text):
            for depth, rank in enumerate(row):
                tries[depth] += 1
                if rank != NO_RANK:
                    hits[depth][rank] += 1
        return [[hit / max(tried, 1) for hit in row] for row, tried in zip(hits, tries, strict=True)]

    def tau_of(self, shape: TreeShape) -> float:
        """Tokens a step of this shape, had it decoded these texts: each step begins where the one before ended.

        So steps stand more often where the text is hard to guess than the average place does, which the product of rates does
        not know. Steps that the end of a text may have cut short are left out, but for the only step of a text.
        """
        paths, steps, tokens = set(shape.paths), 0, 0
        for text in self.texts:
            place = 0
            while place == 0 or place + max(shape.max_depth, 1) <= len(text):
                ranks = tuple(text[place])
                accepted = next(depth for depth in reversed(range(len(ranks) + 1)) if ranks[:depth] in paths)
                steps, tokens, place = steps + 1, tokens + accepted + 1, place + accepted + 1
        return tokens / steps if steps else 1.0


class Follower:
    """Leads a drafter along texts that the target wrote, gathering ranks and what whole trees would have accepted."""

    def __init__(self, executor: EngineExecutor, proposer: Proposer, max_depth: int, num_ranks: int) -> None:
        self.executor, self.proposer = executor, proposer
        self.ranks = Ranks(max_depth=max_depth, num_ranks=num_ranks)
        self.accepted: dict[str, list[int]] = {}
        """By tree, the accepted drafts of each of its steps; each step begins where the one before ended."""

    @torch.inference_mode()
    def follow(
        self, prompt: Sequence[int], text: Sequence[int], growers: dict[str, Grower], sampling: SamplingRows
    ) -> None:
        """Walks along `text` (two tokens at least) behind `prompt`, growing each tree where its last one ended."""
        executor = self.executor
        tokens = [*prompt, *text]
        pages = -(-(len(tokens) + 2 * 128) // executor.manifest.page_size)
        table = torch.arange(pages, dtype=torch.int32, device=executor.device)[None]
        pieces = [piece.features for piece in target_pieces(executor, tokens, table)]
        features = torch.cat([piece for piece in pieces if piece is not None], 1) if pieces[0] is not None else None
        state = observe_prompt(executor, self.proposer, prompt, text[0], table)
        next_place = dict.fromkeys(growers, len(prompt))
        self.ranks.texts.append([])
        for place in range(len(prompt), len(tokens) - 1):
            rows = DraftRows(
                states=state,
                root_ids=torch.tensor([tokens[place]], device=executor.device),
                cache_lengths=torch.tensor([place], dtype=torch.int32, device=executor.device),
                page_table=table,
            )
            truth = tokens[place + 1 :]
            for name, grower in growers.items():
                if place == next_place[name]:
                    tree = grower.grow(self.proposer, rows, sampling)
                    accepted = accepted_drafts(tree, truth)
                    next_place[name] += accepted + 1
                    if place == len(prompt) or int(tree.depths[0].max()) <= len(truth):
                        self.accepted.setdefault(name, []).append(accepted)
            self.ranks.texts[-1].append(self._ranks_of(rows, truth))
            own = features[:, place : place + 1] if features is not None else None
            piece = TextPiece(token_ids=tokens[place : place + 1], start=place, features=own)
            next_ids = tokens[place + 1 : place + 2]
            state = self.proposer.observe(committed(executor, piece, next_ids, table, is_prompt=False))

    def _ranks_of(self, rows: DraftRows, truth: Sequence[int]) -> list[int]:
        draft, ranks = self.proposer.start(rows), []
        truth = truth[: self.ranks.max_depth]
        for depth, token in enumerate(truth):
            proposed = draft.propose(self.ranks.num_ranks).token_ids[0, 0].tolist()
            if token not in proposed:
                return [*ranks, NO_RANK]
            ranks.append(proposed.index(token))
            if depth + 1 < len(truth):
                draft.descend(torch.zeros_like(rows.root_ids)[:, None], torch.full_like(rows.root_ids, token)[:, None])
        return ranks


def accepted_drafts(tree: Tree, truth: Sequence[int]) -> int:
    """How many of the tokens to come the tree's first row has on one path."""
    tokens, parents, count = tree.token_ids[0].tolist(), tree.parents[0].tolist(), int(tree.num_nodes[0])
    node, depth = 0, 0
    for token in truth:
        below = [child for child in range(1, count) if parents[child] == node and tokens[child] == token]
        if not below:
            break
        node, depth = below[0], depth + 1
    return depth
