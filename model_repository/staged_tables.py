"""The models of one step in the `staged` layout: their I/O tables, and the ensemble that joins them.

These are internal: `tensorrt_llm` calls them. Unlike the other models their first dimension counts the sequences of a step.
"""

from furcate.model_repository.io_table import Field, ModelTable
from furcate.model_repository.tables import EnsembleStep


def _field(name: str, dtype: str, width: int | tuple[int, ...], meaning: str, *, is_optional: bool = False) -> Field:
    shape = width if isinstance(width, tuple) else (width,)
    return Field(name=name, dtype=dtype, shape=shape, meaning=meaning, is_optional=is_optional)


_PLACE = (
    _field("cache_lengths", "INT32", 1, "Committed tokens."),
    _field("page_table", "INT32", -1, "The sequence's pages."),
)
_KEPT = _field("num_kept", "INT32", 1, "Nodes that the sequence's last step accepted; 0 right after its prompt.")
_DRAFTER = (
    _field("states", "FP32", -1, "What the drafter remembered after the prompt."),
    _field("root_ids", "INT64", 1, "The newest token."),
    _field("first_ids", "INT64", 1, "The root of the last step, or a prompt chunk's first token."),
    _field("kept_ids", "INT64", -1, "The tokens after each kept node."),
    _field("kept_features", "FP32", (-1, -1), "The target's features of the kept nodes."),
)
_SAMPLING = (
    _field("temperature", "FP32", 1, "0 is greedy."),
    _field("top_k", "INT64", 1, "The vocabulary's size is no limit."),
    _field("top_p", "FP32", 1, "1 is no limit."),
    _field("min_p", "FP32", 1, "0 is no limit."),
    _field("seeds", "INT64", 1, "The seed's 64 bits."),
    _field("returns_log_probs", "BOOL", 1, "Whether log probabilities are wanted."),
)
_KEPT_NODES = _field("kept_nodes", "INT64", -1, "The nodes that the last step accepted; committed first.")
_KEYS = (
    _field("keys", "INT64", 1, "Which sequence it is."),
    _field("ended_keys", "INT64", -1, "Sequences that are over; in every row the same, 0 is none."),
)
_TEXT = _field(
    "text", "STRING", 1, "With a prompt's last chunk: what is done to the logits, as JSON.", is_optional=True
)
_IS_PROMPT = _field("is_prompt", "BOOL", 1, "True: a prompt's chunk instead of a step.", is_optional=True)
_TREE = (
    _field("tree_token_ids", "INT64", -1, "The nodes' tokens, root first; or the chunk's."),
    _field("tree_parents", "INT64", -1, "The node above each."),
    _field("num_nodes", "INT32", 1, "Nodes in use."),
)
_CHOSEN = (
    _field("choices", "INT64", -1, "The target's token after each node of the path it takes; -1 off that path."),
    _field("choice_logits", "FP32", -1, "The logit of each choice."),
    _field("choice_log_probs", "FP32", -1, "Its log probability, when asked for."),
    _field("features", "FP32", (-1, -1), "What the drafter reads of each node."),
)
_ACCEPTED = (
    _field("path_nodes", "INT64", -1, "The accepted nodes."),
    _field("num_accepted", "INT32", 1, "How many they are."),
    _field("new_ids", "INT64", -1, "The tokens after them, the bonus last."),
    _field("new_logits", "FP32", -1, "Their logits."),
    _field("new_log_probs", "FP32", -1, "Their log probabilities, when asked for."),
    _field("path_features", "FP32", (-1, -1), "The accepted nodes' features."),
)

TREE_CONSTRUCTION = ModelTable(
    name="tree_construction",
    inputs=(*_DRAFTER, *_PLACE, _KEPT, _IS_PROMPT),
    outputs=(*_TREE, _field("new_states", "FP32", -1, "What the drafter remembers now.")),
)
VERIFICATION = ModelTable(
    name="verification",
    inputs=(*_TREE, *_PLACE, *_KEYS, _KEPT_NODES, _DRAFTER[3], _KEPT, *_SAMPLING, _IS_PROMPT, _TEXT),
    outputs=_CHOSEN,
)
ACCEPTANCE = ModelTable(name="acceptance", inputs=(*_TREE, *_CHOSEN), outputs=_ACCEPTED)
SPECULATIVE_STEP = ModelTable(
    name="speculative_step",
    inputs=(*_DRAFTER, *_PLACE, *_KEYS, _KEPT_NODES, _KEPT, *_SAMPLING),
    outputs=(*_ACCEPTED, _TREE[2]),
)
STAGES = (TREE_CONSTRUCTION, VERIFICATION, ACCEPTANCE)


def _step(table: ModelTable) -> EnsembleStep:
    """A stage whose tensors are the ensemble's of the same name."""
    inputs = {field.name: field.name for field in table.inputs if not field.is_optional}
    outputs = {field.name: field.name for field in table.outputs if field.name != "new_states"}
    return EnsembleStep(model_name=table.name, inputs=inputs, outputs=outputs)


SPECULATIVE_STEP_STEPS = tuple(map(_step, STAGES))
