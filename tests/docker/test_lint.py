"""The deployment's files by the tools of their trades."""

import json
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
from deployment_files import COMPOSE, DOCKERFILE, KSERVE, KUBERNETES, MANIFESTS, TWO_GPUS, documents

BIN = Path(sys.executable).parent
KUBERNETES_VERSION = "1.37"
RESOURCES = [resource for path in (*MANIFESTS, KSERVE) for resource in documents(path)]
CORE = [resource for resource in RESOURCES if "kserve" not in resource["apiVersion"]]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([BIN / "hadolint", "--format", "json", DOCKERFILE], capture_output=True, text=True)
    assert (json.loads(done.stdout), done.returncode) == ([], 0)


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text().replace("26.09-py3 AS", "latest AS"))
    done = subprocess.run([BIN / "hadolint", "--format", "json", worse], capture_output=True, text=True)
    assert [found["code"] for found in json.loads(done.stdout)] == ["DL3007"]


@pytest.mark.parametrize("path", [COMPOSE, TWO_GPUS], ids=lambda path: path.name)
def test_compose_file_is_of_the_compose_specification(path: Path) -> None:
    check = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("resource", CORE, ids=lambda resource: f"{resource['kind']}-{resource['metadata']['name']}")
def test_kubernetes_takes_it(resource: dict) -> None:
    assert kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True) == KUBERNETES_VERSION


def test_kubernetes_would_refuse_an_unknown_field() -> None:
    (hpa,) = documents(KUBERNETES / "autoscale.yaml")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**hpa, "spec": {**hpa["spec"], "replicas": 2}}, KUBERNETES_VERSION, strict=True)
