"""config.pbtxt from the I/O tables, through Triton's own protobuf message.

Only fields that Triton 2.51 (24.10) knows: an unknown one stops the server.
"""

# Protobuf makes the classes of a message module when it is imported, where no type checker sees them.
# pyright: reportAttributeAccessIssue=false

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from furcate.model_repository.io_table import Field, ModelTable
from furcate.model_repository.tables import EnsembleStep

SEQUENCE_IDLE_US = 120_000_000
"""Triton gives a request's place to another when so long passes between two of its turns. No step may take longer: its
requests would never come round again. Not much longer either: the place of a request that Triton dropped, because it was
cancelled while it waited, is lost until then."""


def text_from_config(config: "pb.ModelConfig") -> str:
    """The config.pbtxt text."""
    return text_format.MessageToString(config)


def python_config(
    table: ModelTable,
    *,
    max_batch_size: int,
    parameters: dict[str, str],
    picks_device: bool = False,
    is_decoupled: bool = False,
) -> "pb.ModelConfig":
    """A Python model that answers each request once (decoupled: or not at all), on the CPU, or on the device that its code picks.

    One instance: with more, a stream's text arrives out of order. KIND_MODEL loads with and without a GPU.
    """
    config = _base_config(table, max_batch_size)
    config.backend = "python"
    kind = pb.ModelInstanceGroup.KIND_MODEL if picks_device else pb.ModelInstanceGroup.KIND_CPU
    config.instance_group.add(kind=kind, count=1)
    config.model_transaction_policy.decoupled = is_decoupled
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def iterative_config(
    table: ModelTable, *, max_batch_size: int, max_live_requests: int, parameters: dict[str, str]
) -> "pb.ModelConfig":
    """A decoupled Python model whose requests come round again for each step (iterative sequence batching).

    `max_live_requests` take turns; a step holds up to `max_batch_size` of them, and further requests wait in order.
    """
    config = python_config(
        table, max_batch_size=max_batch_size, parameters=parameters, picks_device=True, is_decoupled=True
    )
    for tensor in config.input:
        tensor.allow_ragged_batch = True
    batching = config.sequence_batching
    batching.iterative_sequence = True
    batching.max_sequence_idle_microseconds = SEQUENCE_IDLE_US
    batching.oldest.max_candidate_sequences = max_live_requests
    start = batching.control_input.add(name="START").control.add()
    start.kind = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START
    start.int32_false_true.extend([0, 1])
    return config


def ensemble_config(
    table: ModelTable, steps: tuple[EnsembleStep, ...], *, max_batch_size: int, is_decoupled: bool = True
) -> "pb.ModelConfig":
    """The ensemble that joins the models; decoupled where one of them is."""
    config = _base_config(table, max_batch_size)
    config.platform = "ensemble"
    config.model_transaction_policy.decoupled = is_decoupled
    for step in steps:
        message = config.ensemble_scheduling.step.add(model_name=step.model_name, model_version=-1)
        for key, value in step.inputs.items():
            message.input_map[key] = value
        for key, value in step.outputs.items():
            message.output_map[key] = value
    return config


def _base_config(table: ModelTable, max_batch_size: int) -> "pb.ModelConfig":
    config = pb.ModelConfig(name=table.name, max_batch_size=max_batch_size)
    for field in table.inputs:
        config.input.add(name=field.name, data_type=_data_type(field), dims=field.shape, optional=field.is_optional)
    for field in table.outputs:
        config.output.add(name=field.name, data_type=_data_type(field), dims=field.shape)
    return config


def _data_type(field: Field) -> int:
    return pb.DataType.Value(f"TYPE_{field.dtype}")
