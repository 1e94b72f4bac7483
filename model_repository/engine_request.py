"""What a request to `tensorrt_llm` asks for, read from its tensors; nothing is ignored in silence."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from furcate.builder.errors import RequestError
from furcate.decoding.request import Guide, GuideKind, SamplingParams
from furcate.model_repository.io_table import text_from_bytes
from furcate.model_repository.tables import TENSORRT_LLM
from furcate.model_repository.word_lists import sequences_from_tensor

LONGEST_RESPONSE_INTERVAL_MS = 60_000
"""A stream whose client is gone is noticed with its next response, so there must be one now and then."""


@dataclass(frozen=True, kw_only=True)
class EngineDefaults:
    """What a request may leave to the engine."""

    end_ids: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One request, checked as far as tensors can tell; the scheduler checks the values."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    is_streaming: bool
    includes_prompt: bool
    stop_texts: tuple[str, ...]


def read_request(tensors: Mapping[str, np.ndarray], defaults: EngineDefaults) -> EngineRequest:
    """The request in `tensors` (with batch dimension); RequestError says in a sentence what is not right."""
    values = _Values(_without_filled_in(TENSORRT_LLM.read(tensors)))
    is_streaming = values.flag("streaming", False)
    includes_prompt = not values.flag("exclude_input_in_output", True)
    if is_streaming and includes_prompt:
        raise RequestError(
            "'exclude_input_in_output' is false, but a stream never repeats the prompt; leave it out or send true."
        )
    return EngineRequest(
        prompt_ids=_prompt_ids(values),
        sampling=_sampling(values, defaults),
        is_streaming=is_streaming,
        includes_prompt=includes_prompt,
        stop_texts=_stop_texts(values),
    )


def _without_filled_in(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs without those that `absent_inputs` names."""
    absent = {text_from_bytes("absent_inputs", item) for item in arrays.get("absent_inputs", ())}
    unknown = absent - {field.name for field in TENSORRT_LLM.inputs if field.is_optional}
    if unknown:
        raise RequestError(f"'absent_inputs' names '{min(unknown)}', which is no optional input; name only those.")
    return {name: value for name, value in arrays.items() if name not in absent}


@dataclass(frozen=True, kw_only=True)
class Urgency:
    """Which requests come first, and how long this one may take."""

    priority: int = 0
    timeout_s: float | None = None


def read_urgency(parameters: Mapping[str, object], timeout_us: int) -> Urgency:
    """What a request's parameters say of it: `priority_level`, and Triton's `timeout` in microseconds (0 is none).

    A gRPC request carries its timeout in a field of its own, `timeout_us`; HTTP's generate among the parameters.
    """
    return Urgency(
        priority=_whole_parameter(parameters, "priority_level", 0),
        timeout_s=(_whole_parameter(parameters, "timeout", timeout_us) or 0) / 1e6 or None,
    )


def read_response_interval_s(parameters: Mapping[str, object]) -> float:
    """How long a stream's tokens are gathered for one response: its parameter `response_interval_ms`, in seconds."""
    interval_ms = _whole_parameter(parameters, "response_interval_ms", 0)
    if not 0 <= interval_ms <= LONGEST_RESPONSE_INTERVAL_MS:
        raise RequestError(
            f"the request's parameter 'response_interval_ms' is {interval_ms}; it must be from 0 (every step) to"
            f" {LONGEST_RESPONSE_INTERVAL_MS}."
        )
    return interval_ms / 1e3


def _whole_parameter(parameters: Mapping[str, object], name: str, default: int) -> int:
    value = parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"the request's parameter '{name}' is {value!r}; it must be a whole number.")
    return value


class _Values:
    """The inputs that came, by name."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def flag(self, name: str, default: bool) -> bool:
        """The value of a BOOL [1] tensor, or `default` when it did not come."""
        return bool(self.arrays[name][0]) if name in self.arrays else default

    def integer(self, name: str) -> int | None:
        """The value of an integer [1] tensor, or None when it did not come."""
        return int(self.arrays[name][0]) if name in self.arrays else None

    def integer_of(self, name: str, older_name: str) -> int | None:
        """The value under either name; RequestError when the two differ."""
        value, older = self.integer(name), self.integer(older_name)
        if value is not None and older is not None and value != older:
            raise RequestError(
                f"'{name}' is {value}, but its older name '{older_name}' says {older}; send only '{name}'."
            )
        return older if value is None else value

    def number(self, name: str) -> float | None:
        """The value of an FP32 [1] tensor as its shortest decimal (0.7, not 0.699999988), or None."""
        return float(str(self.arrays[name][0])) if name in self.arrays else None

    def text(self, name: str) -> str:
        """The value of a STRING [1] tensor; empty when it did not come."""
        return text_from_bytes(name, self.arrays[name][0]) if name in self.arrays else ""

    def number_or(self, name: str, default: float) -> float:
        """The same, or `default` when it did not come."""
        value = self.number(name)
        return default if value is None else value


def _prompt_ids(values: _Values) -> tuple[int, ...]:
    ids, length = values.arrays["input_ids"], int(values.arrays["input_lengths"][0])
    if not 0 <= length <= len(ids):
        raise RequestError(f"'input_lengths' is {length}, but 'input_ids' has {len(ids)} tokens; it can be 0 to that.")
    return tuple(ids[:length].tolist())


def _stop_texts(values: _Values) -> tuple[str, ...]:
    texts = tuple(text_from_bytes("stop_texts", item) for item in values.arrays.get("stop_texts", ()))
    return tuple(text for text in texts if text)


def _sampling(values: _Values, defaults: EngineDefaults) -> SamplingParams:
    temperature, top_k, top_p = _temperature_top_k_top_p(values)
    arrays = values.arrays
    return SamplingParams(
        max_tokens=int(arrays["request_output_len"][0]),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=values.number("min_p") or None,
        seed=values.integer_of("seed", "random_seed"),
        end_ids=_end_ids(values, defaults),
        stop_sequences=_sequences(values, "stop_words_list"),
        bad_sequences=_sequences(values, "bad_words_list"),
        min_tokens=values.integer_of("min_tokens", "min_length") or 0,
        repetition_penalty=values.number_or("repetition_penalty", 1.0),
        presence_penalty=values.number_or("presence_penalty", 0.0),
        frequency_penalty=values.number_or("frequency_penalty", 0.0),
        embedding_bias=_embedding_bias(values, defaults),
        guide=_guide(values),
        returns_log_probs=values.flag("return_log_probs", False),
    )


def _temperature_top_k_top_p(values: _Values) -> tuple[float, int | None, float | None]:
    """The old ensemble's meaning of these three, without its zeros: None is no limit, temperature 0 is greedy.

    Its clients send top_k 1 (greedy) or top_k 0 (no limit), and top_p 0: no limit beside a top_k, greedy without one.
    """
    top_k, top_p = values.integer("runtime_top_k"), values.number("runtime_top_p")
    temperature = values.number_or("temperature", 0.0 if top_k is None and top_p is None else 1.0)
    is_greedy = top_k == 1 or (top_p == 0.0 and not top_k)
    if is_greedy and temperature >= 0:
        return 0.0, None, None
    return temperature, top_k or None, top_p or None


def _guide(values: _Values) -> Guide | None:
    kind, text = values.text("guided_decoding_guide_type"), values.text("guided_decoding_guide")
    if not kind and not text:
        return None
    if kind not in list(GuideKind):
        raise RequestError(
            f"'guided_decoding_guide_type' is '{kind}'; it can be {', '.join(GuideKind)}, and goes with"
            " 'guided_decoding_guide'."
        )
    if not text and kind != GuideKind.JSON:
        raise RequestError(
            f"'guided_decoding_guide_type' is '{kind}', but 'guided_decoding_guide' is empty; send both."
        )
    return Guide(kind=GuideKind(kind), text=text)


def _end_ids(values: _Values, defaults: EngineDefaults) -> tuple[int, ...]:
    if "end_id" not in values.arrays:
        return defaults.end_ids
    end_ids = tuple(values.arrays["end_id"].tolist())
    if end_ids == (-1,):
        return ()
    for end_id in end_ids:
        if not 0 <= end_id < defaults.vocab_size:
            raise RequestError(
                f"'end_id' is {end_id}, but the vocabulary has the tokens 0 to {defaults.vocab_size - 1}; -1 is none."
            )
    return end_ids


def _sequences(values: _Values, name: str) -> tuple[tuple[int, ...], ...]:
    return sequences_from_tensor(name, values.arrays[name]) if name in values.arrays else ()


def _embedding_bias(values: _Values, defaults: EngineDefaults) -> tuple[tuple[int, float], ...]:
    bias = values.arrays.get("embedding_bias")
    if bias is None or bias.size == 0:
        return ()
    if len(bias) != defaults.vocab_size:
        raise RequestError(
            f"'embedding_bias' has {len(bias)} values, but the vocabulary has {defaults.vocab_size} tokens; send one"
            " for each."
        )
    if not np.all(np.isfinite(bias)):
        raise RequestError("'embedding_bias' holds a value that is not finite; send finite numbers.")
    return tuple((int(token), float(bias[token])) for token in np.flatnonzero(bias))
