"""What exporters send of real runs, and that they neither disturb nor outlive them."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import start_ranks
from eventually import eventually
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.exporters.current import RunFigures
from ftmon.trainer.exporters.metrics import RunCollector
from ftmon.tui.cli.main import main
from hub_client import App, exit_of, fake_ranks, hub_gone, hub_of, members, started
from messages import EXAMPLES
from otlp_receiver import Receiver, attributes, receiving
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig
from places import DOCS
from ports import free_port
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from streams import Stream, write

pytestmark = pytest.mark.usefixtures("private_home")
SCRIPT = Path(__file__).parent / "scripts" / "health_loop.py"


class Scrape:
    def __init__(self, families: Iterator[Metric]) -> None:
        self.samples = [sample for family in families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the sample with these labels and others; None if there is none."""
        found = [
            each.value
            for each in self.samples
            if each.name == f"ftmon_{name}" and labels.items() <= each.labels.items()
        ]
        assert len(found) < 2
        return found[0] if found else None


def scrape(port: int, accept: str = "*/*") -> Scrape | None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    return Scrape((open_metrics if accept != "*/*" else text_string_to_metric_families)(text))


def exporters(run: RunDir, target: str = "metrics") -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if words[-2:] == [str(run.path), target] and process.info["status"] != "zombie":
            found.append(process)
    return found


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver of OTLP that the ``OTEL_*`` variables of a run name."""
    with receiving() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{found.port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20a-token")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=blue")
        yield found


def test_a_real_run_is_exported_with_the_figures_of_its_recording_and_a_nan_is_flagged(monkeypatch, receiver, tmp_path):
    monkeypatch.setenv("FAULT", "nan")
    monkeypatch.setenv("AT", "5")
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("STEPS", "1000000")
    port = free_port()
    seen: list[Scrape] = []

    def nan_is_flagged() -> bool:
        found = scrape(port)
        seen.extend([found] if found else [])
        return (
            found is not None
            and found.value("loss_finite", rank="1") == 0
            and bool(found.value("alerts", finding="nan_loss"))
            and (0.0, {"run": run.id, "rank": "1"}) in receiver.values("ftmon.loss_finite")
            and any(labels["finding"] == "nan_loss" for _, labels in receiver.values("ftmon.alerts"))
        )

    with started(start_ranks.command(2, str(SCRIPT)), metrics=str(port), report_to=["otel"]) as run:
        eventually(lambda: {each["rank"] for _, each in receiver.values("ftmon.loss")} == {"0", "1"}, "both losses")
        (tmp_path / "gate").touch()
        eventually(nan_is_flagged, "a flagged NaN", every=0.1)
        for pid in [process.pid for process in members(run)]:
            with contextlib.suppress(ProcessLookupError):  # a rank ends with its launcher
                os.kill(pid, signal.SIGKILL)
        exit_of(run)
        hub_gone(run)
        assert exporters(run) == exporters(run, "ftmon.trainer.exporters") == []
        assert (run.logs / "otel-exporter.log").read_text() == ""
        with Reader(run.recording) as reader:
            frames, steps = reader.frames(0, 5_000), {}
            while frames:
                steps.update(
                    {
                        (each.message.rank, each.message.step): each.message
                        for each in frames
                        if isinstance(each.message, Step)
                    }
                )
                frames = reader.frames(frames[-1].seq, 5_000)
    last = seen[-1]
    assert math.isnan(last.value("loss", rank="1") or 0.0)
    assert last.value("loss_finite", rank="0") is not None
    for rank in (0, 1):
        label = str(rank)
        step = steps[rank, int(last.value("step", rank=label) or 0)]
        assert step.loss is not None
        if rank == 0:
            assert last.value("loss", rank=label) == pytest.approx(step.loss, nan_ok=True)
        assert last.value("step_duration_seconds", rank=label) == step.host_us / 1e6
        assert last.value("memory_allocated_peak_bytes", rank=label) == max(each.allocated.peak for each in step.phases)
        for phase in step.phases:
            assert last.value("phase_duration_seconds", rank=label, phase=phase.name) == phase.host_us / 1e6
    assert last.value("exporter_dropped_messages_total") == 0
    assert last.value("memory_capacity_bytes", rank="0")
    check_otel(receiver, steps, run.id)


def check_otel(receiver: Receiver, steps: dict[tuple[int, int], Step], run: str) -> None:
    """Check what a receiver of OTLP got against the recorded steps."""
    assert {headers["authorization"] for headers in receiver.headers} == {"Bearer a-token"}
    resource = attributes(receiver.requests[-1].resource_metrics[0].resource.attributes)
    assert {"service.name": "mine", "team": "blue", "service.instance.id": run}.items() <= resource.items()
    spans = {span.span_id: span for span in receiver.spans()}
    ranks_and_steps: list[tuple[int, int]] = []
    phases: dict[tuple[int, int], list[str]] = {}
    before = [span for span in spans.values() if span.name == "init"]
    assert all(not span.parent_span_id for span in before)
    for span in (span for span in spans.values() if span not in before):
        mine = span if not span.parent_span_id else spans[span.parent_span_id]
        labels = attributes(mine.attributes)
        key = labels["ftmon.rank"], labels["ftmon.step"]
        step = steps[key]
        assert mine.trace_id == span.trace_id
        assert mine.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= mine.end_time_unix_nano
        if span is not mine:
            phases.setdefault(key, []).append(span.name)
            continue
        ranks_and_steps.append(key)
        assert span.start_time_unix_nano == round(step.started * 1e9)
        assert span.end_time_unix_nano - span.start_time_unix_nano == step.host_us * 1_000
        assert step.loss is not None
        assert (span.status.code == span.status.STATUS_CODE_ERROR) == math.isnan(step.loss or 0.0)
    for rank in (0, 1):
        mine = [step for one, step in ranks_and_steps if one == rank]
        assert mine == [*range(mine[0], max(step for one, step in steps if one == rank) + 1)], "each step once"
    wanted = {key: [phase.name for phase in steps[key].phases if phase.name != "init"] for key in ranks_and_steps}
    assert phases == wanted
    losses = receiver.values("ftmon.loss")
    assert {labels["rank"] for _, labels in losses} == {"0", "1"}
    assert all(math.isfinite(value) for value, _ in losses)
    assert [value for value, _ in losses] == [value for value, _ in receiver.values("megatron.training.loss")]
    shown = [labels for _, labels in losses if labels["rank"] == "1"]
    flags = [value for value, labels in receiver.values("ftmon.loss_finite") if labels["rank"] == "1"]
    assert flags[-1] == 0.0
    assert len(shown) == sum(flags), "no old loss is shown beside a flag of 0"


def test_an_exporter_that_stands_still_or_dies_disturbs_nothing_and_survives_its_hub():
    port = free_port()
    with started(fake_ranks({"rate": 50}, {"rate": 50}), metrics=f"localhost:{port}") as run, App(run) as app:
        first = eventually(lambda: scrape(port, "application/openmetrics-text"), "a scrape")
        assert first.value("exporter_dropped_messages_total") == 0
        eventually(lambda: (scrape(port) or first).value("step", rank="1"), "a step")
        (exporter,) = eventually(lambda: exporters(run), "the exporter")
        assert exporter.nice() == min(19, os.nice(0) + 10)
        exporter.suspend()
        reached = app.told(Step).step + 100
        app.wait_for(Step, lambda step: step.step > reached)
        exporter.kill()
        eventually(lambda: [each for each in exporters(run) if each.pid != exporter.pid], "another exporter")
        at = eventually(lambda: (found := scrape(port)) and found.value("step", rank="0"), "its figures")
        hub = hub_of(run)
        os.kill(hub.process.pid, signal.SIGKILL)
        eventually(lambda: hub_of(run).process != hub.process, "another hub")
        eventually(
            lambda: (((found := scrape(port)) and found.value("step", rank="0")) or 0) > at + 50, "steps of the new hub"
        )
        launcher = run.read_run().launcher
        for pid in (launcher.pid, hub_of(run).process.pid, *(process.pid for process in members(run))):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not exporters(run), "the end of an exporter whose launcher and hub are gone")


def test_a_textfile_follows_the_run_outlives_its_folder_and_keeps_the_end(tmp_path):
    folder, go = tmp_path / "folder", tmp_path / "go"
    folder.mkdir()
    file = folder / "run.prom"
    job = fake_ranks({"rate": 100, "steps": 30, "awaits": str(go)})

    def read() -> Scrape:
        return Scrape(text_string_to_metric_families(file.read_text())) if file.exists() else Scrape(iter(()))

    with started(job, metrics=str(file)) as run:
        eventually(lambda: (read().value("step", rank="0") or 0) >= 29, "the steps", every=0.2)
        assert len(exporters(run)) == 1
        folder.rename(tmp_path / "away")
        with App(run) as app:
            alert = app.told(Alert, lambda alert: alert.title.startswith("not exported to metrics"))
            assert f"{file} cannot be written" in alert.title
            (tmp_path / "away").rename(folder)
            app.told(Alert, lambda later: later.id == alert.id and later.resolved is not None)
        go.touch()
        hub_gone(run)
        assert exporters(run) == []
    assert read().value("run_state", state="finished") == 1
    assert read().value("run_exit_status") == 0
    assert read().value("step") is None
    assert [path.name for path in folder.iterdir()] == ["run.prom"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_every_metric_and_a_nan_fires_both_rules(tmp_path):
    figures, registry = RunFigures(), CollectorRegistry()
    for seq, message in enumerate(EXAMPLES, 1):
        figures.apply(Frame(seq, 1.0, message), True)
    registry.register(RunCollector("the-run", figures))
    text = generate_latest(registry)
    assert text.count(b"# TYPE") > 40
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    labels = {"run": "r", "rank": "1"}
    series = {"ftmon_loss": "1 1 NaN NaN", "ftmon_loss_finite": "1 1 0 0", "ftmon_grad_norm": "2 3 4 5"}
    inputs = [{"series": f'{name}{{run="r", rank="1"}}', "values": values} for name, values in series.items()]
    rules = [
        {"eval_time": at, "alertname": name, "exp_alerts": alerts}
        for name, words in (("LossIsNaN", "NaN"), ("LossNotFinite", "not finite"))
        for at, alerts in (("1m", []), ("2m", [_alert(labels, f"r: the loss or gradient norm of rank 1 is {words}")]))
    ]
    test = tmp_path / "test.yml"
    test.write_text(
        json.dumps(
            {
                "rule_files": [str(DOCS / "alerts.yml")],
                "tests": [{"interval": "1m", "input_series": inputs, "alert_rule_test": rules}],
            }
        )
    )
    checked = subprocess.run(["promtool", "test", "rules", str(test)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(shutil.which("trace_processor_shell") is None, reason="trace_processor_shell is not installed")
def test_trace_processor_finds_slices_flows_and_counters_without_a_fault(tmp_path):
    stream = Stream(ranks=2, steps=20)
    recording, trace = write(tmp_path / "r.sqlite", stream.frames()), tmp_path / "run.pftrace"
    assert main(["export", str(recording), "perfetto", "-o", str(trace)]) == 0
    steps = [frame.message for frame in stream.frames() if isinstance(frame.message, Step)]
    phases = [phase for step in steps for phase in step.phases]
    config = TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    with TraceProcessor(trace=str(trace), config=config) as processor:

        def number(query: str) -> int:
            row: Any = next(iter(processor.query(f"SELECT count(*) AS number FROM {query}")))
            return row.number

        on_device = sum(phase.device_us is not None for phase in phases)
        assert number("slice WHERE dur > 0") == len(steps) + len(phases) + on_device
        assert number("slice WHERE depth > 0") == 0
        assert number("flow") == sum(phase.collectives > 0 for phase in phases) // 2
        assert number("counter JOIN counter_track ON track_id = counter_track.id WHERE name = 'tokens/s'") == len(steps)
        assert number("stats WHERE severity IN ('error', 'data_loss') AND value > 0") == 0


def _alert(labels: dict[str, str], summary: str) -> dict[str, object]:
    return {"exp_labels": labels, "exp_annotations": {"summary": summary}}
