"""docker/ agrees with the code it deploys: ports, probes, versions, and what the wheel is made of."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from deployment_files import COMPOSE, DOCKERFILE, KSERVE, KUBERNETES, MANIFESTS, ROOT, document, documents
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from furcate.client.cli_canary import CanaryConfig
from furcate.client.server import ServerConfig
from furcate.model_repository.tables import ENSEMBLE, TENSORRT_LLM

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PORTS = ServerConfig(repository=Path("repository"))
GRPC, METRICS, HTTP = PORTS.grpc_port, PORTS.metrics_port, PORTS.http_port
SMALLEST_FATAL_BODY_MB = 4
BUILD, SERVE, _ = MANIFESTS


def pins(path: Path) -> dict[str, str]:
    """Package -> version of a locked list."""
    lines = [line.removesuffix(" \\").split("==") for line in path.read_text().splitlines() if line[:1].isalnum()]
    return {canonicalize_name(name): version for name, version in lines}


def project_pins(*extras: str) -> dict[str, str]:
    """Package -> version that pyproject.toml asks for."""
    texts = PROJECT["project"]["dependencies"] + [
        text for extra in extras for text in PROJECT["project"]["optional-dependencies"][extra]
    ]
    requirements = [Requirement(text) for text in texts]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in requirements}


def pod(path: Path = SERVE, kind: str = "Deployment") -> dict[str, Any]:
    return document(path, kind)["spec"]["template"]["spec"]


def test_containers_hold_the_versions_of_pyproject() -> None:
    locked = pins(ROOT / "requirements/container.txt")
    wanted = project_pins("gpu", "api")
    assert {name: locked.get(name) for name in wanted} == wanted


def test_containers_hold_the_versions_that_the_tests_run_with() -> None:
    locked, tested = pins(ROOT / "requirements/container.txt"), pins(ROOT / "requirements/server.txt")
    both = locked.keys() & tested.keys()
    assert len(both) > 60
    assert {name: locked[name] for name in both} == {name: tested[name] for name in both}


def test_each_image_has_the_tensorrt_that_the_bindings_are_tested_with() -> None:
    from tensorrt_bindings import VERSIONS

    assert sorted(re.findall(r"^ENV TENSORRT=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)) == sorted(VERSIONS)
    assert project_pins("tensorrt")["tensorrt-cu13"] in VERSIONS


def test_images_are_pinned_and_named_after_the_project() -> None:
    version = PROJECT["project"]["version"]
    text = "\n".join(path.read_text() for path in (DOCKERFILE, COMPOSE, KSERVE, *MANIFESTS, ROOT / "docs/deploy.md"))
    assert set(re.findall(r"furcate-(?:build|serve):(\S+)", text)) == {version}
    used = re.findall(r"^(?:FROM|\s*-?\s*image:) (\S+)", text, re.MULTILINE)
    outside = {image for image in used if "/" in image}
    assert len(outside) == 3
    assert all(re.search(r":[\w.-]*\d[\w.-]*$", image) for image in outside)


def test_ports_are_the_servers() -> None:
    triton, proxy = pod()["containers"]
    assert [port["containerPort"] for port in triton["ports"]] == [GRPC, METRICS]
    assert re.findall(r"^EXPOSE (\d+) (\d+)$", DOCKERFILE.read_text(), re.MULTILINE) == [(str(GRPC), str(METRICS))]
    published = documents(COMPOSE)[0]["services"]["serve"]["ports"]
    (http,) = (port["containerPort"] for port in proxy["ports"])
    assert published == [f"{port}:{port}" for port in (GRPC, METRICS, http)]
    annotations = document(SERVE, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(METRICS)
    names = {port["name"]: port["containerPort"] for container in (triton, proxy) for port in container["ports"]}
    for port in document(SERVE, "Service")["spec"]["ports"]:
        assert names[port["targetPort"]] == port["port"]


def test_http_is_reached_through_the_proxy_alone_and_bodies_stay_small() -> None:
    text = (KUBERNETES / "nginx.conf").read_text()
    assert set(re.findall(r"proxy_pass http://([^;]+);", text)) == {f"127.0.0.1:{HTTP}"}
    (limit,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(limit) < SMALLEST_FATAL_BODY_MB
    (models,) = re.findall(r"location ~ \^/v2/models/\((.*?)\)/", text)
    assert models.split("|") == [ENSEMBLE.name, TENSORRT_LLM.name]
    everything = COMPOSE.read_text() + SERVE.read_text() + KSERVE.read_text()
    assert f"{HTTP}:" not in everything.replace("127.0.0.1:", "")
    assert "--http-address=127.0.0.1" in KSERVE.read_text()


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
@pytest.mark.parametrize("where", ["serve", "kserve"])
def test_probes_ask_for_an_answer_and_outlast_their_canary(where: str, probe: str) -> None:
    model = document(KSERVE, "InferenceService")["spec"]["predictor"]["model"]
    container = pod()["containers"][0] if where == "serve" else model
    port = GRPC if where == "serve" else model["ports"][0]["containerPort"]
    command = container[probe]["exec"]["command"]
    assert command[:3] == ["furcate", "canary", "--url"]
    assert command[3] == f"grpc://127.0.0.1:{port}"
    assert container[probe]["timeoutSeconds"] > float(command[command.index("--deadline-s") + 1])


def test_compose_asks_the_default_port() -> None:
    check = documents(COMPOSE)[0]["services"]["serve"]["healthcheck"]
    assert check["test"][:3] == ["CMD", "furcate", "canary"]
    assert CanaryConfig().url == f"grpc://127.0.0.1:{GRPC}"


def test_nothing_runs_as_root() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE.read_text(), re.MULTILINE) == ["1000:1000"]
    for spec in (pod(), pod(BUILD, "Job")):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 1000
    assert all(not each["securityContext"]["allowPrivilegeEscalation"] for each in pod()["containers"])


def test_autoscaler_follows_the_metric_that_the_adapter_makes() -> None:
    (rule,) = documents(KUBERNETES / "prometheus-adapter.yaml")[0]["rules"]["custom"]
    for path in (KUBERNETES / "autoscale.yaml", KSERVE):
        (metric,) = document(path, "HorizontalPodAutoscaler")["spec"]["metrics"]
        assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert document(SERVE, "Deployment")["metadata"]["name"] == "furcate"
    assert set(re.findall(r'model="(\w+)"', rule["metricsQuery"])) == {ENSEMBLE.name, TENSORRT_LLM.name}


def test_the_image_gets_a_whole_wheel(tmp_path: Path) -> None:
    """What .dockerignore lets through makes a wheel that holds every source file, and both commands."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in allowed:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path / "wheels", tmp_path], check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        scripts = archive.read(f"{wheel.name.rsplit('-', 3)[0]}.dist-info/entry_points.txt").decode()
    folders = [ROOT / path for path in PROJECT["tool"]["setuptools"]["package-dir"].values()]
    sources = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json", ".cpp", ".h")
    ]
    assert len(sources) > 100
    assert [str(path) for path in sources if f"furcate/{path.relative_to(ROOT)}" not in packed] == []
    assert "build_engine = " in scripts
    assert "furcate = " in scripts


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_puts_the_proxys_settings_into_the_pods() -> None:
    done = subprocess.run(["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True, check=True)
    name, used = re.findall(r"name: (furcate-proxy-\w+)$", done.stdout, re.MULTILINE)
    assert name == used, "the map, and the pods' volume"
    assert "client_max_body_size" in done.stdout
