"""transformers' continuous batching (`generate_batch`) under the same load, for comparison."""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from furcate.decoding.prompts import Prompt


class ContinuousBatching:
    """The target under transformers' own continuous batching, so many sequences at once."""

    def __init__(self, target: Path, dtype: torch.dtype, end_ids: tuple[int, ...]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, attn_implementation="sdpa").eval()
        self._end_ids = list(end_ids)

    def tokens_per_second(self, prompts: list[Prompt], max_tokens: int) -> float:
        """Greedy texts of all these prompts at once: tokens generated over the time of all."""
        settings = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=self._end_ids, pad_token_id=0
        )
        start = time.perf_counter()
        outputs = self._model.generate_batch(
            [list(prompt.input_ids) for prompt in prompts],
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512),
            warmup=False,
        )
        seconds = time.perf_counter() - start
        assert len(outputs) == len(prompts), "transformers lost a request"
        return sum(len(output.generated_tokens) for output in outputs.values()) / seconds
