"""Export of metrics of the table to Prometheus: what is told as it happens, what is read at each scrape, and
the page that serves both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.address import Address
from protos.metric_table import OF_PROCESS, SECONDS, Exporter, MetricSpec, exported_by

REQUEST_SECONDS: Final = 10.0  # for a request to be here whole
_CREATED: Final = "_created"  # when a counter began: twice as many series, for nothing


class Scrape:
    """What one reading of all values finds.

    Args:
        specs: of the metrics that may be given a value.
    """

    def __init__(self, specs: Mapping[str, MetricSpec]) -> None:
        self._specs = specs
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, spec in specs.items():
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            self._families[name] = kind(name, spec.help, labels=spec.labels)

    def add(self, name: str, value: float, *labels: str) -> None:
        """A metric has this value with these labels.

        Raises:
            KeyError: this exporter has no such metric, or it is not read at scrapes.
            ValueError: it has other labels.
        """
        family = self._families[name]
        if len(labels) != len(self._specs[name].labels):
            raise ValueError(f"{name} has the labels {self._specs[name].labels}, not {len(labels)}")
        family.add_metric(labels, value)

    def families(self) -> Iterable[Metric]:
        """All metrics, also those without a value."""
        return self._families.values()


class Exported(CollectorRegistry):
    """The metrics of one exporter, apart from prometheus_client's global registry.

    Args:
        exporter: who exports them.
        read: is called at each scrape, on a thread of its own, to add what is only read then.
    """

    def __init__(self, exporter: Exporter, read: Callable[[Scrape], None]) -> None:
        super().__init__()
        self._specs = exported_by(exporter)  # those that are not told what happens
        for spec in OF_PROCESS:
            del self._specs[spec.name]
        ProcessCollector(registry=self)
        self.register(_Reader(self._specs, read))

    def counter(self, name: str) -> Counter:
        """A counter of the table, to be told what happens."""
        spec = self._specs.pop(name)
        return Counter(name, spec.help, spec.labels, registry=self)

    def gauge(self, name: str) -> Gauge:
        """A gauge of the table, to be set."""
        spec = self._specs.pop(name)
        return Gauge(name, spec.help, spec.labels, registry=self)

    def histogram(self, name: str) -> Histogram:
        """A histogram of the table, to be told what happens."""
        spec = self._specs.pop(name)
        return Histogram(name, spec.help, spec.labels, buckets=SECONDS, registry=self)

    def collect(self) -> Iterator[Metric]:
        """All metrics with their present values."""
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith(_CREATED)]
            if family.samples or not family.name.endswith(_CREATED):
                yield family


class _Reader(Collector):
    def __init__(self, specs: Mapping[str, MetricSpec], read: Callable[[Scrape], None]) -> None:
        self._specs, self._read = specs, read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        scrape = Scrape(self._specs)
        self._read(scrape)
        return scrape.families()


class MetricsServer:
    """``/metrics`` over HTTP, on threads of its own.

    Args:
        registry: what is served.
        listen: where; port 0 takes a free one.

    Attributes:
        address: where it listens, with the real port.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, registry: CollectorRegistry, listen: Address) -> None:
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(listen.port, listen.host, registry)
        # Whoever connects and says nothing would keep a thread for ever.
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": REQUEST_SECONDS})
        self.address = Address(listen.host, self._server.server_port)

    def close(self) -> None:
        """Close the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
