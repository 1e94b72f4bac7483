"""A drafter that knows the texts, so that deep paths are accepted on models whose own heads would guess nothing."""

import torch

from furcate.decoding.drafters.proposer import Proposal


class KnowingProposer:
    """Drafts the known continuation with chance `accuracy` at each node of its path, and random tokens beside it.

    `texts` are what the live requests of `scheduler` are expected to answer, by request id.
    """

    num_held_slots = 0

    def __init__(self, scheduler, texts, accuracy=0.9, seed=0):
        self.scheduler = scheduler
        self.texts = texts
        self.accuracy = accuracy
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab_size = scheduler.manifest.target.vocab_size

    def start(self, rows):
        owners = {sequence.pages[0]: sequence for sequence in self.scheduler.sequences.values() if sequence.pages}
        futures = []
        for page, cache_length in zip(rows.page_table[:, 0].tolist(), rows.cache_lengths.tolist(), strict=True):
            request = owners[page].request
            futures.append(self.texts[request.request_id][cache_length - len(request.prompt_ids) + 1 :])
        return KnowingDraft(self, futures)

    def observe(self, committed):
        return torch.zeros(len(committed.counts), 1)

    def target_token_ids(self, draft_ids):
        return draft_ids

    def target_laws(self, laws):
        return laws


class KnowingDraft:
    def __init__(self, proposer, futures):
        self.proposer = proposer
        self.futures = futures
        self.is_known = [[True] for _ in futures]
        self.level = 0

    def propose(self, num_children):
        generator, vocab_size = self.proposer.generator, self.proposer.vocab_size
        token_ids = torch.stack(
            [
                torch.stack([torch.randperm(vocab_size, generator=generator)[:num_children] for _ in row])
                for row in self.is_known
            ]
        )
        for row, future in enumerate(self.futures):
            for place, is_known in enumerate(self.is_known[row]):
                if (
                    is_known
                    and self.level < len(future)
                    and float(torch.rand((), generator=generator)) < self.proposer.accuracy
                ):
                    known, children = future[self.level], token_ids[row, place]
                    rank = int(torch.randint(min(2, num_children), (), generator=generator))
                    children[children == known] = children[rank].item()
                    children[rank] = known
        log_probs = -torch.arange(1.0, num_children + 1).expand(token_ids.shape)
        return Proposal(log_probs=log_probs, token_ids=token_ids)

    def descend(self, parents, token_ids):
        self.is_known = [
            [
                self.is_known[row][parent]
                and self.level < len(self.futures[row])
                and token == self.futures[row][self.level]
                for parent, token in zip(parents[row].tolist(), token_ids[row].tolist(), strict=True)
            ]
            for row in range(len(self.futures))
        ]
        self.level += 1
