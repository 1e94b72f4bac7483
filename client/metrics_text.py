"""Prometheus's text format, read: what a server counts, by name and labels."""

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from furcate.builder.errors import ServerError

SCRAPE_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"(?m)^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of one moment."""

    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name with these labels; 0 when there is none."""
        wanted = labels.items()
        return sum(value for (other, found), value in self.values.items() if other == name and wanted <= found)

    def by(self, label: str, name: str) -> dict[str, float]:
        """The samples of this name, summed for each value of a label."""
        sums: dict[str, float] = {}
        for (other, labels), value in self.values.items():
            key = dict(labels).get(label)
            if other == name and key is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def names(self) -> set[str]:
        """The names of all samples."""
        return {name for name, _ in self.values}


def samples_from_text(text: str) -> Samples:
    """The samples in a page of Prometheus text."""
    return Samples(
        values={
            (name, frozenset(_LABEL.findall(labels or ""))): float(value)
            for name, labels, value in _SAMPLE.findall(text)
        }
    )


def scrape(metrics_url: str) -> Samples:
    """What the server counts now; ServerError when it does not say."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=SCRAPE_TIMEOUT_S) as answer:
            return samples_from_text(answer.read().decode())
    except (OSError, ValueError) as error:
        raise ServerError(
            f"No metrics can be read at {metrics_url} ({error}); give the address that furcate serve prints for metrics."
        ) from None
