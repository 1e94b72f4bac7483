"""Every command and path in docker/ and docs/deploy.md is one that this repository has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from deployment_files import (
    COMPOSE,
    DOCKERFILE,
    GUIDE,
    KSERVE,
    KUBERNETES,
    ROOT,
    TWO_GPUS,
    all_commands,
    document,
    documents,
)

from furcate.builder.config import BuildConfig, Executor
from furcate.builder.tensorrt_engine import check_tensorrt_config
from furcate.client.cli_canary import CanaryConfig
from furcate.client.cli_generate import GenerateConfig
from furcate.client.cli_serve import ServeConfig
from furcate.client.installation import find_installation

CONFIGS = {"serve": ServeConfig, "canary": CanaryConfig, "generate": GenerateConfig}
COMMANDS = all_commands()


def of(program: str) -> list[tuple[str, list[str]]]:
    return [(name, words) for name, words in COMMANDS if words[0] == program]


def test_the_commands_are_found() -> None:
    assert {name for name, _ in of("furcate")} == {
        "compose.yaml",
        "compose.two-gpus.yaml",
        "kserve.yaml",
        "serve.yaml",
        "deploy.md",
        "Dockerfile",
    }
    assert {name for name, _ in of("build_engine")} == {
        "compose.yaml",
        "compose.two-gpus.yaml",
        "build.yaml",
        "deploy.md",
        "Dockerfile",
    }


@pytest.mark.parametrize(
    ("name", "words"), of("furcate"), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_furcate_takes_it(name: str, words: list[str]) -> None:
    config = tyro.cli(CONFIGS[words[1]], args=words[2:])
    assert isinstance(config, CONFIGS[words[1]])


@pytest.mark.parametrize(
    ("name", "words"), of("build_engine"), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_build_engine_takes_it(name: str, words: list[str]) -> None:
    if words[1:] == ["--help"]:
        return
    settings = (tyro.conf.EnumChoicesFromValues, tyro.conf.OmitArgPrefixes)
    config = tyro.cli(BuildConfig, args=words[1:], config=settings)
    if config.executor is Executor.TENSORRT:
        check_tensorrt_config(config)


def test_every_module_that_is_run_is_there() -> None:
    texts = [TWO_GPUS.read_text(), GUIDE.read_text()]
    modules = {module for text in texts for module in re.findall(r"python -m (\S+)", text)}
    assert modules == {"furcate.decoding.executors.worker"}
    for module in modules:
        done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "worker: 0 arguments were given; give one, the engine that rank 0 serves.\n"


def test_hf_has_the_options() -> None:
    script = Path(sys.executable).parent / "hf"
    text = subprocess.run([script, "download", "--help"], capture_output=True, text=True, check=True).stdout
    options = {word for _, words in of("hf") for word in words if word.startswith("--")}
    assert {words[1] for _, words in of("hf")} == {"download"}
    assert options
    assert all(option in text for option in options)


def test_tritonserver_has_the_options_that_kserve_gets(tmp_path: Path) -> None:
    installation = find_installation(tmp_path)
    done = subprocess.run([installation.binary, "--help"], capture_output=True, text=True, env=installation.environment)
    args = document(KSERVE, "InferenceService")["spec"]["predictor"]["model"]["args"]
    known = set(re.findall(r"^\s+(--[\w-]+)", done.stdout + done.stderr, re.MULTILINE))
    assert len(known) > 50
    assert {argument.split("=")[0] for argument in args} <= known


def test_every_path_exists() -> None:
    guide = GUIDE.read_text()
    named = [GUIDE.parent / link for link in re.findall(r"\]\((\.\.[^)#]+)\)", guide)]
    named += [ROOT / path for path in re.findall(r"(?:-f|-k) (docker\S*)", guide + DOCKERFILE.read_text())]
    named += [ROOT / path for path in re.findall(r"^COPY (\S+)", DOCKERFILE.read_text(), re.MULTILINE)]
    for service in documents(COMPOSE)[0]["services"].values():
        if "build" in service:
            named.append(COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"])
        named += [COMPOSE.parent / each.split(":")[0] for each in service["volumes"] if each.startswith("./")]
    kustomization = documents(KUBERNETES / "kustomization.yaml")[0]
    files = [each.split("=")[1] for each in kustomization["configMapGenerator"][0]["files"]]
    named += [KUBERNETES / each for each in kustomization["resources"] + files]
    assert len(named) > 15
    assert [str(path) for path in named if not path.exists()] == []
