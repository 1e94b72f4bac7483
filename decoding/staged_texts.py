"""The texts of requests that process logits, where the logits are: beside the target.

A request's text comes with its prompt's last chunk and is kept under the sequence's key; each step says which tokens it got since,
and which keys are over.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.logits.guide import GuideCompiler
from furcate.decoding.logits.processing import LogitsProcessing, TextLogits, processing_of, text_logits_of
from furcate.decoding.request import Guide, GuideKind, Request, SamplingParams


def json_from_text(text: TextLogits) -> bytes:
    """What `StagedTexts` needs to make the text again, before its first token."""
    return json.dumps({"prompt_ids": text.history, "sampling": asdict(text.sampling)}).encode()


class StagedTexts:
    """The live texts of one engine."""

    def __init__(self, executor: EngineExecutor) -> None:
        self._executor = executor
        self._vocab_size = executor.manifest.target.vocab_size
        self._guides = GuideCompiler(executor.tokenizer_dir, executor.manifest.eos_token_ids, self._vocab_size)
        self._texts: dict[int, TextLogits] = {}

    def of_prompt(self, arrays: Mapping[str, np.ndarray]) -> TextLogits | None:
        """The text that a prompt's last chunk brings with it; None when it brings none."""
        self._forget(arrays)
        if "text" not in arrays or not arrays["text"].reshape(-1)[0]:
            return None
        value = json.loads(arrays["text"].reshape(-1)[0])
        request = Request(request_id=0, prompt_ids=tuple(value["prompt_ids"]), sampling=_sampling(value["sampling"]))
        sampling = request.sampling
        guide = self._guides.compile(sampling.guide, sampling.end_ids) if sampling.guide is not None else None
        text = text_logits_of(request, self._vocab_size, self._executor.device, guide)
        assert text is not None, "only texts that process logits are sent"
        self._texts[int(arrays["keys"][0, 0])] = text
        return text

    def processing(self, arrays: Mapping[str, np.ndarray]) -> LogitsProcessing | None:
        """The processing of a step's rows, once their texts have taken in the tokens of the last step."""
        self._forget(arrays)
        if not self._texts:
            return None
        texts = [self._texts.get(key) for key in arrays["keys"][:, 0].tolist()]
        for text, ids, count in zip(texts, arrays["kept_ids"], arrays["num_kept"][:, 0].tolist(), strict=True):
            if text is not None and count:
                text.extend(ids[:count].tolist())
        return processing_of(texts, self._executor.device)

    def _forget(self, arrays: Mapping[str, np.ndarray]) -> None:
        for key in arrays["ended_keys"][0].tolist():
            self._texts.pop(key, None)


def _sampling(value: dict) -> SamplingParams:
    lists = ("end_ids", "stop_sequences", "bad_sequences", "embedding_bias")
    frozen = {name: tuple(tuple(item) if isinstance(item, list) else item for item in value[name]) for name in lists}
    guide = value["guide"]
    if guide is not None:
        guide = Guide(kind=GuideKind(guide["kind"]), text=guide["text"])
    return SamplingParams(**{**value, **frozen, "guide": guide})
