"""Reading Prometheus text."""

import re

from . import plain_http

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics:
    """One scrape of a `/metrics` page."""

    def __init__(self, text):
        self._samples = []
        for line in text.splitlines():
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                self._samples.append((name, dict(_LABEL.findall(labels or "")), float(value)))

    @classmethod
    def scrape(cls, url):
        reply = plain_http.get(url, timeout=30)
        reply.raise_for_status()
        return cls(reply.text)

    def sum(self, name, **labels):
        """Sum of all series of `name` that carry these labels; 0 if there is none."""
        return sum(
            value
            for sample, its, value in self._samples
            if sample == name and labels.items() <= its.items()
        )
