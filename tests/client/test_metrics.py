"""The metrics of a real server, and who reads them: the dashboard, `furcate top`."""

import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served_command import FURCATE

from furcate.client import Client
from furcate.client.metrics_text import Samples, samples_from_text, scrape
from furcate.client.server import TritonServer
from furcate.model_repository.metrics_table import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs/dashboards/furcate.json"


def settled(server: TritonServer) -> Samples:
    """What the server counts once nothing is counted any more: counters are sent twice a second, others may just have ended."""
    before = scrape(server.metrics_url)
    for _ in range(20):
        time.sleep(1.1)
        now = scrape(server.metrics_url)
        if now.sum("furcate_tau_count") == before.sum("furcate_tau_count"):
            return now
        before = now
    pytest.fail("the server's counters still move after 20 s")


@pytest.fixture
def samples(tiny_server: TritonServer) -> Samples:
    """What the server counts once an answer of 40 tokens is counted."""
    with Client(tiny_server.grpc_url, deadline_s=60) as client:
        before = settled(tiny_server)
        answer = client.generate("Metrics", max_tokens=40, end_id=-1)
    passes = before.sum("furcate_tau_count") + answer.stats.num_target_steps
    for _ in range(100):
        now = scrape(tiny_server.metrics_url)
        if now.sum("furcate_tau_count") == passes:
            return now
        time.sleep(0.1)
    pytest.fail("the answer's passes are not counted after 10 s")


@pytest.mark.server
def test_the_server_exports_the_table_and_what_the_dashboard_draws(samples: Samples) -> None:
    assert {metric.name for metric in METRICS} == {name for name in samples.names() if name.startswith("furcate_")}
    expressions = re.findall(r'"expr": "(.*)"', DASHBOARD.read_text())
    drawn = {name for text in expressions for name in re.findall(r"\b(?:furcate|nv)_\w+", text)}
    assert len(drawn) > 15
    assert drawn <= samples.names()


@pytest.mark.server
def test_requests_with_different_options_share_steps(tiny_server: TritonServer) -> None:
    options = ({}, {"temperature": 0.7, "seed": 5}, {"presence_penalty": 0.5}, {"return_log_probs": True, "min_p": 0.1})
    before = settled(tiny_server)
    with Client(tiny_server.grpc_url, deadline_s=60) as client, ThreadPoolExecutor(len(options)) as pool:
        list(pool.map(lambda more: client.generate("Metrics", max_tokens=100, end_id=-1, **more), options))
    after = settled(tiny_server)
    passes = after.sum("furcate_tau_count") - before.sum("furcate_tau_count")
    steps = after.sum("furcate_decode_steps_total") - before.sum("furcate_decode_steps_total")
    assert steps < passes / 1.5


@pytest.mark.server
def test_top_once_shows_the_server(samples: Samples, tiny_server: TritonServer) -> None:
    done = subprocess.run(
        [*FURCATE, "top", "--once", "--url", tiny_server.metrics_url],
        capture_output=True, text=True, timeout=60, env={"COLUMNS": "160", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert f"of {samples.sum('furcate_pages'):.0f}" in done.stdout
    tau = samples.sum("furcate_tau_sum") / samples.sum("furcate_tau_count")
    assert f" {tau:.2f} " in done.stdout
    assert all(part in done.stdout for part in ("waiting", "acceptance at depth", "draft", "verify", "commit"))


def test_top_without_a_server_is_one_sentence() -> None:
    done = subprocess.run(
        [*FURCATE, "top", "--url", "http://127.0.0.1:1/metrics"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("furcate top: No metrics can be read at http://127.0.0.1:1/metrics ")


def test_the_dashboard_is_json_whose_panels_have_ids_and_queries_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0


def test_samples_are_read_with_their_labels() -> None:
    samples = samples_from_text('# HELP x y\nx{a="1",b="q\\"r"} 2\nx{a="2",b="s"} 3.5\ny 1e3\n')
    assert samples.sum("x") == 5.5
    assert samples.sum("x", a="2") == 3.5
    assert samples.by("b", "x") == {'q\\"r': 2.0, "s": 3.5}
    assert samples.sum("y") == 1000
    assert samples.sum("z") == 0
