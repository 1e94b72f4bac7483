"""The README's tables against what they describe."""

from pathlib import Path

import pytest

from furcate.plugins import report
from furcate.plugins.chips import chip_of
from furcate.plugins.specification import SPECIFICATIONS
from furcate.plugins.tree_attention.model import Workload, predict
from furcate.plugins.tree_attention.tactics import PLUGIN_TACTICS, TACTICS, choose_tactic

README = (Path(__file__).parents[3] / "plugins" / "tree_attention" / "README.md").read_text()


@pytest.mark.parametrize("specification", SPECIFICATIONS, ids=lambda s: s.name)
def test_interface_is_the_specification(specification):
    section = README.split(f"### `furcate::{specification.name}`")[1].split("\n##")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| in", "| out"))]
    assert rows == [
        f"| {side} | `{e.name}` | {e.dtype} | [{', '.join(e.shape)}] | {e.meaning} |"
        for side, entries in (("in", specification.inputs), ("out", specification.outputs))
        for e in entries
    ]
    scalars = section.split("Scalars (int32, between inputs and outputs): ")[1].split(".\n")[0]
    assert scalars == ", ".join(f"`{name}`" for name in specification.scalars)
    attributes = section.split("\nAttributes: ")[1].rstrip().removesuffix(".")
    assert attributes == "; ".join(f"`{a.name}` ({a.kind.__name__}: {a.meaning})" for a in specification.attributes)


def test_tactic_tables_are_those_of_the_code():
    rows = [line for line in README.splitlines() if line.startswith(("| <= ", "| more"))]
    expected = []
    for line in (*TACTICS, *PLUGIN_TACTICS):
        t = line.tactic
        rows_text = "more" if line.max_rows is None else f"<= {line.max_rows}"
        chip = {True: "wide", False: "narrow", None: "any"}[line.is_wide]
        blocks = f"{t.block_m} x {t.block_n} x {t.block_t} | {t.num_warps} | {t.num_stages} | {t.ctas_per_sm} | {t.head_parts}"
        cells = f"{rows_text} | {line.max_head_dim} | {chip} | {line.element_bytes} | {blocks} | {line.reason}"
        expected.append(f"| {cells} |")
    assert rows == expected


def test_predictions_are_those_of_the_model():
    section = README.split("| H200, nodes |")[1].split("\n\n")[0]
    for nodes in report.NODES:
        work = Workload(spec=report.SPEC, batch=8, prefix=8192, nodes=nodes)
        tactic = choose_tactic(90, work.rows, 128, 2)
        p = predict(work, chip_of(90), tactic, tactic.ctas_per_sm)
        assert (
            f"| {nodes} | {p.num_splits} | {p.bytes_in_flight // 1024} KB | {p.occupied_share * 100:.0f} % | "
            f"{p.memory_us:.0f} | {p.tensor_us:.0f} | {p.time_us:.0f} | {p.floor_share * 100:.0f} % |"
        ) in section
