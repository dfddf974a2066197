"""A receiver of OTLP over HTTP, as an OpenTelemetry collector is one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUESTS = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


class Receiver:
    """What was received; read it once the sender has ended, or under ``lock``."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.lock = threading.Lock()
        self.paths: dict[str, Any] = dict(REQUESTS)
        """By path: the type of its requests. Others are answered with 404."""
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []

    def spans(self) -> list[Any]:
        with self.lock:
            found = [each for each in self.requests if isinstance(each, ExportTraceServiceRequest)]
        return [
            span
            for each in found
            for group in each.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def values(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the values of a metric with their attributes, in the order they came in."""
        with self.lock:
            found = [each for each in self.requests if isinstance(each, ExportMetricsServiceRequest)]
        metrics = [
            metric
            for each in found
            for group in each.resource_metrics
            for scope in group.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        points = [point for metric in metrics for point in getattr(metric, metric.WhichOneof("data")).data_points]
        return [(getattr(point, point.WhichOneof("value")), attributes(point.attributes)) for point in points]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive on a free port of this host until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            with receiver.lock:
                kind = receiver.paths.get(self.path)
                if kind is not None:
                    receiver.requests.append(kind.FromString(data))
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(404 if kind is None else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
