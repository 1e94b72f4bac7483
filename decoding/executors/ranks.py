"""The ranks of an engine that several GPUs of one machine share: one process each, started by mpirun.

Rank 0 runs the step; the others repeat its target passes and commits on their own part of every layer and of the K/V cache.
Each operation is a header (what, and the tensors' shapes) from host to host by gloo, so that an idle rank keeps no GPU busy, then
the tensors from GPU to GPU by NCCL. The plans' own sums over ranks go through a communicator of NCCL's, made here by its C
interface (nccl.h: ncclGetUniqueId, ncclCommInitRank).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from furcate.builder.errors import EngineMismatch

RANK_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE"))
"""What Open MPI, MPICH and torchrun tell a process of its place."""
PORT_VARIABLE, DEFAULT_PORT = "MASTER_PORT", "29571"
FOREVER = timedelta(days=365)
"""A rank waits for as long as no request comes."""
MAX_TENSORS, MAX_AXES = 8, 3


class Operation(IntEnum):
    """What every rank does next."""

    TARGET_PASS = 1
    COMMIT = 2
    STOP = 3


NAMES = {
    Operation.TARGET_PASS: (
        "token_ids", "positions", "tree_mask", "cache_lengths", "page_table", "num_nodes", "logit_rows",
    ),
    Operation.COMMIT: ("page_table", "cache_lengths", "path_nodes", "num_accepted"),
    Operation.STOP: (),
}  # fmt: skip
"""The tensors of each operation, all int32."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place among the ranks. `communicator` is what TensorRT's contexts are given; None without GPUs."""

    rank: int
    size: int
    device: torch.device
    communicator: Any | None = None

    def send(self, operation: Operation, tensors: Mapping[str, Tensor]) -> None:
        """Tells the other ranks of an operation that rank 0 is about to do; nothing is read back to the host."""
        values = [tensors[name].to(torch.int32) for name in NAMES[operation]]
        header = torch.zeros(1 + MAX_TENSORS * (1 + MAX_AXES), dtype=torch.int64)
        header[0] = operation
        for index, value in enumerate(values):
            place = 1 + index * (1 + MAX_AXES)
            header[place : place + 1 + value.dim()] = torch.tensor([value.dim(), *value.shape])
        dist.broadcast(header, 0, group=_host_group())
        if values:
            dist.broadcast(torch.cat([value.flatten() for value in values]), 0)

    def receive(self) -> tuple[Operation, dict[str, Tensor]]:
        """Waits for rank 0's next operation; STOP when rank 0 has gone."""
        header = torch.zeros(1 + MAX_TENSORS * (1 + MAX_AXES), dtype=torch.int64)
        try:
            dist.broadcast(header, 0, group=_host_group())
        except RuntimeError:
            return Operation.STOP, {}
        operation = Operation(int(header[0]))
        shapes = []
        for index in range(len(NAMES[operation])):
            place = 1 + index * (1 + MAX_AXES)
            axes = int(header[place])
            shapes.append(tuple(header[place + 1 : place + 1 + axes].tolist()))
        if not shapes:
            return operation, {}
        sizes = [prod(shape) for shape in shapes]
        payload = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
        dist.broadcast(payload, 0)
        values = [part.view(shape) for part, shape in zip(payload.split(sizes), shapes, strict=True)]
        return operation, dict(zip(NAMES[operation], values, strict=True))


_groups: dict[str, Any] = {}


def _host_group() -> Any:
    return _groups["host"]


def place_in_environment() -> tuple[int, int] | None:
    """(rank, number of ranks) as the launcher says; None for a process that none has started."""
    for rank, size in RANK_VARIABLES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return None


def join_ranks(num_ranks: int, *, on_gpu: bool = True) -> Ranks:
    """This process's place, once every rank is there. Rank r uses GPU r.

    Raises EngineMismatch unless the launcher started as many ranks as the engine has, and the machine has as many GPUs.
    """
    place = place_in_environment()
    if place is None or place[1] != num_ranks:
        started = "no launcher started this process" if place is None else f"the launcher started {place[1]}"
        raise EngineMismatch(
            f"the engine is divided among {num_ranks} GPUs, which wants {num_ranks} ranks, and {started}; see 'More than one "
            "GPU' in docs/deploy.md."
        )
    if on_gpu and torch.cuda.device_count() < num_ranks:
        raise EngineMismatch(
            f"the engine is divided among {num_ranks} GPUs, this machine has {torch.cuda.device_count()}; build it with "
            "--tp-size for those."
        )
    rank, device = place[0], torch.device("cuda", place[0]) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    port = os.environ.get(PORT_VARIABLE, DEFAULT_PORT)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=FOREVER,
    )
    _groups["host"] = dist.new_group(backend="gloo", timeout=FOREVER)
    communicator = nccl_communicator(rank, num_ranks) if on_gpu else None
    return Ranks(rank=rank, size=num_ranks, device=device, communicator=communicator)


class UniqueId(ctypes.Structure):
    """ncclUniqueId: 128 bytes, passed by value."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


def nccl_communicator(rank: int, num_ranks: int) -> Any:
    """A capsule of this rank's ncclComm_t, for IExecutionContext.set_communicator. Every rank must call it."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise EngineMismatch(f"several GPUs need NCCL, which cannot be loaded ({error}).") from error
    unique = UniqueId()
    if rank == 0:
        _check(nccl, nccl.ncclGetUniqueId(ctypes.byref(unique)))
    shared = torch.frombuffer(bytearray(bytes(unique)), dtype=torch.uint8)
    dist.broadcast(shared, 0, group=_host_group())
    unique = UniqueId.from_buffer_copy(shared.numpy().tobytes())
    communicator = ctypes.c_void_p()
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
    _check(nccl, nccl.ncclCommInitRank(ctypes.byref(communicator), num_ranks, unique, rank))
    return capsule_of(communicator.value)


def capsule_of(address: int | None) -> Any:
    """A PyCapsule of an address, which is how the bindings take a pointer."""
    ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
    ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return ctypes.pythonapi.PyCapsule_New(address, None, None)


def _check(nccl: Any, result: int) -> None:
    if result != 0:
        nccl.ncclGetErrorString.restype = ctypes.c_char_p
        raise EngineMismatch(f"the GPUs cannot talk to each other: {nccl.ncclGetErrorString(result).decode()}.")
