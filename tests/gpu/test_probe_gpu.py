"""The probe on a GPU: its figures against figures taken by hand in the same script without it."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.protocol.messages.control import Result
from ftmon.protocol.messages.memory import Cause
from ftmon.protocol.messages.telemetry import AllocatorEvents, Heartbeat, Hello, Oom, SnapshotTaken, Step
from ftmon.protocol.snapshot.reader import open_snapshot
from ftmon.tui.model.snapshot import bands_of
from probe_collector import SCRIPTS

pytestmark = pytest.mark.gpu
if not os.path.exists("/dev/nvidia0"):
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

SCRIPT, ENGINE = SCRIPTS / "gpu_loop.py", SCRIPTS / "gpu_engine.py"
SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}


def torch_load(path):
    return pickle.loads(Path(path).read_bytes())


def result_of(text):
    return json.loads(next(line for line in text.splitlines() if line.startswith("RESULT"))[7:])


def by_hand(*words, script=SCRIPT):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(SINGLE if script == ENGINE else {})}
    done = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return result_of(done.stdout)


def watched(collector, *words, script=SCRIPT, until=None):
    extra = SINGLE if script == ENGINE else {}
    collector.start(sys.executable, script, *words, CUDA_VISIBLE_DEVICES="0", DS_ACCELERATOR="cuda", **extra)
    if until is not None:
        return collector.collect(until)
    collector.finish(180)
    assert collector.job.returncode == 0, collector.output()
    return result_of(collector.run.rank_log(0, "out").read_text())


def test_phase_peaks_equal_those_measured_by_hand_without_ftmon(collector):
    hand = by_hand("hand")
    watched(collector, "plain")
    steps = collector.of(Step)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    for step, peaks in zip(steps, hand["phases"], strict=True):
        assert {name: step.phase(name).allocated.peak for name in peaks} == peaks
    assert steps[0].phase("optimizer").allocated.growth > 0, "Adam's states come with the first step"
    assert steps[3].phase("optimizer").allocated.transient > 0, "foreach temporaries"


def test_loss_tokens_and_device_times_come_without_a_synchronisation(collector):
    found = watched(collector, "plain")
    hello = collector.of(Hello)[-1]
    assert (hello.device.kind, hello.memory_measure) == ("cuda", "cuda")
    assert hello.device.capacity_bytes > 2**34
    assert hello.device.uuid.startswith("GPU-")
    for number, step in enumerate(collector.of(Step)):
        assert step.loss == pytest.approx(found["losses"][number], rel=1e-6)
        assert (step.tokens, step.padded_tokens) == (500 * 4 - 6, 2048)
        assert step.device_us > 0
        assert step.phase("backward").device_us > 0
        assert step.phase("forward").allocations > 0
        assert step.phase("forward").active.peak >= step.phase("forward").requested.peak


@pytest.mark.parametrize("mode", ["many", "overwritten"])
def test_losses_of_short_steps_are_those_of_the_script(collector, mode):
    found = watched(collector, mode)
    steps = collector.of(Step)
    assert [step.step for step in steps] == list(range(1, 301))
    assert sum(phase.coarse for step in steps for phase in step.phases if phase.name == "backward") > 200
    assert [step.loss for step in steps] == pytest.approx(found["losses"], rel=1e-6, nan_ok=True)
    assert found["losses"][-1] != found["losses"][-1]


@pytest.mark.parametrize("mode", ["plain", "reset"])
def test_the_script_sees_the_peaks_it_would_have_seen(collector, mode):
    alone, under = by_hand(mode), watched(collector, mode)
    for key in ("max_allocated", "max_reserved", "peaks", "losses"):
        assert under[key] == alone[key]
    if mode == "reset":
        assert collector.of(Step)[3].phase("forward").allocated.transient >= 2**28 - 2**26


def test_a_failed_allocation_that_the_script_survives_is_reported(collector):
    watched(collector, "oom")
    (oom,) = collector.of(Oom)
    assert (oom.requested_bytes, oom.step, oom.phase) == (2**50, 4, "forward")
    assert 0 < oom.allocated_bytes <= oom.reserved_bytes < oom.device_total_bytes
    assert oom.stack[-1].endswith(" main")
    assert (len(collector.of(Step)), collector.of(Step)[-1].ooms) == (6, 1)


def test_a_peak_is_explained_where_blocks_freed_before_are_still_used_by_another_stream(collector):
    watched(collector, "shared", until=lambda c: len(c.of(Step)) > 12)
    hello = collector.of(Hello)[-1]
    arm = {"phase": "optimizer", "steps": 1, "from_step": 0, "reason": "asked"}
    collector.command(f"rank-0-{hello.pid}-{hello.start_ticks}", "arm", **arm)
    collector.collect(lambda c: c.of(Cause), 30)
    (cause,) = collector.of(Cause)
    assert cause.transient_bytes > 100 << 20, "foreach temporaries"
    assert cause.attributed_bytes > 0.9 * cause.transient_bytes
    assert cause.note == ""


def test_allocator_events_are_numbers_of_a_whole_step_and_a_snapshot_is_taken_on_request(collector):
    watched(collector, "wait", until=lambda c: c.of(AllocatorEvents))
    events = collector.of(AllocatorEvents)[-1]
    step = next(step for step in collector.of(Step) if step.step == events.step)
    phases = {phase.name: phase for phase in events.phases}
    for name in ("forward", "backward", "optimizer"):
        record = step.phase(name)
        if record is not None:
            assert abs(phases[name].allocations - record.allocations) <= 3, name
            assert phases[name].largest == sorted(phases[name].largest, reverse=True)
    hello = collector.of(Hello)[-1]
    collector.collect(lambda c: c.of(Heartbeat))
    collector.command(f"rank-0-{hello.pid}-{hello.start_ticks}", "snapshot", reason="test")
    collector.collect(lambda c: c.of(SnapshotTaken), 30)
    (taken,) = collector.of(SnapshotTaken)
    assert Path(taken.path).stat().st_size == taken.bytes > 0
    assert Path(taken.path).stat().st_mode & 0o077 == 0
    found = torch_load(taken.path)
    frames = {frame["name"] for trace in found["device_traces"] for entry in trace for frame in entry.get("frames", ())}
    assert {"main", "forward"} <= frames, "the stacks of a whole step are in it"
    bands = bands_of(Replay(open_snapshot(taken.path), 0))[0]
    assert {"forward", "backward", "optimizer"} <= {band.phase for band in bands}, "its phases lie over its entries"
    collector.collect(lambda c: any(isinstance(answer, Result) and answer.ok for answer in c.answers), 10)


def test_phase_peaks_under_deepspeed_equal_those_measured_by_hand_without_ftmon(collector):
    hand = by_hand("hand", "6", script=ENGINE)
    found = watched(collector, "plain", "6", script=ENGINE)
    assert found["losses"] == hand["losses"]
    steps = collector.of(Step)
    assert len(steps) == 6
    for step, peaks in zip(steps, hand["phases"], strict=True):
        assert {name: step.phase(name).allocated.peak for name in peaks} == peaks
    assert steps[-1].grad_norm > 0
    assert [step.loss for step in steps] == pytest.approx(found["losses"], rel=1e-3)


@pytest.mark.parametrize("script", [ENGINE, SCRIPT])
def test_what_the_training_thread_pays_is_told_with_every_step(collector, script):
    words = ("plain", "20") if script == ENGINE else ("plain",)
    watched(collector, *words, script=script)
    steps = collector.of(Step)
    assert all(0 < step.probe_us < step.host_us for step in steps), "bench/gpu/probe_cost.py says how much it is"
