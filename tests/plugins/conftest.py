"""The kernel interpreter as a fixture."""

import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest


class Interpreter:
    """A process of interpreted.py; called with a function's name and its arguments."""

    def __init__(self):
        script = Path(__file__).with_name("interpreted.py")
        command = [sys.executable, "-W", "error::RuntimeWarning", str(script)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, name, **arguments):
        body = pickle.dumps((name, arguments))
        self.process.stdin.write(struct.pack("<Q", len(body)) + body)
        self.process.stdin.flush()
        header = self.process.stdout.read(8)
        assert header, "the interpreter process ended; its message is in stderr"
        is_ok, result = pickle.loads(self.process.stdout.read(struct.unpack("<Q", header)[0]))
        assert is_ok, result
        return result

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def interpreter():
    pytest.importorskip("triton", reason="the kernel language is not installed: pip install 'furcate[gpu]'")
    process = Interpreter()
    yield process
    process.close()
