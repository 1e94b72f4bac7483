"""The README of this folder, made from the I/O tables: python -m furcate.model_repository.document > README.md"""

from collections.abc import Iterable

from furcate.model_repository.io_table import Field, ModelTable
from furcate.model_repository.tables import ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

INTRODUCTION = """\
# The model repository

`build_engine --repository DIR` writes four Triton models, and `furcate serve DIR` serves them. Their names, inputs
and outputs are those of the ensemble that TensorRT-LLM had, so its clients and load tools need no change. What
furcate adds is marked "added".

## A request's life
1. `ensemble` takes text. Clients call it over gRPC (`ModelStreamInfer`) or HTTP (`generate`, `generate_stream`).
2. `preprocessing` makes tokens: the chat template when `apply_chat_template` is true, stop words, the target's own
   `end_id` when none is given.
3. `tensorrt_llm` takes the request in. Triton's iterative sequence batching hands all live requests to `execute()`
   again and again; each call is one step for the whole batch: prompt chunks and decode steps mixed. A request that is
   not right, or that fails, ends alone.
4. Without `stream` there is exactly one response; with it, one for each step that gave tokens, or, with the request
   parameter `response_interval_ms` (0 to 60000), one for all tokens of such a time. The last one has a `finish_reason`.
5. `postprocessing` makes text, and gives out what else `tensorrt_llm` found (`answer_results`, one tensor: many small
   ones would cost the engine's process time). Tokens are read one at a time, so the pieces of a stream make exactly the
   text of a single response.

## Good to know
- **Sampling**: nothing given is greedy, as is `temperature` 0, `top_k` 1, or `top_p` 0 without a `top_k`. `top_k` 0
  is no limit.
- **Stop words** end the text before themselves, wherever they fall in the tokens.
- **Cancelling**: a request ends within about 50 ms after its client cancels it, closes its gRPC channel or dies, whether it
  streams, waits for one text or still waits in line (with more than five live requests: 10 ms for each of them). Triton
  asks whether an ensemble's client is gone only when it starts another step of the ensemble, so `tensorrt_llm` sends a
  response without results now and then, on which `postprocessing` looks, and answers nothing. HTTP streams end with
  their next response. Of an HTTP client that waits for one text (`generate`) and leaves, Triton itself is not told, so
  here its request runs to its end; `furcate api` takes the same requests and ends them. Any request is ended by one to
  `tensorrt_llm` with the parameter `cancel_id` (any input values) that names its request id, and by the old contract's
  `stop` input with the same request id. furcate's client asks for a stream with a `response_interval_ms` in `generate`,
  and sends the `cancel_id` too when it is left, closed, cancelled or past its deadline.
- **Turns**: requests wait for room in the K/V pool in the order they came. The request parameter `priority_level`
  (-100 to 100, larger first, default 0) changes that; `timeout` (microseconds; Triton's own field over gRPC, a parameter
  of `generate`) ends a request that takes longer, with one sentence that begins "Timed out:". `max_waiting_requests` and
  `max_waiting_s` among the parameters of `tensorrt_llm`'s config.pbtxt refuse with one that begins "Server busy:". Up to
  `prefill_tokens_per_step` prompt tokens are taken in turn beside the running texts. `reservation` is `full` (a request
  starts when all pages it may ever need are promised) or `optimistic` (more run together; when the pool is short the
  newest is put back in line and computed again later, with the same text).
- **Reuse**: pages of texts that are over are kept until their room is needed; a request that begins with the same
  tokens starts from them (`kv_cache_reused_blocks`). In float32 the text is the same token by token; in 16 bits a prompt
  that is cut elsewhere rounds differently, and a tie may fall the other way. Someone who can time answers can tell
  whether a prompt's beginning was served lately: `prefix_reuse` `false` in config.pbtxt turns it off.
- **Logits** are processed per node of the tree, each with its own path as context, in this order: embedding bias;
  repetition penalty (tokens of prompt and answer), frequency and presence penalty (tokens of the answer); bad words
  and `min_tokens`; guide; temperature; `top_k`; `top_p`; `min_p`. A text is the same with and without speculation.
- **Guides** need an `end_id`, and allow it only where the text may end. Between JSON's tokens up to 40 characters of
  white space are allowed, unless the schema has an `x-guidance` key (llguidance's) of its own.
- **Log probabilities** are of the model's own logits, before any processing and temperature (as TensorRT-LLM's).
- **Refused**: what an input's row says. Nothing is ignored in silence.
- **Numbers**: a request carries one prompt; every tensor has a batch dimension of 1 in front of the shape below.
- **Metrics**: Triton's, and furcate's own: [docs/operations.md](../docs/operations.md#metrics).
"""


def document() -> str:
    """The README's text."""
    return "\n".join(
        [INTRODUCTION, *(_model(table) for table in (ENSEMBLE, PREPROCESSING, TENSORRT_LLM, POSTPROCESSING))]
    )


def _model(table: ModelTable) -> str:
    return f"## `{table.name}`\n\nInputs:\n\n{_rows(table.inputs)}\nOutputs:\n\n{_rows(table.outputs)}"


def _rows(fields: Iterable[Field]) -> str:
    lines = ["| name | type | meaning |", "|---|---|---|"]
    for field in fields:
        shape = ",".join(map(str, field.shape))
        notes = [*(["required"] if not field.is_optional else []), *(["added"] if field.is_addition else [])]
        meaning = field.meaning if field.refusal is None else f"{field.meaning} Else refused: {field.refusal}"
        note = f" ({', '.join(notes)})" if notes else ""
        lines.append(f"| `{field.name}` | {field.dtype}[{shape}] | {meaning}{note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
