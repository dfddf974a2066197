"""Traces of captured steps through a real hub: what its worker finds is recorded, and the worker ends with it."""

import gzip
import os
import pickle
import queue
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.host.process import ProcessId, is_alive
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import HubStats
from ftmon.protocol.messages.memory import Composition, StepMark, StepTrace
from ftmon.protocol.messages.telemetry import AllocatorEvents
from ftmon.protocol.recording.reader import Reader
from ftmon.trainer.host import processes
from ftmon.trainer.hub.analyses import TraceAnalysis
from hub_client import App, exit_of, fake_ranks, hub_gone, hub_of, started
from snapshot_files import compact

pytestmark = pytest.mark.usefixtures("private_home")

STEP = Path(__file__).parents[1] / "data" / "step_zero3.pickle.gz"


@pytest.fixture
def traces(tmp_path):
    """Write a trace of a real step, and one whose columns do not belong together."""
    snapshot = compact(pickle.loads(gzip.decompress(STEP.read_bytes())), "")
    times = memoryview(snapshot.traces[0].times).cast("q")
    marks = [StepMark("forward", times[0] - 1, 0, 2**40, 0, False), StepMark("idle", times[-1] + 1, 0, 2**40, 0, False)]
    good = StepTrace(0, 1, 1.0, 0, marks, 0, snapshot, 10**6)
    files = tmp_path / "good", tmp_path / "bad"
    for file, message in zip(files, (good, StepTrace(0, 2, 1.0, 0, [], 0, snapshot, 10**6)), strict=True):
        file.write_bytes(wire.encode_body(message))
    return [str(file) for file in files]


def messages(run, kind):
    return [frame.message for frame in Reader(run.recording).frames(0, 100_000) if isinstance(frame.message, kind)]


def worker_of(hub):
    """Find the one process that the hub has started, its worker."""
    found = processes.descendants([hub.pid], processes.table())
    [worker] = [process for process in found if process.pid != hub.pid]
    return ProcessId(worker.pid, worker.start_ticks)


def test_a_hub_records_what_its_worker_finds_counts_what_is_no_trace_and_ends_the_worker(traces, tmp_path):
    good, bad = traces
    go = tmp_path / "go"
    # The job goes on until the traces are analysed: at its end the hub waits for them for 10 s only.
    waiting = ["sh", "-c", '"$@"; until [ -e "$0" ]; do sleep 0.1; done', str(go)]
    with started([*waiting, *fake_ranks({"steps": 8, "traces": [good, bad, good]})]) as run:
        with App(run) as app:
            eventually(
                lambda: sum(isinstance(frame.message, Composition) for frame in app.history()) == 2,
                "what the worker finds in both",
                every=0.2,
            )
        go.touch()
        assert exit_of(run).state == "finished"
        hub_gone(run)
        first, second = messages(run, AllocatorEvents)
        assert (first, first.entries, first.rank, first.step) == (second, 11_586, 0, 1)
        assert [found.phases[0].name for found in messages(run, Composition)] == ["forward", "forward"]
        assert not messages(run, StepTrace)
        stats = messages(run, HubStats)[-1]
        assert (stats.dropped_traces, stats.lost) == (1, {})
        assert "begins at mark 0 of 0" in (run.logs / "hub.log").read_text()


def test_a_worker_ends_with_its_hub(traces):
    good, _ = traces
    with started(fake_ranks({"traces": [good]})) as run, App(run) as app:
        app.told(Composition)
        hub = hub_of(run).process
        worker = worker_of(hub)
        os.kill(hub.pid, signal.SIGKILL)
        eventually(lambda: not is_alive(worker), "the worker's end")


def test_a_worker_that_is_killed_costs_its_trace_and_no_more(traces):
    good, _ = traces
    emitted: list[AllocatorEvents | Composition] = []
    posted: queue.Queue[Callable[[], object]] = queue.Queue()
    analysis = TraceAnalysis(emitted.append, posted.put)

    def analyse(body: bytes) -> None:
        analysis.submit("rank-0-1-1", body)
        posted.get(timeout=200)()

    try:
        analyse(Path(good).read_bytes())
        [worker] = [
            process
            for process in processes.descendants([os.getpid()], processes.table())
            if processes.runs_module(process.pid, "ftmon.trainer.hub.trace_worker")
        ]
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: not ((now := processes.same(worker)) and now.alive), "its end")
        known = len(emitted)
        analyse(b"a small trace, which stays in the pipe's buffer")
        assert (len(emitted), analysis.dropped) == (known, 1)
        analyse(Path(good).read_bytes())
        assert len(emitted) == 2 * known > 0
    finally:
        analysis.close()
