"""What a running server's own gauges say."""

import time
import urllib.request

from furcate.client.server import TritonServer


def gauge(server: TritonServer, name: str) -> float:
    """The value of one gauge."""
    with urllib.request.urlopen(server.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def is_idle_soon(server: TritonServer) -> bool:
    """True once no page is held and no request lives, long before the longest answer could have ended by itself."""
    for _ in range(100):
        if gauge(server, "furcate_pages_allocated") == 0 and gauge(server, "furcate_live_requests") == 0:
            return True
        time.sleep(0.01)
    return False
