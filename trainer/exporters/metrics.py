"""``python -m ftmon.trainer.exporters.metrics RUNDIR``: a run's figures for Prometheus (``--metrics``).

They are served over HTTP, or written to a file for node_exporter's textfile collector. The process ends with the run.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.errors import FtmonError, UsageError
from ...protocol.figures import PREFIX
from ...protocol.host.process import never_fail
from ...protocol.run.rundir import RunDir
from ..host.sockets import Listen, parse_metrics
from .current import RunFigures
from .stream import RunStream, yield_cpu

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric

_WAIT_SECONDS = 0.5
FILE_SECONDS = 5.0
"""Time between two writes of the textfile."""
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


def _serve(listen: Listen, registry: "CollectorRegistry") -> "WSGIServer":
    from prometheus_client import start_http_server

    server, _ = start_http_server(listen.port, addr=listen.host, registry=registry)
    # Otherwise each connection that sends nothing keeps a thread, and each that breaks writes a traceback.
    handler: Any = server.RequestHandlerClass
    handler.timeout = _SILENT_SECONDS
    server.handle_error = lambda request, client_address: None
    return server


def _write(path: Path, registry: "CollectorRegistry") -> str:
    """Write the textfile; return why it cannot be written, empty if it was."""
    from prometheus_client import write_to_textfile

    try:
        write_to_textfile(str(path), registry)
    except OSError as error:  # a full disk: the next one may succeed
        return f"{path} cannot be written: {error.strerror}"
    return ""


def export(run: RunDir) -> int:
    """Export the figures of a run until it is over; return the exit status.

    Raises:
        UsageError: ``prometheus_client`` is not installed, or the port cannot be used.
        RunDirError: the run directory cannot be read.
    """
    file = run.read_run()
    target = parse_metrics(file.options.metrics)
    from prometheus_client import CollectorRegistry

    figures = RunFigures()
    registry = CollectorRegistry()
    registry.register(RunCollector(run.id, figures))
    stream = RunStream(run)
    yield_cpu()  # not before: what is sent until it has subscribed is missed
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    server = None
    try:
        if isinstance(target, Listen):
            server = _serve(target, registry)
        path = Path(file.cwd, target) if isinstance(target, Path) else None
        next_write, error = 0.0, ""
        while not stream.over and not stopped.is_set():
            for frame, live in stream.read(_WAIT_SECONDS):
                figures.apply(frame, live)
            figures.dropped = stream.dropped
            if path is not None and time.monotonic() >= next_write:
                next_write = time.monotonic() + FILE_SECONDS
                error = _write(path, registry)
            stream.report("metrics", 0, error)
        if path is not None:
            figures.end()
            print(_write(path, registry), end="", file=sys.stderr)
    except OSError as error:
        raise UsageError(f"--metrics {file.options.metrics}: {error.strerror or error}") from None
    finally:
        stream.close()
        if server is not None:
            server.shutdown()
    return 0


def main(argv: list[str]) -> int:
    """Export the run of the directory named in ``argv``; return the exit status."""
    if len(argv) != 1:
        print("usage: python -m ftmon.trainer.exporters.metrics RUNDIR", file=sys.stderr)
        return 2
    never_fail()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ctrl-c meant for the job
    try:
        return export(RunDir(argv[0]))
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
