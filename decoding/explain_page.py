"""The page of `furcate explain`: one HTML file with its trees drawn as SVG, and nothing fetched from anywhere."""

from html import escape

from furcate.decoding.explain_report import Explanation, NodeReport, StepReport, Verdict
from furcate.decoding.explain_terminal import ending, heading, totals

_ROW_PX, _COLUMN_PX, _BOX_PX, _MARGIN_PX = 26, 168, 148, 6
_SHOWN_CHARACTERS = 11

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --faint: #8a9099; --good: #1a7f37; --bad: #c3352b;
  --cut: #9a6700; --box: #f3f4f6; --good-box: #dafbe1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16181b; --faint: #7d858e; --good: #3fb950;
  --bad: #f47067; --cut: #d29922; --box: #23272c; --good-box: #12351d; } }
body { margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 2rem 0 .2rem; } p { margin: .2rem 0; }
.why { color: var(--faint); } .text { white-space: pre-wrap; border-left: 3px solid var(--good); padding-left: .8rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; }
td, th { padding: .1rem .8rem .1rem 0; text-align: left; font-variant-numeric: tabular-nums; }
svg text { font: 12px ui-monospace, monospace; fill: var(--ink); } svg .prob { fill: var(--faint); font-size: 10px; }
svg rect { fill: var(--box); stroke: var(--faint); stroke-width: 1; } svg path { fill: none; stroke: var(--faint); }
.accepted rect, .root rect { fill: var(--good-box); stroke: var(--good); }
.accepted path { stroke: var(--good); stroke-width: 2.5; }
.rejected rect { stroke: var(--bad); } .rejected text { fill: var(--bad); } .cut rect { stroke: var(--cut); }
.lost { opacity: .55; }
"""


def page_of(explanation: Explanation) -> str:
    """The whole page."""
    title, *lines = heading(explanation)
    steps = "\n".join(_step(step) for step in explanation.steps)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>furcate explain: {escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{"".join(f"<p>{escape(line)}</p>" for line in lines)}
<p class="text">{escape(explanation.text)}</p>
{"".join(f"<p>{escape(line)}</p>" for line in totals(explanation)[1:])}
<p class="why">Green was accepted, red was rejected, faint lies below something rejected, yellow behind the text's end.
A node's numbers are the head's probability and the target's, both given its path.
Point at a node to see why it was kept or fell.</p>
{steps}
</body>
</html>
"""


def _step(step: StepReport) -> str:
    return (
        f'<section id="step{step.number}"><h2>Step {step.number}: {len(step.nodes)} nodes, +{step.num_emitted} tokens</h2>'
        f'<p class="why">{escape(ending(step))}</p><div class="scroll">{_svg(step)}</div></section>'
    )


def _svg(step: StepReport) -> str:
    """The tree from left to right: a column a depth, leaves one below another, parents in the middle of their children."""
    rows = _rows(step)
    width = _MARGIN_PX * 2 + _COLUMN_PX * max(node.depth for node in step.nodes) + _BOX_PX
    height = _MARGIN_PX * 2 + _ROW_PX * (1 + max(rows.values()))
    # Accepted nodes last, so that their edges lie above the others'.
    nodes = sorted(step.nodes, key=lambda node: node.verdict in (Verdict.ACCEPTED, Verdict.ROOT))
    drawn = "".join(_node(node, step.nodes[node.parent], rows) for node in nodes)
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg {size} role="img" aria-label="tree of step {step.number}">{drawn}</svg>'


def _rows(step: StepReport) -> dict[int, float]:
    """Each node's place from the top, in rows."""
    children: dict[int, list[int]] = {node.index: [] for node in step.nodes}
    for node in step.nodes[1:]:
        children[node.parent].append(node.index)
    leaves = iter(range(len(step.nodes)))
    rows: dict[int, float] = {}

    def place(index: int) -> float:
        below = [place(child) for child in children[index]]
        rows[index] = (below[0] + below[-1]) / 2 if below else float(next(leaves))
        return rows[index]

    place(0)
    return rows


def _node(node: NodeReport, parent: NodeReport, rows: dict[int, float]) -> str:
    x, y = _MARGIN_PX + _COLUMN_PX * node.depth, _MARGIN_PX + _ROW_PX * rows[node.index]
    middle = y + _ROW_PX / 2
    edge = ""
    if node.index > 0:
        start_x, start_y = x - _COLUMN_PX + _BOX_PX, _MARGIN_PX + _ROW_PX * (rows[parent.index] + 0.5)
        bend = (start_x + x) / 2
        edge = f'<path d="M{start_x:.0f} {start_y:.1f}C{bend:.0f} {start_y:.1f} {bend:.0f} {middle:.1f} {x:.0f} {middle:.1f}"/>'
    probs = "" if node.index == 0 else f"{_share(node.draft_prob)} {_share(node.target_prob)}"
    hint = f"{node.text!r}, token {node.token_id}: {node.verdict.value}, {node.why}"
    shown = node.text if len(node.text) <= _SHOWN_CHARACTERS else node.text[: _SHOWN_CHARACTERS - 1] + "…"
    return (
        f'<g class="{node.verdict.value}"><title>{escape(hint)}</title>{edge}'
        f'<rect x="{x:.0f}" y="{y + 2:.1f}" width="{_BOX_PX}" height="{_ROW_PX - 4}" rx="4"/>'
        f'<text x="{x + 6:.0f}" y="{middle + 4:.1f}">{escape(shown)}</text>'
        f'<text class="prob" x="{x + _BOX_PX - 6:.0f}" y="{middle + 4:.1f}" text-anchor="end">{probs}</text></g>'
    )


def _share(prob: float | None) -> str:
    return "?" if prob is None else f"{prob:.2f}"
