"""`build_engine --dry-run`: the networks, profiles and memory of a TensorRT engine for a named GPU, without TensorRT or GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rich.console import Group
from rich.table import Table
from rich.text import Text

from furcate.builder.engine import Manifest
from furcate.builder.few_bits import num_bytes
from furcate.builder.gpus import Gpu
from furcate.builder.memory_plan import ELEMENT_BYTES, MemoryPlan, WeightBytes, memory_plan
from furcate.builder.tensorrt_engine import NUM_SPLITS, engine_buckets
from furcate.builder.tensorrt_profiles import Profile, all_profiles


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a build would make. `shapes` are the named weights', `bits` what those kept in few bits take each."""

    manifest: Manifest
    gpu: Gpu
    tp_size: int
    shapes: dict[str, tuple[int, ...]]
    bits: dict[str, float]

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan of one GPU."""
        splits = NUM_SPLITS[self.gpu.arch]
        return memory_plan(self.manifest, self.gpu, self.weight_bytes, splits, self.tp_size)

    @property
    def weight_bytes(self) -> WeightBytes:
        """What the weights take in the engine's dtype or in few bits."""
        plain = 8 * ELEMENT_BYTES[self.manifest.dtype.value]
        return WeightBytes.of(
            {name: (shape, num_bytes(shape, self.bits.get(name, plain))) for name, shape in self.shapes.items()}
        )

    @property
    def profiles(self) -> list[Profile]:
        """The profiles of every plan."""
        return all_profiles(engine_buckets(self.manifest))


def dry_run_report(run: DryRun) -> Group:
    """The report as the command line prints it."""
    return Group(_networks(run), Text(), _profiles(run), Text(), _memory(run))


def _networks(run: DryRun) -> Table:
    manifest = run.manifest
    table = Table(
        "network", "layers", "weights", "parameters", title=f"networks for {run.gpu.name} (sm_{run.gpu.arch})"
    )
    for prefix, spec in (("target", manifest.target), ("head", manifest.head)):
        if spec is None:
            continue
        shapes = [shape for name, shape in run.shapes.items() if name.startswith(f"{prefix}.")]
        layers = str(manifest.target.num_layers) if prefix == "target" else manifest.head_kind or ""
        table.add_row(prefix, layers, str(len(shapes)), f"{sum(prod(shape) for shape in shapes) / 1e6:.1f} M")
    return table


def _profiles(run: DryRun) -> Table:
    table = Table("profile", "batch", "nodes", "pages", title="profiles (min / opt / max)")
    for profile in run.profiles:
        shapes = (profile.smallest, profile.typical, profile.largest)
        columns = [" / ".join(str(getattr(shape, axis)) for shape in shapes) for axis in ("batch", "nodes", "pages")]
        table.add_row(profile.name, *columns)
    return table


def _memory(run: DryRun) -> Table:
    plan, manifest = run.memory, run.manifest
    where = "each GPU" if run.tp_size > 1 else "the GPU"
    table = Table("memory", "GiB", "", title=f"memory of {where}, {run.gpu.memory_bytes / 1e9:.0f} GB")
    rows = [
        ("usable", plan.usable_bytes, "94% of the data sheet's"),
        ("weights", plan.weight_bytes, manifest.dtype.value + (", quantised as stored" if run.bits else "")),
        ("K/V pool", plan.pool_bytes, f"{manifest.max_pool_tokens} tokens"),
        ("activations", plan.activation_bytes, "an upper estimate"),
        ("left", plan.left_bytes, "does not fit" if plan.left_bytes < 0 else ""),
    ]
    for name, size, note in rows:
        table.add_row(name, f"{size / 2**30:.2f}", note)
    fit = f"{plan.sequences_that_fit} of {manifest.max_context_tokens} tokens"
    table.add_row(
        "sequences", fit, f"fit beside weights and activations; --max-batch-size is {manifest.max_batch_size}"
    )
    return table
