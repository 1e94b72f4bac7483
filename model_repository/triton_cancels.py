"""Which live requests are cancelled: asked in the background, so that no step waits for the answer.

Triton drops a cancelled request that waits for its turn, without telling the model, and keeps its place among the live ones
until it counts as idle. So cancelled requests are found early, to give their pages back and be ended in their turn, and
abandoned ones are dropped.
"""

import threading
import time

SWEEP_S = 0.05
"""How often every live request is asked for; an answer takes about 0.1 ms."""
ABANDONED_S = 0.2
"""A cancelled request without a turn for so long gets none any more."""


class Cancels:
    """Watches the response senders of the live requests.

    `on_cancelled(key)` is called once a request is known to be cancelled, `on_abandoned(key)` when it gets no more turns either;
    both from a thread of this object's own.
    """

    def __init__(self, *, on_cancelled, on_abandoned):
        self._on_cancelled = on_cancelled
        self._on_abandoned = on_abandoned
        self._senders = {}
        self._rested_at = {}
        self._cancelled = set()
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sweep, name="furcate-cancels", daemon=True)
        self._thread.start()

    def watch(self, key, sender):
        """A request's turn begins."""
        with self._guard:
            self._senders[key] = sender
            self._rested_at.pop(key, None)

    def rest(self, key, *, is_last):
        """A request's turn ends. After its last one its sender must not be asked any more."""
        with self._guard:
            self._rested_at[key] = time.monotonic()
            if is_last:
                self._forget(key)

    def is_cancelled(self, key):
        """True when the request is known to be cancelled."""
        return key in self._cancelled

    def stop(self):
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _sweep(self):
        while not self._ended.wait(SWEEP_S):
            for key in list(self._senders):
                tell = self._news_of(key)
                if tell is not None:
                    tell(key)

    def _news_of(self, key):
        """Whom to tell of this request, if anybody.

        Asked in a method of its own: a sender that a variable still names after its request is over keeps Triton from ever
        unloading the model, and so from ending in order.
        """
        with self._guard:
            sender = self._senders.get(key)
            if sender is None:
                return None
            if key not in self._cancelled:
                if not sender.is_cancelled():
                    return None
                self._cancelled.add(key)
                return self._on_cancelled
            if time.monotonic() - self._rested_at.get(key, float("inf")) > ABANDONED_S:
                self._forget(key)
                return self._on_abandoned
            return None

    def _forget(self, key):
        del self._senders[key], self._rested_at[key]
        self._cancelled.discard(key)
