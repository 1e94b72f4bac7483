"""A further rank of an engine that several GPUs share: `python -m furcate.decoding.executors.worker ENGINE`, under mpirun.

It repeats rank 0's target passes and commits until rank 0 is gone.
"""

import sys
from pathlib import Path

from furcate.builder.engine import read_engine
from furcate.builder.errors import EngineMismatch, FurcateError
from furcate.decoding.executors.tensorrt import load_tensorrt_executor


def main() -> None:
    """Entry point. Exits with 0 when rank 0 has ended, with 2 on a user's error (one line on stderr)."""
    try:
        if len(sys.argv) != 2:
            raise EngineMismatch(f"{len(sys.argv) - 1} arguments were given; give one, the engine that rank 0 serves.")
        load_tensorrt_executor(read_engine(Path(sys.argv[1]))).follow()
    except FurcateError as error:
        print(f"worker: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
