"""Becomes a command that is sent SIGTERM when its parent dies, however it dies: bound_exec.py PARENT_PID COMMAND ...

A program of its own, run by path, because the alternative (code between fork and exec) breaks in a process where gRPC has
threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: the command takes this process over."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before the command began")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
