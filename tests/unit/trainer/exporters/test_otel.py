"""What the target ``otel`` sends to a receiver of OTLP, as the ``OTEL_*`` variables say, and how it names a failure."""

import math
from collections.abc import Iterator
from itertools import count

import pytest
from ftmon.protocol.errors import TargetError, UsageError
from ftmon.protocol.messages.control import Alert, RankState
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.run.rundir import RunFile
from ftmon.trainer.exporters.report import Feed, Sent
from otlp_receiver import Receiver, attributes, receiving

otel = pytest.importorskip("ftmon.trainer.exporters.otel")
RUN = RunFile("the-run", "the run", 1.0, ["python"], "/", "here", "run")
SPAN = Span(1000, 2000, 3000)
_numbers = count(1)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{found.port}")
        yield found


def step(number: int, rank: int = 0, loss: float | None = 1.0) -> Step:
    names = ("data", "forward", "backward", "optimizer")
    phases = [PhaseRecord(name, 1000 * at, 1000, SPAN, SPAN) for at, name in enumerate(names)]
    return Step(rank, number, 100.0 + number, 4000, phases, loss=loss, overflow=number == 2)


def sent(*messages: Message) -> list[Sent]:
    return [Sent(Frame(next(_numbers), 1.0, message), True) for message in messages]


def send(*batches: list[Sent]) -> None:
    target = otel.OpenTelemetry()
    target.open(RUN)
    for batch in batches:
        target._next_metrics = 0.0
        target.points(batch)
    target.close()


def test_all_spans_of_a_flood_arrive_in_requests_of_512(receiver):
    feed = Feed(otel.OpenTelemetry(), RUN)
    feed.start()
    for number in range(1, 2001):
        feed.put(Frame(number, 1.0, step(number)), True)
    assert feed.end(200.0)
    spans = receiver.spans()
    assert len({span.span_id for span in spans}) == len(spans) == 2000 * 5
    assert [attributes(span.attributes)["ftmon.step"] for span in spans if span.name == "step"] == [*range(1, 2001)]
    sizes = [sum(len(scope.spans) for group in each.resource_spans for scope in group.scope_spans)
             for each in receiver.requests if hasattr(each, "resource_spans")]  # fmt: skip
    assert max(sizes) <= 512
    assert (feed.error, feed.dropped) == ("", 0)


def test_series_of_a_rank_that_is_gone_and_losses_that_are_not_finite_end(receiver):
    alert = Alert(1, "health", "error", 1.0, "loss is NaN", 1, evidence={"finding": "nan_loss"})
    target = otel.OpenTelemetry()
    target.open(RUN)
    target.points(sent(step(1, 0, 2.0), step(1, 1, 3.0)))
    target.alert(alert)
    for loss, state in ((math.nan, "training"), (math.inf, "gone")):
        target._next_metrics = 0.0
        target.points(sent(step(2, 0, loss), RankState(1, state, 1.0)))
    target.close()
    expected = [(2.0, "0"), (3.0, "1"), (3.0, "1")]
    assert [(value, labels["rank"]) for value, labels in receiver.values("ftmon.loss")] == expected
    flags = [(value, labels["rank"]) for value, labels in receiver.values("ftmon.loss_finite")]
    assert flags == [(1.0, "0"), (1.0, "1"), (0.0, "0"), (1.0, "1"), (0.0, "0")]
    assert receiver.values("megatron.training.step_duration_ms")[0][0] == pytest.approx(4.0)
    skipped = {labels["rank"]: value for value, labels in receiver.values("ftmon.skipped_steps")}
    assert skipped == {"0": 2, "1": 0}
    assert receiver.values("ftmon.alerts")[-1][1]["finding"] == "nan_loss"
    failed = [span for span in receiver.spans() if span.status.code == span.status.STATUS_CODE_ERROR]
    assert [attributes(span.attributes)["ftmon.loss"] for span in failed] == ["nan", "inf"]


@pytest.mark.parametrize(
    ("variable", "value", "spans", "metrics"),
    [
        ("OTEL_TRACES_EXPORTER", "none", False, True),
        ("OTEL_METRICS_EXPORTER", "none", True, False),
        ("OTEL_TRACES_SAMPLER", "always_off", False, True),
        ("OTEL_SDK_DISABLED", "true", False, False),
    ],
)
def test_variables_that_turn_a_signal_off_are_honoured(variable, value, spans, metrics, receiver, monkeypatch):
    monkeypatch.setenv(variable, value)
    send(sent(step(1)))
    assert (bool(receiver.spans()), bool(receiver.values("ftmon.loss"))) == (spans, metrics)


def test_counters_are_deltas_where_that_is_preferred(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    send(sent(step(2)), sent(step(2)), sent(step(3)))
    assert [value for value, _ in receiver.values("ftmon.skipped_steps")][:3] == [1, 1, 0]


def test_a_refusal_names_the_status_and_no_key_and_another_protocol_is_refused(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://me:key@127.0.0.1:{receiver.port}/none?key=key")
    with pytest.raises(TargetError, match=r"^http://127.0.0.1:[0-9]+ does not accept traces: HTTP status 404$"):
        send(sent(step(1)))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc: ftmon sends http/protobuf"):
        otel.OpenTelemetry().open(RUN)


def test_a_signal_that_is_refused_stays_an_error_until_it_is_accepted_and_the_other_is_sent(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{receiver.port}/later")
    target = otel.OpenTelemetry()
    target.open(RUN)
    for _ in range(2):
        with pytest.raises(TargetError, match="does not accept metrics: HTTP status 404"):
            target.points(sent(step(1)))
    assert len(receiver.spans()) == 10
    receiver.paths["/later"] = receiver.paths["/v1/metrics"]
    target._next_metrics = 0.0
    target.points([])
    assert receiver.values("ftmon.loss") == [(1.0, {"run": "the-run", "rank": "0"})]
