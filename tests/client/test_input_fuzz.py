"""Whatever is sent to the real server gets an answer or a sentence; nothing hangs, no model dies, others are not disturbed."""

import queue

import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.utils import np_to_triton_dtype

from furcate.client import Client
from furcate.client.messages import plain_message
from furcate.client.server import TritonServer
from furcate.model_repository.io_table import NUMPY_DTYPES, Field
from furcate.model_repository.tables import ENSEMBLE, TENSORRT_LLM

pytestmark = pytest.mark.server

PATIENCE_S = 60.0
EXTREMES = {
    "INT32": st.sampled_from([-(2**31), -1, 0, 1, 7, 300, 2**31 - 1]),
    "INT64": st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]),
    "UINT64": st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    # Powers of two: hypothesis wants values that the dtype holds exactly.
    "FP32": st.sampled_from([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 2.0**-99, 0.5, 1.0, 2.0, 2.0**99]),
    "FP16": st.sampled_from([0.0, 1.0, float("nan")]),
    "BOOL": st.booleans(),
    "STRING": st.sampled_from([b"", b"Hello", b"\xff\xfe", b"\x00", "🌳".encode(), b"x" * 3000, b'{"type": "object"}']),
}
BASES = {
    "ensemble": {"text_input": np.array([[b"Hello"]], object), "max_tokens": np.array([[4]], np.int32)},
    "tensorrt_llm": {
        "input_ids": np.array([[5, 6]], np.int32),
        "input_lengths": np.array([[2]], np.int32),
        "request_output_len": np.array([[4]], np.int32),
    },
}


def tensors(field: Field) -> st.SearchStrategy[np.ndarray]:
    """Tensors for a field: mostly of its dtype and rank, with values at the edges; some of other shapes and dtypes."""
    right = tuple(st.just(size) if size > 0 else st.integers(0, 4) for size in field.shape)
    shapes = st.one_of(
        st.tuples(st.just(1), *right), st.tuples(st.just(1), *right), arrays.array_shapes(max_dims=4, max_side=3)
    )
    dtypes = st.sampled_from([field.dtype] * 6 + ["INT32", "FP32", "STRING", "BOOL", "INT64"])
    return st.tuples(shapes, dtypes).flatmap(
        lambda pair: arrays.arrays(NUMPY_DTYPES[pair[1]], pair[0], elements=EXTREMES[pair[1]], fill=st.nothing())
    )


def requests() -> st.SearchStrategy[tuple[str, dict[str, np.ndarray]]]:
    """A model, and its inputs: the required ones, and up to four fields that may be anything."""

    def of(model: str, table: tuple[Field, ...]) -> st.SearchStrategy[tuple[str, dict[str, np.ndarray]]]:
        changes = st.lists(st.sampled_from(table), min_size=1, max_size=4, unique_by=lambda field: field.name).flatmap(
            lambda fields: st.fixed_dictionaries({field.name: tensors(field) for field in fields})
        )
        return changes.map(lambda changed: (model, {**BASES[model], **changed}))

    return st.one_of(of("ensemble", ENSEMBLE.inputs), of("tensorrt_llm", TENSORRT_LLM.inputs))


def outcome(server: TritonServer, model: str, inputs: dict[str, np.ndarray]) -> str | None:
    """The error's sentence, or None after a whole answer; queue.Empty when there is neither."""
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        given = []
        for name, array in inputs.items():
            given.append(
                triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
            )
        client.async_stream_infer(model, given, enable_empty_final_response=True)
        try:
            while True:
                result, error = answers.get(timeout=PATIENCE_S)
                if error is not None:
                    return plain_message(error.message())
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return None
        finally:
            client.stop_stream()


def fuzz(server: TritonServer, num_examples: int) -> None:
    outcomes: list[str | None] = []

    @seed(20)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def check(request: tuple[str, dict[str, np.ndarray]]) -> None:
        message = outcome(server, *request)
        outcomes.append(message)
        assert message is None or (
            "\n" not in message and "Traceback" not in message and not message.startswith("Server fault")
        ), (message, request)

    with Client(server.grpc_url, deadline_s=PATIENCE_S) as client:
        before = client.generate("Hello", max_tokens=12, end_id=-1)
        check()
        assert client.generate("Hello", max_tokens=12, end_id=-1).token_ids == before.token_ids
    assert server.dead_models() == []
    assert None in outcomes
    assert len({message for message in outcomes if message is not None}) > num_examples // 20


def test_any_input_gets_an_answer_or_a_sentence(tiny_server: TritonServer) -> None:
    fuzz(tiny_server, 150)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tiny_server", "tiny_staged_server"])
def test_many_inputs_get_an_answer_or_a_sentence(layout: str, request: pytest.FixtureRequest) -> None:
    fuzz(request.getfixturevalue(layout), 3000)
