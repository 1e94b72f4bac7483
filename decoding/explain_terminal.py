"""The terminal output of `furcate explain`: a tree a step, then the totals."""

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from furcate.decoding.explain_report import Explanation, NodeReport, StepReport, Verdict

STYLES = {
    Verdict.ROOT: "bold",
    Verdict.ACCEPTED: "bold green",
    Verdict.REJECTED: "red",
    Verdict.LOST: "dim",
    Verdict.CUT: "yellow",
}
MARKS = {Verdict.ROOT: "●", Verdict.ACCEPTED: "✓", Verdict.REJECTED: "✗", Verdict.LOST: "·", Verdict.CUT: "✂"}


def print_explanation(
    explanation: Explanation, *, shows_everything: bool = False, console: Console | None = None
) -> None:
    """Prints every step and the totals. Nodes below rejected ones are only counted unless `shows_everything`."""
    console = console or Console()
    for line in heading(explanation):
        console.print(Text(line))
    for step in explanation.steps:
        console.print()
        console.print(_tree(step, shows_everything))
        console.print(Text("  " + ending(step), style="italic"))
    console.print()
    for line in totals(explanation):
        console.print(Text(line))


def heading(explanation: Explanation) -> list[str]:
    """What was run, in a few lines."""
    return [
        f"{explanation.engine}, tree {explanation.tree}, acceptance {explanation.acceptance}",
        f"prompt: {explanation.prompt}",
        f"the prompt's own pass gave {explanation.first_token!r}",
    ]


def ending(step: StepReport) -> str:
    """Why a step gave no more tokens than it did."""
    return f"+{step.num_emitted} tokens, bonus {step.bonus!r} (p = {step.bonus_prob:.3f}): {step.why}"


def totals(explanation: Explanation) -> list[str]:
    """The text, tau, how often each depth was accepted, and why paths ended."""
    tau = "-" if explanation.tau is None else f"{explanation.tau:.2f}"
    lines = [f"text: {explanation.text}"]
    if explanation.error is not None:
        lines.append(f"error: {explanation.error}")
    lines.append(f"{explanation.num_target_steps} steps, tau {tau}, finish reason: {explanation.finish_reason}")
    for count in explanation.acceptance_by_depth:
        if count.num_reached:
            share = count.num_accepted / count.num_reached
            lines.append(
                f"depth {count.depth:>2}: accepted in {count.num_accepted:>3} of {count.num_reached:>3} "
                f"steps that came that far ({share:.0%})"
            )
    lines += [f"{count:>3} x {reason}" for reason, count in explanation.misses.items()]
    return lines


def _tree(step: StepReport, shows_everything: bool) -> Tree:
    branches: dict[int, Tree] = {}
    for node in step.nodes:
        if node.verdict is Verdict.LOST and not shows_everything:
            continue
        line = _line(node, step)
        if node.verdict is Verdict.REJECTED and not shows_everything:
            num_lost = _num_below(step, node.index)
            line.append(f"  and {num_lost} below it" if num_lost else "", style="dim")
        branches[node.index] = Tree(line) if node.index == 0 else branches[node.parent].add(line)
    return branches[0]


def _line(node: NodeReport, step: StepReport) -> Text:
    text = Text(f"{MARKS[node.verdict]} {node.text}", style=STYLES[node.verdict])
    if node.index == 0:
        return text.append(f"  step {step.number}, {len(step.nodes)} nodes", style="not bold")
    draft = "?" if node.draft_prob is None else f"{node.draft_prob:.3f}"
    text.append(f"  q {draft}  p {node.target_prob or 0:.3f}", style="not bold")
    return text


def _num_below(step: StepReport, index: int) -> int:
    below = {index}
    for node in step.nodes[1:]:
        if node.parent in below:
            below.add(node.index)
    return len(below) - 1
