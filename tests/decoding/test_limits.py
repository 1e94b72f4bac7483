"""What a request may ask: each limit refused in one sentence, nothing taken in."""

import math

import pytest

from furcate.builder.errors import RequestError
from furcate.decoding.request import Guide, GuideKind, Request, SamplingParams
from furcate.decoding.scheduler import Scheduler


def guide(kind: GuideKind, text: str) -> dict[str, object]:
    return {"guide": Guide(kind=kind, text=text), "end_ids": (1,)}


REFUSED = {
    "max_tokens is 0": {"max_tokens": 0},
    "temperature is nan": {"temperature": math.nan},
    "top_k is 0": {"top_k": 0},
    "top_p is 1.5": {"top_p": 1.5},
    "min_p is -0.1": {"min_p": -0.1},
    "seed is -1": {"seed": -1},
    "repetition_penalty is 0.0": {"repetition_penalty": 0.0},
    "presence_penalty is inf": {"presence_penalty": math.inf},
    "frequency_penalty is nan": {"frequency_penalty": math.nan},
    "min_tokens is -1": {"min_tokens": -1},
    "min_tokens is 9; it must be from 0 to max_tokens, which is 8": {"min_tokens": 9},
    "a stop sequence is empty": {"stop_sequences": ((),)},
    "a bad word has no tokens": {"bad_sequences": ((),)},
    "a bad word names token id 300": {"bad_sequences": ((2, 300),)},
    "a stop sequence names token id -1": {"stop_sequences": ((-1,),)},
    "end_id names token id 300": {"end_ids": (300,)},
    "embedding_bias names token id 999": {"embedding_bias": ((999, 1.0),)},
    "embedding_bias of token 5 is inf": {"embedding_bias": ((5, math.inf),)},
    "a guide was given but no end_id": {"guide": Guide(kind=GuideKind.JSON)},
    r"the regex guide cannot be followed \(.*unclosed group": guide(GuideKind.REGEX, "(a"),
    r"the json_schema guide cannot be followed \(.*Invalid type: objekt": guide(
        GuideKind.JSON_SCHEMA, '{"type":"objekt"}'
    ),
    r"the json_schema guide cannot be followed \(Expecting": guide(GuideKind.JSON_SCHEMA, "{not json"),
    r"the ebnf_grammar guide cannot be followed": guide(GuideKind.EBNF_GRAMMAR, "root ::= unknown"),
}


@pytest.fixture(scope="module")
def scheduler(tiny_engine) -> Scheduler:
    return Scheduler.from_engine(tiny_engine("eagle3"))


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_wrong_value_is_refused_in_one_sentence(scheduler, sentence):
    sampling = SamplingParams(**{"max_tokens": 8, **REFUSED[sentence]})
    with pytest.raises(RequestError, match=sentence) as caught:
        scheduler.add(Request(request_id=0, prompt_ids=(5,), sampling=sampling))
    assert "\n" not in str(caught.value)
    assert not scheduler.sequences


@pytest.mark.parametrize("text", [guide(GuideKind.JSON, ""), guide(GuideKind.EBNF_GRAMMAR, 'root ::= "a" | "bc"')])
def test_other_guides_are_taken(scheduler, text):
    scheduler.add(Request(request_id=0, prompt_ids=(5,), sampling=SamplingParams(max_tokens=8, **text)))
    while scheduler.sequences:
        (output,) = scheduler.step()
    assert output.error is None
