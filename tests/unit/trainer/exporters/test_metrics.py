"""What is exported of a run's messages, and that it follows the stream across gaps, with real sockets."""

import time
from collections.abc import Iterator

import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Alert, RankState, RunState
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import DeviceInfo, Evaluation, Hello, Step
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.exporters.current import RunFigures
from ftmon.trainer.exporters.metrics import RunCollector
from ftmon.trainer.exporters.stream import RunStream
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from small_hub import SmallHub

Samples = dict[tuple[str, str], float]


def step(number: int, rank: int = 0, **fields: object) -> Step:
    return Step(rank, number, 1.0, 1000, [], **fields)  # type: ignore[arg-type]


def hello(rank: int = 0, **fields: object) -> Hello:
    device = DeviceInfo("cpu", 0, "a CPU", 2**30)
    return Hello(rank, rank, 2, "here", 1, 1, device, "glibc", 1.0, **fields)  # type: ignore[arg-type]


def job(number: int) -> Job:
    return Job(number, 1.0, "running", 1.0)


def samples(figures: RunFigures) -> Samples:
    """Return the samples as a scraper parses them, by name and by the labels but ``run``."""
    registry = CollectorRegistry()
    registry.register(RunCollector("the-run", figures))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found: Samples = {}
    for sample in (sample for family in families for sample in family.samples):
        assert sample.labels.pop("run") == "the-run"
        key = sample.name.removeprefix("ftmon_"), ",".join(sample.labels.values())
        assert key not in found
        found[key] = sample.value
    return found


def after(*messages: Message, state: tuple[tuple[int, Message], ...] = ()) -> Samples:
    """Return the samples after the ``messages`` of the stream, numbered from 101, and an asked ``state`` then."""
    figures = RunFigures()
    for seq, message in enumerate(messages, 101):
        figures.apply(Frame(seq, 1.0, message), True)
    for seq, message in state:
        figures.apply(Frame(seq, 1.0, message), False)
    return samples(figures)


def test_a_state_that_comes_late_replaces_nothing_newer_and_after_the_end_only_what_stays_true_is_left():
    found = after(
        step(9),
        state=((50, hello(framework="ddp")), (60, step(8)), (61, step(8, rank=1)), (62, step(5, 1, overflow=True))),
    )
    assert (found["step", "0"], found["step", "1"]) == (9, 5)
    assert found["rank_info", "0,ddp,here,,a CPU,0"] == 1
    assert ("skipped_steps_total", "1") not in found, "a step of the state may have been counted before"
    figures = RunFigures()
    for seq, message in enumerate(
        (step(1), RankState(0, "finished", 1.0), Evaluation(0, 1, 1.0, loss=2.0), RunState("failed", 1.0, "", 3)), 1
    ):
        figures.apply(Frame(seq, 1.0, message), True)
    figures.end()
    found = samples(figures)
    assert (found["run_state", "failed"], found["run_exit_status", ""]) == (1, 3)
    assert found["eval_loss", "evaluation"] == 2
    assert not {"step", "rank_state"} & {name for name, _ in found}


def test_figures_of_a_rank_end_with_its_process_and_those_of_a_job_with_the_next_one():
    found = after(hello(0), step(3, 0), step(3, 1), RankState(0, "gone", 1.0), state=((20, hello(0)), (30, step(2, 0))))
    assert {label for name, label in found if name == "step"} == {"1"}
    assert found["rank_state", "0,gone"] == 1
    assert not any(name == "rank_info" for name, _ in found)
    found = after(
        job(1), step(80, 0), step(80, 1), job(2), step(1, 0), job(2), state=((90, job(1)), (102, step(79, 1)))
    )
    assert {(label, value) for (name, label), value in found.items() if name == "step"} == {("0", 1.0)}


def test_skipped_steps_are_counted_alerts_return_to_0_and_text_of_a_script_is_escaped():
    evidence = {"finding": "nan_loss"}
    raised = Alert(1, "health", "error", 1.0, "loss is NaN", 1, evidence=evidence)
    resolved = Alert(1, "health", "error", 1.0, "loss is NaN", 1, evidence=evidence, resolved=2.0)
    other = Alert(2, "health", "error", 1.0, "loss is NaN", 1, evidence=evidence)
    two = after(step(1, overflow=True), step(2), step(3, overflow=True), raised, other)
    assert (two["skipped_steps_total", "0"], two["alerts", "nan_loss,health,1,error"]) == (2, 2)
    assert after(raised, resolved)["alerts", "nan_loss,health,1,error"] == 0
    name = 'x"\\\n{}= é'
    found = after(Evaluation(0, 1, 1.0, name=name, loss=float("nan"), metrics={"f1/\n": 0.5}))
    assert found["eval_loss_finite", name] == 0
    assert found["eval_loss", name] != found["eval_loss", name]
    assert ("eval_result", f"{name},f1/\n") in found


@pytest.fixture
def stream(run: RunDir) -> Iterator[RunStream]:
    stream = RunStream(run)
    yield stream
    stream.close()


def test_a_gap_in_the_stream_is_counted_and_filled_from_the_recording(run: RunDir, stream: RunStream) -> None:
    figures = RunFigures()

    def read() -> None:
        for frame, live in stream.read(0.05):
            figures.apply(frame, live)

    def has(name: str, label: str, value: float) -> bool:
        read()
        return samples(figures).get((name, label)) == value

    with SmallHub(run) as hub:
        hub.put(step(1, 1), published=False)  # before the exporter subscribed
        eventually(lambda: hub.put(step(2, 0)) and has("step", "1", 1), "the state of the run, asked at first")
        assert stream.dropped == 0
        eventually(lambda: has("step", "0", 2), "the stream")
        for number in range(2, 7):
            hub.put(step(number, 1), published=False)
        hub.put(step(3, 0))
        eventually(lambda: has("step", "1", 6), "the figures that were missing")
        assert stream.dropped == 5
        assert not stream.over
        hub.put(RunState("finished", time.time()))
        eventually(lambda: read() or stream.over, "the end")
