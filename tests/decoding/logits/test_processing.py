"""Every node's logits are processed as its own path says, whoever shares the batch."""

import numpy as np
import plain_logits
import pytest
import torch

from furcate.decoding.logits.processing import TextLogits, processing_of, text_logits_of
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.tree import tree_from_parents

VOCAB = 13
CPU = torch.device("cpu")
PARAMS = {
    "repetition": {"repetition_penalty": 1.7},
    "encouraged repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.4},
    "bias": {"embedding_bias": ((3, 2.5), (0, -4.0), (3, 0.25))},
    "bad words": {"bad_sequences": ((4,), (2, 5), (5, 2), (1, 1, 5), (6, 6, 6, 6))},
    "min_tokens": {"min_tokens": 5, "end_ids": (0, 7), "stop_sequences": ((1,), (5, 2), (2, 2, 2))},
}
PARAMS["all"] = {name: value for params in PARAMS.values() for name, value in params.items()}


def random_tree(generator: torch.Generator, num_rows: int, num_nodes: int):
    parents = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
    for node in range(1, num_nodes):
        parents[:, node] = torch.randint(max(0, node - 4), node, (num_rows,), generator=generator)
    # Few tokens, so that paths repeat them and match the banned sequences.
    token_ids = torch.randint(1, 8, (num_rows, num_nodes), generator=generator)
    num_used = torch.randint(1, num_nodes + 1, (num_rows,), generator=generator)
    parents[torch.arange(num_nodes) >= num_used[:, None]] = 0
    return tree_from_parents(token_ids, parents, num_used, num_nodes)


def text_of(params: SamplingParams, generator: torch.Generator, root_id: int) -> tuple[tuple, tuple, TextLogits | None]:
    """A prompt and an answer that ends in the root, and the processing that has seen them."""
    length, answered = torch.randint(1, 9, (2,), generator=generator).tolist()
    prompt = tuple(torch.randint(1, 8, (length,), generator=generator).tolist())
    answer = (*torch.randint(1, 8, (answered - 1,), generator=generator).tolist(), root_id)
    text = text_logits_of(Request(request_id=0, prompt_ids=prompt, sampling=params), VOCAB, CPU, None)
    if text is not None:
        text.extend(list(answer[: answered // 2]) or [answer[0]])
        rest = list(answer[max(answered // 2, 1) :])
        if rest:
            text.extend(rest)
    return prompt, answer, text


def path_below_root(tree, row: int, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node > 0:
        path.insert(0, int(tree.token_ids[row, node]))
        node = int(tree.parents[row, node])
    return tuple(path)


@pytest.mark.parametrize("name", PARAMS)
def test_each_node_gets_what_plain_decoding_would_give_its_path(name):
    generator = torch.Generator().manual_seed(5)
    params = SamplingParams(max_tokens=20, **PARAMS[name])
    num_checked = 0
    for _ in range(12):
        tree = random_tree(generator, 3, 9)
        texts = [text_of(params, generator, int(root)) for root in tree.token_ids[:, 0]]
        logits = torch.randn(3, 9, VOCAB, generator=generator) * 3
        before = logits.clone()
        processing = processing_of([text for _, _, text in texts], CPU)
        if processing is None:
            continue
        found = processing.process(logits, tree).numpy()
        assert torch.equal(logits, before), "the target's own logits are needed later"
        for row, (prompt, answer, _) in enumerate(texts):
            for node in range(int(tree.num_nodes[row])):
                expected = plain_logits.processed(
                    before[row, node].tolist(), params, prompt, answer + path_below_root(tree, row, node)
                )
                # Both are single float32 operations in the same order.
                np.testing.assert_array_equal(found[row, node], expected)
                num_checked += 1
    assert num_checked > 50


def test_rows_do_not_influence_each_other_bit_by_bit():
    generator = torch.Generator().manual_seed(6)
    params = [SamplingParams(max_tokens=20, **values) for values in PARAMS.values()] + [SamplingParams(max_tokens=20)]
    tree = random_tree(generator, len(params), 12)
    texts = [text_of(p, generator, int(root))[2] for p, root in zip(params, tree.token_ids[:, 0], strict=True)]
    logits = torch.randn(len(params), 12, VOCAB, generator=generator)
    processing = processing_of(texts, CPU)
    assert processing is not None
    together = processing.process(logits, tree)
    for row, text in enumerate(texts):
        alone_tree = tree_from_parents(
            tree.token_ids[row : row + 1], tree.parents[row : row + 1], tree.num_nodes[row : row + 1], 12
        )
        alone = processing_of([text], CPU)
        expected = alone.process(logits[row : row + 1], alone_tree)[0] if alone is not None else logits[row]
        assert torch.equal(together[row], expected)


def test_nothing_is_processed_for_requests_that_ask_for_nothing_or_whose_minimum_is_reached():
    plain = Request(
        request_id=0, prompt_ids=(1,), sampling=SamplingParams(max_tokens=9, end_ids=(0,), stop_sequences=((1,),))
    )
    assert text_logits_of(plain, VOCAB, CPU, None) is None
    assert processing_of([None, None], CPU) is None
    sampling = SamplingParams(max_tokens=9, end_ids=(0,), stop_sequences=((3, 4),), min_tokens=2)
    text = text_logits_of(Request(request_id=0, prompt_ids=(1,), sampling=sampling), VOCAB, CPU, None)
    assert text is not None
    assert processing_of([text], CPU) is not None
    text.extend([5, 5, 3])
    assert processing_of([text], CPU) is None


def test_rows_of_another_batch_dtype_keep_their_values():
    """Processing widens to float32: bfloat16 logits of untouched rows are the same numbers."""
    request = Request(request_id=0, prompt_ids=(1,), sampling=SamplingParams(max_tokens=9, presence_penalty=1.0))
    tree = random_tree(torch.Generator().manual_seed(1), 2, 3)
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()
    processing = processing_of([text_logits_of(request, VOCAB, CPU, None), None], CPU)
    assert processing is not None
    assert torch.equal(processing.process(logits, tree)[1], logits[1].float())
