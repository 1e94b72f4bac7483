"""Which target layers an EAGLE-3 head reads, in one convention: the residual stream that enters the layer.

Exporters write either that (speculators, vLLM: 2, L//2, L-3) or the layer whose output it is, one less (SpecForge, modelopt:
1, L//2-1, L-4). A first id of 1 tells the second.
"""

from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.errors import CheckpointError


def feature_layers(source: HeadSource, *, is_expected: bool) -> tuple[int, ...]:
    """The taps, in the input-of-layer convention.

    `is_expected` says that this layout writes the ids, so that their absence is worth a warning; SafeAILab's layout has none.
    """
    num_layers = source.target.num_layers
    ids = source.setting("eagle_aux_hidden_state_layer_ids")
    if not ids:
        default = (2, num_layers // 2, num_layers - 3)
        if is_expected:
            source.warnings.append(
                f"config.json names no eagle_aux_hidden_state_layer_ids; the default for {num_layers} layers is used: "
                f"the inputs of layers {_listed(default)}."
            )
        return _within(source, default)
    if not all(type(layer) is int for layer in ids):
        raise CheckpointError(f"{source.path}: eagle_aux_hidden_state_layer_ids is {ids}; layer numbers are expected.")
    if ids[0] != 1:
        return _within(source, tuple(ids))
    shifted = tuple(layer + 1 for layer in ids)
    source.warnings.append(
        f"eagle_aux_hidden_state_layer_ids {_listed(ids)} start with 1, so they name outputs of layers: "
        f"the inputs of layers {_listed(shifted)} are read."
    )
    return _within(source, shifted)


def _within(source: HeadSource, layers: tuple[int, ...]) -> tuple[int, ...]:
    num_layers = source.target.num_layers
    if any(not 0 <= layer < num_layers for layer in layers):
        raise CheckpointError(
            f"{source.path} reads the inputs of layers {_listed(layers)}, but the target has {num_layers} layers; "
            "give the head trained for this target."
        )
    return layers


def _listed(layers: list[int] | tuple[int, ...]) -> str:
    return ", ".join(str(layer) for layer in layers)
