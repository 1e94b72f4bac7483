"""What `furcate tune` prints and draws."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from furcate.builder.errors import ConfigError
from furcate.decoding.tune import Candidate, Tuning


def print_predictions(candidates: list[Candidate]) -> None:
    """The predictions, before anything is run."""
    best = max(candidates, key=lambda candidate: candidate.predicted_ratio)
    Console().print(
        f"{len(candidates)} candidates; {best.tree} should be fastest, {best.predicted_ratio:.2f}x plain decoding. "
        "Running the best of each family ...",
        highlight=False,
    )


def print_tuning(tuning: Tuning) -> None:
    """Every candidate's predicted speed, and the measured one where it was run."""
    table = Table(box=None)
    for column in ("tree", "nodes", "step ms", "tau", "measured", "ratio", "measured"):
        table.add_column(column, justify="left" if column == "tree" else "right")
    for candidate in tuning.candidates:
        tau, ratio = candidate.measured_tau, candidate.measured_ratio
        table.add_row(
            str(candidate.tree),
            str(candidate.tree.budget),
            f"{candidate.step_ms:.1f}",
            f"{candidate.predicted_tau:.2f}",
            "" if tau is None else f"{tau:.2f}",
            f"{candidate.predicted_ratio:.2f}x",
            "" if ratio is None else f"{ratio:.2f}x",
            style="bold green" if candidate is tuning.chosen else None,
        )
    console = Console()
    console.print(table, highlight=False)
    rates = ", ".join(f"{row[0]:.2f}" for row in tuning.rank_rates)
    console.print(f"first rank right, by depth: {rates}", highlight=False)
    chosen = tuning.chosen
    console.print(f"chosen: {chosen.tree}, {chosen.measured_ratio:.2f}x plain decoding", style="bold", highlight=False)


def draw_curves(tuning: Tuning, path: Path) -> None:
    """Writes a PNG: pass times, acceptance by rank and depth, predicted against measured speed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "drawing the curves needs matplotlib; install furcate with the extra 'tune', or leave --plot out."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, ranks, speeds) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    times.plot(*zip(*sorted(tuning.times.verify_ms.items()), strict=True), marker="o", label="target, n nodes")
    passes = sorted((width, ms) for width, ms in tuning.times.draft_ms.items() if width > 0)
    if passes:
        times.plot(*zip(*passes, strict=True), marker="s", label="draft, n nodes")
    times.set(title=f"pass time on {tuning.device}", xlabel="nodes", ylabel="ms", ylim=(0, None))
    times.legend()
    for depth, row in enumerate(tuning.rank_rates, start=1):
        ranks.plot(range(1, len(row) + 1), row, marker=".", label=f"depth {depth}")
    ranks.set(title="chance that a rank is right", xlabel="rank", ylabel="chance", ylim=(0, 1))
    ranks.legend()
    for family in dict.fromkeys(candidate.family for candidate in tuning.candidates):
        members = [candidate for candidate in tuning.candidates if candidate.family == family]
        run = [candidate for candidate in members if candidate.measured_ratio is not None]
        (line,) = speeds.plot(
            [c.tree.budget for c in members], [c.predicted_ratio for c in members], ".", label=f"{family}, predicted"
        )
        speeds.plot([c.tree.budget for c in run], [c.measured_ratio for c in run], "x", color=line.get_color())
    speeds.axhline(1, color="grey", linewidth=0.8)
    speeds.set(title="speed over plain decoding (crosses: measured)", xlabel="nodes", ylabel="ratio", ylim=(0, None))
    speeds.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
