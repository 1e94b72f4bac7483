"""The engine's page counts among Triton's own metrics. Runs inside Triton's Python backend."""

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

_GAUGES = {
    "allocated": ("furcate_pages_allocated", "K/V pages held by live requests"),
    "committed": ("furcate_pages_committed", "K/V pages that hold committed tokens"),
    "total": ("furcate_pages_total", "K/V pages in the pool"),
    "live": ("furcate_live_requests", "Requests between their first step and their last"),
}


class Gauges:
    """Four gauges, labelled with the engine's name."""

    def __init__(self, engine_name):
        labels = {"engine": engine_name}
        self._families = {
            key: pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.GAUGE)
            for key, (name, text) in _GAUGES.items()
        }
        self._metrics = {key: family.Metric(labels=labels) for key, family in self._families.items()}
        self._values = {}

    def update(self, **values):
        """Sets the gauges that changed: each set is a message to the server."""
        for key, value in values.items():
            if self._values.get(key) != value:
                self._metrics[key].set(value)
        self._values = values
