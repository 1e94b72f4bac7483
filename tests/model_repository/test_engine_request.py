"""What a request's tensors mean: every input honoured or refused."""

import numpy as np
import pytest

from furcate.builder.errors import RequestError
from furcate.decoding.request import Guide, GuideKind, SamplingParams
from furcate.model_repository.engine_request import EngineDefaults, EngineRequest, Urgency, read_request, read_urgency

DEFAULTS = EngineDefaults(end_ids=(1, 2), vocab_size=10)
DTYPES = {float: np.float32, int: np.int32, bool: np.bool_}


def read(**inputs: object) -> EngineRequest:
    tensors = {
        "input_ids": np.array([[3, 4, 5]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[6]], np.int32),
    }
    for name, value in inputs.items():
        tensors[name] = value if isinstance(value, np.ndarray) else np.array([[value]], DTYPES[type(value)])
    return read_request(tensors, DEFAULTS)


def uint64(value: int) -> np.ndarray:
    return np.array([[value]], np.uint64)


def test_bare_request_is_greedy_and_ends_with_the_targets_ids() -> None:
    asked = read()
    assert asked.prompt_ids == (3, 4, 5)
    assert asked.sampling == SamplingParams(max_tokens=6, end_ids=(1, 2))
    assert (asked.is_streaming, asked.includes_prompt, asked.stop_texts) == (False, False, ())


def test_inputs_that_are_only_filled_in_count_as_left_out() -> None:
    absent = np.array([[b"temperature", b"seed", b"end_id"]], np.object_)
    asked = read(temperature=3.0, seed=uint64(1), end_id=7, runtime_top_k=5, absent_inputs=absent)
    assert asked.sampling == SamplingParams(max_tokens=6, temperature=1.0, top_k=5, end_ids=(1, 2))


@pytest.mark.parametrize("name", ["input_ids", "nonsense"])
def test_only_optional_inputs_can_be_absent(name: str) -> None:
    with pytest.raises(RequestError, match=f"'absent_inputs' names '{name}', which is no optional input"):
        read(absent_inputs=np.array([[name.encode()]], np.object_))


def test_every_input_arrives() -> None:
    asked = read(
        temperature=0.7,
        runtime_top_k=5,
        runtime_top_p=0.9,
        min_p=0.05,
        seed=uint64(2**64 - 1),
        end_id=np.array([[7]], np.int32),
        min_tokens=2,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        streaming=True,
        return_log_probs=True,
        stop_words_list=np.array([[[8, 9], [2, -1]]], np.int32),
        bad_words_list=np.array([[[6], [1]]], np.int32),
        embedding_bias=np.array([[0, 0, 1.5, 0, 0, 0, 0, 0, 0, -2]], np.float32),
        stop_texts=np.array([[b"END", b""]], np.object_),
        guided_decoding_guide_type=np.array([[b"regex"]], np.object_),
        guided_decoding_guide=np.array([[b"a+"]], np.object_),
    )
    assert asked.sampling == SamplingParams(
        max_tokens=6,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        seed=2**64 - 1,
        end_ids=(7,),
        stop_sequences=((8, 9),),
        bad_sequences=((6,),),
        min_tokens=2,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        embedding_bias=((2, 1.5), (9, -2.0)),
        guide=Guide(kind=GuideKind.REGEX, text="a+"),
        returns_log_probs=True,
    )
    assert (asked.is_streaming, asked.stop_texts) == (True, ("END",))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, (0.0, None, None)),
        ({"temperature": 0.5}, (0.5, None, None)),
        ({"runtime_top_k": 5}, (1.0, 5, None)),
        ({"runtime_top_p": 0.5}, (1.0, None, 0.5)),
        ({"temperature": 1.0, "runtime_top_k": 1, "runtime_top_p": 0.0}, (0.0, None, None)),
        ({"temperature": 1.0, "runtime_top_k": 0, "runtime_top_p": 0.0}, (0.0, None, None)),
        ({"temperature": 1.0, "runtime_top_k": 40, "runtime_top_p": 0.0}, (1.0, 40, None)),
        ({"temperature": 0.0, "runtime_top_k": 40}, (0.0, 40, None)),
        ({"temperature": -1.0, "runtime_top_k": 1}, (-1.0, 1, None)),
    ],
)
def test_zeros_of_the_old_clients_mean_no_limit_or_greedy(
    inputs: dict[str, float], expected: tuple[float, int | None, float | None]
) -> None:
    sampling = read(**inputs).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


def test_older_names_work_and_must_agree() -> None:
    assert read(random_seed=uint64(5)).sampling.seed == 5
    assert read(random_seed=uint64(5), seed=uint64(5)).sampling.seed == 5
    assert read(min_length=3).sampling.min_tokens == 3
    with pytest.raises(RequestError, match="'min_tokens' is 2, but its older name 'min_length' says 3"):
        read(min_length=3, min_tokens=2)


def test_end_id_can_be_none_several_or_wrong() -> None:
    assert read(end_id=-1).sampling.end_ids == ()
    assert read(end_id=np.array([[4, 5]], np.int32)).sampling.end_ids == (4, 5)
    with pytest.raises(RequestError, match="'end_id' is 10, but the vocabulary has the tokens 0 to 9; -1 is none"):
        read(end_id=10)


def test_input_lengths_cuts_padding() -> None:
    assert read(input_lengths=2).prompt_ids == (3, 4)
    with pytest.raises(RequestError, match="'input_lengths' is 4, but 'input_ids' has 3 tokens"):
        read(input_lengths=4)


def test_bias_that_is_not_finite_is_refused() -> None:
    with pytest.raises(RequestError, match="'embedding_bias' holds a value that is not finite"):
        read(embedding_bias=np.full((1, 10), np.inf, np.float32))


def test_guides_need_a_known_kind_and_all_but_json_a_text() -> None:
    def guided(kind: str | None, text: str | None) -> Guide | None:
        given = {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}
        arrays = {name: np.array([[value.encode()]], np.object_) for name, value in given.items() if value is not None}
        return read(**arrays).sampling.guide

    assert guided(None, None) is guided("", "") is None
    assert guided("json", None) == guided("json", "") == Guide(kind=GuideKind.JSON)
    assert guided("json_schema", "{}") == Guide(kind=GuideKind.JSON_SCHEMA, text="{}")
    with pytest.raises(
        RequestError, match="'guided_decoding_guide_type' is 'structural_tag'; it can be json, json_schema,"
    ):
        guided("structural_tag", "{}")
    with pytest.raises(RequestError, match="'guided_decoding_guide_type' is ''; it can be"):
        guided(None, "a+")
    with pytest.raises(RequestError, match="is 'regex', but 'guided_decoding_guide' is empty; send both"):
        guided("regex", None)


def test_a_request_s_turn_comes_from_its_parameters_and_triton_s_own_timeout() -> None:
    assert read_urgency({}, 0) == Urgency(priority=0, timeout_s=None)
    assert read_urgency({"priority_level": -3, "timeout": 1_500_000}, 0) == Urgency(priority=-3, timeout_s=1.5)
    assert read_urgency({"cancel_id": "me"}, 2_000_000) == Urgency(timeout_s=2.0)


@pytest.mark.parametrize("name", ["priority_level", "timeout"])
@pytest.mark.parametrize("value", ["3", 1.5, True, None])
def test_a_parameter_that_is_no_whole_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"the request's parameter '{name}' is .*; it must be a whole number"):
        read_urgency({name: value}, 0)
