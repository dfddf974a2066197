"""``--report-to otel``: metrics and spans over OTLP/HTTP (protobuf), to what the ``OTEL_*`` variables name.

Metrics are the current figures of the run: ``ftmon.NAME``, and ``megatron.training.NAME`` where Megatron-Core has the
same figure. Each step of a rank is a trace: a span ``step`` with a span for each of its phases.

Requests are made here, one after another: the SDK's ``BatchSpanProcessor`` drops the oldest spans over 2,048, and its
``force_flush`` reports success whatever happened. A gauge whose value is not finite is left out, because the SDK would
go on with the last finite one; ``ftmon.loss_finite`` and its like say so.
"""

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from ... import __version__
from ...protocol.errors import TargetError, UsageError
from ...protocol.figures import FIGURES, Figure, Point, finite_flag
from ...protocol.messages.control import Alert
from ...protocol.messages.telemetry import PhaseRecord, Step
from ...protocol.messages.wire import Frame
from ...protocol.run.rundir import RunFile
from .current import ALERTS, DROPPED, RunFigures
from .report import Sent

_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "watts": "W", "celsius": "Cel", "hertz": "Hz"}
"""UCUM, as OpenTelemetry's semantic conventions ask for."""
_METRICS_SECONDS = 10.0  # Default of ``OTEL_METRIC_EXPORT_INTERVAL`` here; the SDK's 60 s are more than many runs last
_SPANS_SECONDS = 5.0  # Default of ``OTEL_BSP_SCHEDULE_DELAY``, as in the SDK
_SPANS_AT_ONCE = 512  # Default of ``OTEL_BSP_MAX_EXPORT_BATCH_SIZE``, as in the SDK
_PROTOCOL = "http/protobuf"


class OpenTelemetry:
    """The target ``otel``, a ``report.Target``."""

    end_seconds = 5.0

    def __init__(self) -> None:
        self._interval = _number("OTEL_METRIC_EXPORT_INTERVAL", _METRICS_SECONDS * 1e3) / 1e3
        self.seconds = min(_number("OTEL_BSP_SCHEDULE_DELAY", _SPANS_SECONDS * 1e3) / 1e3, self._interval)
        self._figures = RunFigures()
        self._alerts = 0
        self._next_metrics = 0.0
        self._has_steps = False
        self._failures = _Failures()
        self._errors: dict[str, TargetError] = {}  # By signal whose last request failed

    def open(self, run: RunFile) -> None:
        """Create the exporters; nothing is sent yet."""
        if (protocol := os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL)) != _PROTOCOL:
            raise UsageError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: ftmon sends {_PROTOCOL}; unset it")
        resource = _resource(run)
        self._finished: list[ReadableSpan] = []
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(_Collect(self._finished))
        self._tracer = provider.get_tracer("ftmon", __version__)
        self._spans = OTLPSpanExporter() if _wanted("OTEL_TRACES_EXPORTER") else None
        self._metrics = _Metrics(run.id, resource) if _wanted("OTEL_METRICS_EXPORTER") else None
        self._at_once = max(1, int(_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _SPANS_AT_ONCE)))

    def points(self, batch: Sequence[Sent]) -> None:
        """Send the spans of the steps, and the metrics if due."""
        for frame, live in batch:
            self._figures.apply(frame, live)
            if live and isinstance(frame.message, Step):
                self._next_metrics *= self._has_steps  # the first step is sent at once: the run may be short
                self._has_steps = True
                if self._spans is not None:
                    self._add_spans(frame.message)
        self._send_spans()
        if time.monotonic() >= self._next_metrics:
            self._next_metrics = time.monotonic() + self._interval
            self._send_metrics()
        self._check()

    def alert(self, alert: Alert) -> None:
        """Change the gauge of alerts."""
        self._alerts += 1
        self._figures.apply(Frame(self._alerts, alert.time, alert), True)

    def close(self) -> None:
        """Send the last metrics, without what ended with the run."""
        self._send_spans()
        self._figures.end()
        self._send_metrics()
        self._check()

    def _add_spans(self, step: Step) -> None:
        start = round(step.started * 1e9)
        end = start + step.host_us * 1_000
        span = self._tracer.start_span("step", start_time=start, attributes=_step_attributes(step))
        if step.loss is not None and not math.isfinite(step.loss):
            span.set_status(trace.StatusCode.ERROR, "the loss is not finite")
        inside = trace.set_span_in_context(span)
        for phase in step.phases:
            began = min(end, start + phase.start_us * 1_000)
            # The phase ``init`` of the first step comes before it: a span of its own.
            parent = inside if began >= start else None
            attributes = {"ftmon.rank": step.rank, **_phase_attributes(phase)}
            child = self._tracer.start_span(phase.name, parent, start_time=began, attributes=attributes)
            child.end(min(end, began + phase.host_us * 1_000))
        span.end(end)

    def _send_spans(self) -> None:
        spans, self._finished[:] = list(self._finished), []
        if self._spans is None:
            return
        for at in range(0, len(spans), self._at_once):
            self._note("TRACES", self._spans.export(spans[at : at + self._at_once]) is SpanExportResult.SUCCESS)
            if "TRACES" in self._errors:
                return

    def _send_metrics(self) -> None:
        if self._metrics is not None:
            self._note("METRICS", self._metrics.send(self._figures.points()))

    def _note(self, signal: str, accepted: bool) -> None:
        self._errors.pop(signal, None)
        if not accepted:
            self._errors[signal] = self._failures.error(signal)

    def _check(self) -> None:
        """Raise the error of a signal whose last request failed, even if nothing was sent since."""
        for error in self._errors.values():
            raise error


class _Collect(SpanProcessor):
    def __init__(self, finished: list[ReadableSpan]) -> None:
        self._finished = finished

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._finished.append(span)


class _Metrics:
    """The instruments of all figures; ``send`` makes one request with the values given to it."""

    def __init__(self, run: str, resource: Resource) -> None:
        self._run = run
        self._values: dict[str, list[Point]] = {}
        self._exporter: Any = OTLPMetricExporter()
        preferred = self._exporter._preferred_temporality, self._exporter._preferred_aggregation
        self._reader = InMemoryMetricReader(*preferred)
        meter = MeterProvider([self._reader], resource, shutdown_on_exit=False).get_meter("ftmon", __version__)
        for figure in _all_figures():
            make = meter.create_observable_gauge if figure.kind == "gauge" else meter.create_observable_counter
            name = f"ftmon.{figure.name.removesuffix('_total')}"
            make(name, [self._observer(figure.name)], _UNITS.get(figure.unit, "1"), figure.help)
            if figure.megatron:
                make(figure.megatron, [self._observer(figure.name, figure.megatron_scale)], "", figure.help)

    def send(self, points: Iterable[Point]) -> bool:
        """Send the values; return whether they were accepted."""
        self._values = defaultdict(list)
        for point in points:
            if math.isfinite(point.value):
                self._values[point.figure.name].append(point)
        data = self._reader.get_metrics_data()
        return data is None or self._exporter.export(data) is MetricExportResult.SUCCESS

    def _observer(self, name: str, scale: float = 1.0) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for point in self._values.get(name, ()):
                yield Observation(point.value * scale, {"run": self._run, **point.labels})

        return observe


class _Failures(logging.Handler):
    """Keeps why the last request failed, from what the SDK logs: a status, or an exception. Nothing is printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._reason = ""
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        for value in record.args if isinstance(record.args, tuple) else ():
            if isinstance(value, Exception):
                self._reason = type(value).__name__
            elif isinstance(value, int):
                self._reason = f"HTTP status {value}"

    def error(self, signal: str) -> TargetError:
        """Return the error of a request for a signal, ``TRACES`` or ``METRICS``."""
        reason, self._reason = self._reason, ""
        general = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
        address = urlsplit(os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", general))
        # Without user, password, path and query, where keys may be.
        place = f"{address.scheme}://{address.hostname}" + (f":{address.port}" if address.port else "")
        return TargetError(f"{place} does not accept {signal.lower()}: {reason or 'no answer'}")


def _all_figures() -> Iterable[Figure]:
    for figure in [figure for group in FIGURES.values() for figure in group]:
        yield figure
        if figure.may_be_nan:
            yield finite_flag(figure)
    yield from (ALERTS, DROPPED)


def _resource(run: RunFile) -> Resource:
    """Return the resource; attributes that the environment gives are left to it."""
    own = {
        "service.name": "ftmon",
        "service.version": __version__,
        "service.instance.id": run.id,
        "host.name": run.host,
    }
    given = OTELResourceDetector().detect().attributes
    named = {"ftmon.run": run.id, "ftmon.run_name": run.name}
    return Resource.create({key: value for key, value in (own | named).items() if key not in given})


def _step_attributes(step: Step) -> dict[str, str | int | float]:
    found: dict[str, str | int | float | None] = {
        "ftmon.rank": step.rank,
        "ftmon.step": step.step,
        "ftmon.loss": step.loss if step.loss is None or math.isfinite(step.loss) else str(step.loss),
        "ftmon.micro_steps": step.micro_steps,
        "ftmon.tokens": step.tokens or None,
        "ftmon.skipped": step.overflow or None,
        "ftmon.device_duration_seconds": None if step.device_us is None else step.device_us / 1e6,
    }
    return {key: value for key, value in found.items() if value is not None}


def _phase_attributes(phase: PhaseRecord) -> dict[str, int | float]:
    found = {
        "ftmon.occurrences": phase.count,
        "ftmon.memory_peak_bytes": phase.peak_span.peak,
        "ftmon.collective_duration_seconds": phase.collective_us / 1e6 if phase.collectives else None,
        "ftmon.device_duration_seconds": None if phase.device_us is None else phase.device_us / 1e6,
    }
    return {key: value for key, value in found.items() if value is not None}


def _wanted(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() != "none"


def _number(variable: str, default: float) -> float:
    try:
        found = float(os.environ.get(variable, ""))
    except ValueError:
        return default
    return found if found > 0 else default
