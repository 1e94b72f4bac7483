"""How `postprocessing` tells `tensorrt_llm` that nobody reads an answer any more.

Triton passes a cancel from an ensemble's client (a cancelled or closed gRPC stream, a closed HTTP stream) on only to requests
that it makes afterwards: to `postprocessing`, with the next response, never to the running `tensorrt_llm`. Where no response is
due, `tensorrt_llm` sends one without results, to which `postprocessing` answers nothing. The one that sees the cancel sends the
answer's key to the process that the key names: a datagram, which waits for nobody and leaves no file behind.
"""

import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

NUM_RANDOM_BITS = 41
"""Of an answer's key; the bits above are the process id (Linux has 22 bits for it), so that keys are positive 64-bit numbers."""
KEY_BYTES = 8
ASKING_S = 0.05
"""Whether one answer's client is still there is asked no more often: each time costs about 0.1 ms."""
NUM_REMEMBERED_ANSWERS = 4096


def new_answer_key() -> int:
    """A key that no other answer has, in this server or the one before. It names this process."""
    return os.getpid() << NUM_RANDOM_BITS | secrets.randbits(NUM_RANDOM_BITS)


def report_disconnect(answer_key: int) -> None:
    """Tells the process that makes this answer to end it; a process that is gone need not be told."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        sender.sendto(answer_key.to_bytes(KEY_BYTES), _address(answer_key >> NUM_RANDOM_BITS))


class DisconnectListener:
    """Calls `on_disconnect(answer_key)`, in a thread of its own, for each answer of this process that is not read any more."""

    def __init__(self, on_disconnect: Callable[[int], None]) -> None:
        self._on_disconnect = on_disconnect
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(os.getpid()))
        self._thread = threading.Thread(target=self._listen, name="furcate-disconnects", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while message := self._socket.recv(KEY_BYTES):
            self._on_disconnect(int.from_bytes(message))


class AskedAnswers:
    """Which answers' clients were asked for lately, so that each is asked for often enough and not more often."""

    def __init__(self) -> None:
        self._asked_at: OrderedDict[int, float] = OrderedDict()

    def is_due(self, answer_key: int) -> bool:
        """True when the answer's client is to be asked for now."""
        now = time.monotonic()
        if now - self._asked_at.get(answer_key, -ASKING_S) < ASKING_S:
            return False
        self._asked_at[answer_key] = now
        self._asked_at.move_to_end(answer_key)
        while len(self._asked_at) > NUM_REMEMBERED_ANSWERS:
            self._asked_at.popitem(last=False)
        return True


def _address(process_id: int) -> str:
    """A name in Linux's abstract namespace: it is gone with the process."""
    return f"\0furcate-disconnects-{process_id}"
