"""furcate's metrics among Triton's own. Runs inside Triton's Python backend.

Each value that is set is a message to the server, so gauges are sent when they change, and counters now and then.
"""

import threading

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.model_repository.metrics_table import METRICS, MetricKind
from furcate.model_repository.step_metrics import changes

COUNTER_PERIOD_S = 0.5


class Metrics:
    """The metrics of one engine. `counters()` gives their values; it is called with `lock` held, from a thread of its own."""

    def __init__(self, engine_name, *, lock, counters):
        self._engine_name = engine_name
        self._families = {metric.name: _family(metric) for metric in METRICS}
        self._labels = {metric.name: metric.label for metric in METRICS}
        self._metrics = {}
        self._gauges, self._counters = {}, {}
        self._read_counters = counters
        self._lock = lock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_counters, name="furcate-metrics", daemon=True)
        self._thread.start()

    def set_gauges(self, gauges):
        """Sets the gauges that changed."""
        for sample, value in gauges.items():
            if self._gauges.get(sample) != value:
                self._metric(sample).set(value)
        self._gauges = gauges

    def stop(self):
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _send_counters(self):
        while not self._ended.wait(COUNTER_PERIOD_S):
            with self._lock:
                counters = self._read_counters()
                for sample, growth in changes(self._counters, counters):
                    self._metric(sample).increment(growth)
                self._counters = counters

    def _metric(self, sample):
        if sample not in self._metrics:
            name, value = sample
            labels = {"engine": self._engine_name} | ({} if value is None else {self._labels[name]: value})
            self._metrics[sample] = self._families[name].Metric(labels=labels)
        return self._metrics[sample]


def _family(metric):
    # Triton fills its module only after the models' modules are imported.
    kinds = {MetricKind.GAUGE: pb_utils.MetricFamily.GAUGE, MetricKind.COUNTER: pb_utils.MetricFamily.COUNTER}
    return pb_utils.MetricFamily(name=metric.name, description=metric.meaning, kind=kinds[metric.kind])
