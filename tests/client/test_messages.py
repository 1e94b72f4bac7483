"""The server's messages, cleaned and sorted by whose fault it was."""

import pytest

from furcate.builder.errors import FurcateError, RequestError, ServerError
from furcate.client.messages import error_from_message


@pytest.mark.parametrize(
    ("message", "kind", "plain"),
    [
        ("in ensemble 'ensemble', max_tokens is -1.", RequestError, "max_tokens is -1."),
        ("in ensemble 'outer', in ensemble 'ensemble', no.", RequestError, "no."),
        ("[request id: <id_unknown>] unexpected input 'x'", RequestError, "unexpected input 'x'"),
        (
            "[StatusCode.INTERNAL] in ensemble 'e', Server fault: a step failed.",
            ServerError,
            "Server fault: a step failed.",
        ),
        (
            "Stub process 'tensorrt_llm_0_0' is not healthy.",
            ServerError,
            "Stub process 'tensorrt_llm_0_0' is not healthy.",
        ),
        (
            "Request for unknown model: 'ensemble' is not found",
            ServerError,
            "Request for unknown model: 'ensemble' is not found",
        ),
        (
            "unexpected shape for input 'a'. Expected [-1,1], got [1,2]. NOTE: Setting a non-zero max_batch_size in the"
            " model config requires a batch dimension",
            RequestError,
            "unexpected shape for input 'a'. Expected [-1,1], got [1,2].",
        ),
        ("  ", RequestError, "The server gave an error without a message."),
    ],
)
def test_message_is_plain_and_of_the_right_kind(message: str, kind: type[FurcateError], plain: str) -> None:
    error = error_from_message(message)
    assert type(error) is kind
    assert str(error) == plain
