"""Targets of ``--report-to`` that are dead or silent: they delay nothing, are reported once, and no key is shown."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from ftmon.protocol.messages.control import Alert, ExporterState
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Message
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from hub_client import App, exit_of, fake_ranks, hub_gone, started
from ports import free_port

pytestmark = pytest.mark.usefixtures("private_home")
SECRET = "s3cr3t-0f-the-user"


@contextmanager
def dead() -> Iterator[int]:
    """A port on which nothing listens."""
    yield free_port()


@contextmanager
def silent() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def command_lines() -> str:
    return "\n".join(" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))


def recorded(run: RunDir) -> list[Message]:
    with Reader(run.recording) as reader:
        return [frame.message for frame in reader.frames(0, 100_000)]


@pytest.mark.parametrize(("endpoint", "reason"), [(dead, "ConnectionError"), (silent, "ReadTimeout")])
def test_an_endpoint_that_takes_nothing_is_reported_once_and_delays_nothing(endpoint, reason, monkeypatch, tmp_path):
    go = tmp_path / "go"
    job = fake_ranks({"rate": 50, "steps": 100, "awaits": str(go)})
    with endpoint() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:{SECRET}@127.0.0.1:{port}/{SECRET}?key={SECRET}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET}")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        with started(job, report_to=["otel"]) as run:
            with App(run) as app:
                app.told(Alert, lambda alert: alert.title.startswith("not exported to otel"))
                app.told(Step, lambda step: step.step == 99)
                assert SECRET not in command_lines()
            go.touch()
            assert exit_of(run).exit_code == 0
            hub_gone(run)
        messages = recorded(run)
    assert len([message for message in messages if isinstance(message, Step)]) == 100
    alerts = [message for message in messages if isinstance(message, Alert) and "not exported" in message.title]
    assert len({alert.id for alert in alerts}) == 1, "one alert, whatever is said of it later"
    known = ["no answer yet"]
    known += [f"http://127.0.0.1:{port} does not accept {signal}: {reason}" for signal in ("traces", "metrics")]
    errors = {message.error for message in messages if isinstance(message, ExporterState)} - {""}
    assert errors
    assert errors <= set(known)
    (line,) = (run.logs / "otel-exporter.log").read_text().splitlines()
    assert "points were dropped" in line
    assert SECRET.encode() not in repr(messages).encode() + b"".join(
        path.read_bytes() for path in run.path.rglob("*") if path.is_file()
    )
