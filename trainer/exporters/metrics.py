"""A run's figures for Prometheus (``--metrics``): over HTTP, or in a file for node_exporter's textfile collector."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.errors import UsageError
from ...protocol.figures import PREFIX
from ...protocol.messages.wire import Frame
from ...protocol.run.rundir import RunFile
from ..host.sockets import Listen, parse_metrics
from .current import RunFigures

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

FILE_SECONDS = 5.0  # Time between two writes of the textfile
_SILENT_SECONDS = 30.0


class RunCollector:
    """The figures of a run in the form of ``prometheus_client``."""

    def __init__(self, run: str, figures: RunFigures) -> None:
        self._run = run
        self._figures = figures

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics: the interface of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for figure, labels, value in self._figures.points():
            names = sorted(labels)
            if figure.name not in families:
                kind = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
                families[figure.name] = kind(
                    PREFIX + figure.name, f"{figure.help}.", labels=["run", *names], unit=figure.unit
                )
            families[figure.name].add_metric([self._run, *(labels[name] for name in names)], value)
        yield from families.values()


def _serve(listen: Listen, registry: "CollectorRegistry") -> None:
    from prometheus_client import start_http_server

    server, _ = start_http_server(listen.port, addr=listen.host, registry=registry)
    # Otherwise each connection that sends nothing keeps a thread, and each that breaks writes a traceback.
    handler: Any = server.RequestHandlerClass
    handler.timeout = _SILENT_SECONDS
    server.handle_error = lambda request, client_address: None


class Prometheus:
    """Shows the figures of a run to Prometheus, for ``python -m ftmon.trainer.exporters RUNDIR metrics``.

    Raises ``UsageError`` if ``prometheus_client`` is not installed, or ``--metrics`` is wrong.
    """

    seconds = 2.0
    end_seconds = 5.0
    dropped = 0  # points that did not reach the target

    def __init__(self, run: RunFile) -> None:
        target = parse_metrics(run.options.metrics)
        from prometheus_client import CollectorRegistry

        self.error = ""
        self._listen = target if isinstance(target, Listen) else None
        self._path = Path(run.cwd, target) if isinstance(target, Path) else None
        self._next_write = 0.0
        self._figures = RunFigures()
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(run.id, self._figures))

    def start(self) -> None:
        """Serve the figures, if they are; raise ``UsageError`` if the port cannot be used."""
        try:
            if self._listen is not None:
                _serve(self._listen, self._registry)
        except OSError as error:
            raise UsageError(f"--metrics {self._listen}: {error.strerror or error}") from None

    def put(self, frame: Frame, live: bool) -> None:
        """Apply a message."""
        self._figures.apply(frame, live)

    def check(self, missed: int) -> None:
        """Write the file, if due."""
        self._figures.dropped = missed
        if time.monotonic() >= self._next_write:
            self._next_write = time.monotonic() + FILE_SECONDS
            self._write()

    def end(self, seconds: float) -> bool:
        """Write what stays true after the run into the file."""
        self._figures.end()
        self._write()
        return True

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        try:
            if self._path is not None:
                write_to_textfile(str(self._path), self._registry)
            self.error = ""
        except OSError as error:  # a full disk: the next one may succeed
            self.error = f"{self._path} cannot be written: {error.strerror}"
