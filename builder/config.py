"""What a build is: one frozen dataclass, the API and the command line at once."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import tyro

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.scheduling_config import SchedulingConfig
from furcate.builder.tensorrt_config import TensorRTConfig


class DataType(StrEnum):
    """Compute and cache dtype of an engine."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Executor(StrEnum):
    """What will run the engine."""

    TORCH = "torch"
    TENSORRT = "tensorrt"


class Layout(StrEnum):
    """How the step is cut into Triton models."""

    FUSED = "fused"
    """One model runs the whole step: the fastest."""
    STAGED = "staged"
    """Tree construction, verification and acceptance are models of their own, joined by an ensemble that runs once a step."""


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What to build. The command line's help is made of these fields."""

    target: Path
    """Target checkpoint: a Hugging Face directory (plain, or fp8 or int4 by modelopt or compressed-tensors), a TensorRT-LLM
    checkpoint, or a .gguf file."""
    output: Path
    """Engine directory to write. Must not exist, unless --overwrite."""
    head: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Head checkpoint directory; or a whole draft model of the target's vocabulary (a Hugging Face directory, a .gguf file or an
    engine). Without it the engine decodes plainly (one token a step). Given again: all draft, their trees are merged."""
    repository: Path | None = None
    """Also write the Triton model repository here."""
    dtype: DataType = DataType.BFLOAT16
    """Compute and K/V cache dtype. float32 reproduces plain greedy decoding token by token; bfloat16 is about twice as fast."""
    tree: str = "auto"
    """The candidate tree. auto; dynamic:BUDGET/DEPTH/TOPK (EAGLE-2: nodes with the root, draft passes after the first, children
    a node); chain:LENGTH; single (plain decoding); expansion:W1,W2,..; cartesian:S1,S2,../BUDGET; accuracies:FILE.json/BUDGET; a
    shipped choice list such as mc_sim_7b_63; or a .json file of choices. With several heads: one tree for each, joined by +."""
    acceptance: Acceptance = Acceptance.AUTO
    """How drafted tokens are accepted. auto: match with a head; drawn with a draft model. match takes the target's own token after
    each node; block, multi_step, recursive, traversal and univer draw the draft too. All of these keep the target's distribution
    exactly. typical does NOT: it is lossy, and the manifest and every request's statistics say so. greedy: temperature 0 only."""
    adaptive: bool = True
    """Let each step draft the whole tree, a small one or nothing, by what was accepted lately and by how many requests run.
    Never changes a text: it is for one head and acceptance match; elsewhere every step drafts the whole tree."""
    max_batch_size: int = 32
    """Sequences a step may serve together."""
    max_context_tokens: int = 2048
    """Longest prompt plus answer, in tokens; sizes the rotary table and each sequence's share of the K/V pool."""
    max_pool_tokens: int | None = None
    """K/V pool size in tokens, all sequences together. Default: max_batch_size x max_context_tokens, and a tree's room."""
    page_size: int = 16
    """Tokens a K/V page holds: 16, 32, 64 or 128."""
    prefill_chunk_tokens: int = 256
    """Longest piece of a prompt that one pass takes, so that long prompts do not stall running streams."""
    draft_vocabulary: int | None = None
    """Tokens a head without its own draft vocabulary may propose; default 24576 (or the whole vocabulary when smaller)."""
    executor: Executor = Executor.TORCH
    """What will run the engine: torch (CPU, or CUDA with our kernel), or tensorrt (plans for --gpu)."""
    tensorrt: TensorRTConfig = field(default_factory=TensorRTConfig)
    """Settings of --executor tensorrt."""
    dry_run: bool = False
    """Build nothing: print the networks, profiles and memory plan of --executor tensorrt for --gpu. Needs neither."""
    layout: Layout = Layout.FUSED
    """How the repository cuts the step into Triton models. fused: one model, the fastest. staged: one for tree construction, one
    for verification and one for acceptance, each with statistics of its own; only acceptance match or greedy, and one head."""
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    """How the repository's requests share the engine."""
    name: str | None = None
    """The engine's name in manifests and messages. Default: the target's directory name."""
    overwrite: bool = False
    """Replace an existing --output and --repository (only after the new one is complete)."""
    allow_pickle: bool = False
    """Read .bin and .pt checkpoints too (with torch's weights_only loader)."""

    def __post_init__(self) -> None:
        # One head may be given as it is, and none as None.
        if not isinstance(self.head, tuple):
            object.__setattr__(self, "head", () if self.head is None else (self.head,))
