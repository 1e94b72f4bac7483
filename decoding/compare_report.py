"""The terminal output of `furcate compare`: a line a prompt as it is done, then the totals."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import Manifest
from furcate.builder.tree_config import TreeConfig
from furcate.decoding.compare import PARTS, Comparison, Total


class Report:
    """Prints comparisons as they come. Use as a context manager."""

    def __init__(self, manifest: Manifest, tree: TreeConfig, num_prompts: int, *, is_adaptive: bool) -> None:
        self.console = Console()
        head = manifest.head_kind.value if manifest.head_kind is not None else "no head"
        nodes = f"{tree.budget} nodes" + (" or fewer" if is_adaptive else "")
        self.console.print(f"{manifest.name}, {head}, tree {tree} ({nodes}), {manifest.dtype.value}", highlight=False)
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, transient=True)
        self.task = self.progress.add_task("prompts", total=num_prompts)
        self.count = 0

    def __enter__(self) -> "Report":
        self.progress.start()
        header = f"{'':>3} {'identical':<12} {'tau':>5} {'steps':>5} {'plain':>8} {'spec.':>8} {'ratio':>6}  prompt"
        self.console.print(header, style="bold", highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def add(self, comparison: Comparison) -> None:
        """Prints one prompt's line. Speeds are tokens/s after the first token."""
        self.count += 1
        plain, run = comparison.plain, comparison.speculative
        difference = comparison.first_difference
        identical = "yes" if difference is None else f"no, at {difference}"
        ratio = run.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 1.0
        line = (
            f"{self.count:>3} {identical:<12} {run.stats.tau or 0:>5.2f} {run.stats.num_target_steps:>5} "
            f"{plain.tokens_per_second:>8.1f} {run.tokens_per_second:>8.1f} {ratio:>5.2f}x  "
        )
        room = max(self.console.width - len(line) - 1, 10)
        text = " ".join(comparison.prompt.split())[:room]
        self.console.print(line + text, highlight=False, markup=False, style=None if difference is None else "red")
        self.progress.advance(self.task)

    def close_with(self, total: Total, temperature: float, acceptance: Acceptance) -> None:
        """Prints the totals."""
        self.progress.stop()
        ms, plain = total.ms_per_step, total.plain_ms_per_step
        split = ", ".join(f"{part} {ms[part]:.1f}" for part in PARTS)
        verdict = "yes" if total.num_identical == total.num_prompts else "no"
        what = "identical to plain greedy" if temperature == 0 else "identical to plain sampling"
        expected = {True: "", False: "; this rule keeps the law, not the seed's text"}
        if not acceptance.is_lossless:
            expected[False] = "; this rule is LOSSY"
        keeps_text = temperature == 0 or acceptance is Acceptance.MATCH
        rows = {
            what: f"{verdict} ({total.num_identical} of {total.num_prompts} prompts{expected[keeps_text]})",
            "acceptance": acceptance.value,
            "tau": f"{total.tau:.3f} tokens a target step (median over prompts {total.tau_median:.2f})",
            "target steps": str(total.target_steps),
            "tokens/s (medians)": f"plain {total.plain_tokens_per_second:.1f}, "
            f"speculative {total.speculative_tokens_per_second:.1f}",
            "ratio (median)": f"{total.ratio:.2f}x",
            "ms per step": f"{ms['step']:.1f} ({split}); plain {plain['step']:.1f}",
            "forward passes": f"target {ms['target_forward']:.1f} ms, head {ms['head_forward']:.1f} ms; "
            f"everything else {100 * total.overhead_share:.1f}% of a step",
            "of the promised speed": f"{100 * total.promised_share:.0f}% of tau * t(1) / (t(N) + draft)",
        }
        width = max(map(len, rows))
        for name, value in rows.items():
            self.console.print(f"{name + ':':<{width + 1}} {value}", highlight=False, soft_wrap=True)
