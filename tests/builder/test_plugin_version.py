"""The plugins' version covers every file that ends up in a kernel."""

from pathlib import Path

import furcate.plugins
from furcate.builder.plugin_version import SOURCES

FOLDER = Path(furcate.plugins.__file__).parent


def test_every_file_with_device_code_is_part_of_the_version() -> None:
    device_code = {
        path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py") if "@triton.jit" in path.read_text()
    }
    assert len(device_code) > 5
    assert device_code <= set(SOURCES)
