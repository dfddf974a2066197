"""The probe in real ranks, started by real launchers, heard by a real socket."""

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import start_ranks
import zmq
from eventually import eventually
from ftmon.protocol.host.process import ProcessId, is_alive
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import telemetry, wire
from ftmon.protocol.messages.control import Accepted, Command, Result
from ftmon.protocol.messages.wire import LossCounter
from ftmon.protocol.recording.reader import Reader, RecordedRun
from ftmon.protocol.run import rundir
from ftmon.trainer.launch.environment import executable_command
from ftmon.tui.source.imported import import_log
from ports import free_port
from probe_collector import BIN, SCRIPTS, Collector, alone


def single(collector, *words, **extra):
    return collector.start(BIN / "python", SCRIPTS / "single_loop.py", *words, **extra)


def assert_none_lost(collector):
    counter = LossCounter()
    for header in collector.headers:
        counter.see(header.src, header.seq)
    assert not counter.lost
    assert all(message.dropped == 0 for message in collector.of(telemetry.Step))


def test_a_plain_deepspeed_loop_is_watched_unchanged(collector):
    words = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    collector.start(*executable_command(words, os.environ), SCRIPTS / "deepspeed_loop.py", CLIP="0.01").finish()
    assert collector.job.returncode == 0, collector.output()
    assert_none_lost(collector)
    lines = [line.split() for line in collector.run.rank_log(0, "out").read_text().splitlines()]
    losses, norms = ([float(line[1]) for line in lines if line[0] == word] for word in ("loss", "norm"))
    assert [step.grad_norm for step in collector.of(telemetry.Step, 0)[:12]] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.01, "the gradient norm without ZeRO in fp32 is that of the clipping"
    for rank in (0, 1):
        hello = collector.of(telemetry.Hello, rank)[-1]
        expected = ("deepspeed", 2, 2, "gloo")
        assert (hello.framework, hello.zero_stage, hello.grad_accumulation, hello.backend) == expected
        wanted = ("cpu", "glibc", "Model", 4160)
        assert (hello.device.kind, hello.memory_measure, hello.model, hello.parameters) == wanted
        assert hello.deepspeed_config["zero_optimization"] == {"stage": 2}
        steps = collector.of(telemetry.Step, rank)[12:]
        assert [step.step for step in steps] == [1, 2, 3, 4]
        for step in steps:
            phases = {phase.name: phase for phase in step.phases}
            assert set(phases) >= {"data", "forward", "backward", "optimizer"}
            assert step.micro_steps == phases["backward"].count == phases["forward"].count == 2
            assert (step.batch_shape, step.samples, step.tokens, step.padded_tokens) == ([2, 8], 4, 24, 32)
            assert (step.lr, step.overflow) == (0.01, False)
            assert step.grad_norm > 0
            assert phases["backward"].collectives > 0
            assert all(p.resident.peak >= max(p.resident.start, p.resident.end) > 0 for p in step.phases)
            assert sum(p.host_us for p in step.phases if p.name != "init") <= step.host_us
        printed = [sum(losses[i : i + 2]) / 2 for i in range(24, 32, 2)]
        if rank == 0:
            assert [step.loss for step in steps] == pytest.approx(printed)
        assert [(g.reason, g.step) for g in collector.of(telemetry.Goodbye, rank)] == [("finished", 4)]
    counts = {
        rank: [sum(p.collectives for p in s.phases) for s in collector.of(telemetry.Step, rank)[1:]] for rank in (0, 1)
    }
    assert counts[0] == counts[1]
    assert "init" in {beat.phase for beat in collector.of(telemetry.Heartbeat)}


def test_a_trainer_with_a_deepspeed_config_tells_its_plan_and_its_other_phases(collector, tmp_path, monkeypatch):
    collector.fork("trainer_deepspeed.py", tmp_path / "out", **alone()).finish()
    assert collector.job.returncode == 0, collector.output()
    assert_none_lost(collector)
    hello = collector.of(telemetry.Hello)[-1]
    assert (hello.framework, hello.zero_stage, hello.model) == ("transformers", 2, "GPT2LMHeadModel")
    assert {(plan.total_steps, plan.output_dir) for plan in collector.of(telemetry.Plan)} == {
        (3, str(tmp_path / "out"))
    }
    assert {(plan.evaluate_every, plan.checkpoint_every) for plan in collector.of(telemetry.Plan)} == {(2, 2)}
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["epoch"] == 0.5
    assert {plan.epochs for plan in collector.of(telemetry.Plan)} == {0.75}, "three steps where two are half an epoch"
    assert hello.matmul_precision == "fp32"
    evaluation = collector.of(telemetry.Evaluation)[0]
    assert (evaluation.step, evaluation.name, evaluation.best) == (2, "evaluation", True)
    assert evaluation.perplexity == pytest.approx(math.exp(evaluation.loss))
    assert evaluation.seconds > 0
    checkpoint = collector.of(telemetry.Checkpoint)[0]
    assert (checkpoint.step, checkpoint.path) == (2, str(tmp_path / "out" / "checkpoint-2"))
    steps = collector.of(telemetry.Step)
    found = [(s.step, s.micro_steps, s.samples, s.tokens, s.padded_tokens) for s in steps]
    assert found == [(number, 2, 4, 36, 48) for number in (1, 2, 3)]
    assert {"eval", "checkpoint"} <= {phase.name for phase in steps[2].phases}
    # Rows of 12 with 9 tokens: 6 FLOPs a token and parameter without the positions, 192 a pair, 45 pairs a row.
    matrices = 16 * 16 + 16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 * 2 + 64 + 16 + 6 * 16
    assert steps[0].flops == 36 * 6 * matrices + 4 * 45 * 192
    # What a Trainer logs as loss is the mean over the accumulation, and so is ours.
    assert all(2 < step.loss < 3.5 for step in steps)
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    imported = RecordedRun(import_log(tmp_path / "out" / "checkpoint-2" / "trainer_state.json", None).run.recording)
    logged = [(step.step, step.loss, step.grad_norm) for step in imported.steps(0)]
    assert logged == [
        (s.step, pytest.approx(s.loss, abs=1e-3), pytest.approx(s.grad_norm, rel=1e-3)) for s in steps[:2]
    ]
    assert [(one.step, one.loss) for one in imported.evaluations] == [(2, pytest.approx(evaluation.loss, abs=1e-3))]


def test_peaks_workers_a_launcher_inside_a_rank_skipped_updates_and_a_failed_allocation(collector):
    """A temporary is in its phase's peak, the script's own view is true, and a rank's children are no ranks."""
    trainings = ("peak,workers,nested", "scaler", "own_scaler", "oom")
    collector.fork("single_loop.py", *trainings, TORCHRUN=str(BIN / "torchrun")).finish()
    assert collector.job.returncode == 1, collector.output()
    steps = collector.of(telemetry.Step)
    assert [step.step for step in steps] == list(range(1, 19))
    assert steps[1].phase("forward").resident.transient > 48 * 2**20
    assert all(steps[n].phase("forward").resident.transient < 8 * 2**20 for n in (2, 3, 4))
    assert {hello.pid for hello in collector.of(telemetry.Hello)} == {collector.job.pid}
    assert "nested ended with 2" in collector.run.rank_log(0, "out").read_text()
    assert "ftmon: refused: 'torchrun'" in collector.run.rank_log(0, "err").read_text()
    # An update that the loss scaler skips is a step with overflow; the losses of the others are unscaled.
    assert [step.step for step in steps if step.overflow] == [8, 13]
    assert all(step.loss < 10 for step in steps if not step.overflow)
    (oom,), (failure,), (goodbye,) = (
        collector.of(telemetry.Oom),
        collector.of(telemetry.Failure),
        collector.of(telemetry.Goodbye),
    )
    assert (oom.requested_bytes, oom.step, oom.phase) == (2**60, 19, "forward")
    assert 0 < oom.device_free_bytes < oom.device_total_bytes
    assert oom.stack[-1].endswith(" train")
    assert "can't allocate memory" in failure.error
    assert "Traceback" in failure.traceback
    assert (goodbye.reason, goodbye.step) == ("failed", 18)


def test_commands_are_answered_while_the_training_thread_is_busy_elsewhere(collector):
    collector.fork("single_loop.py", "wait")
    collector.collect(lambda c: any(beat.step == 6 for beat in c.of(telemetry.Heartbeat)))
    hello = collector.of(telemetry.Hello)[-1]
    identity = f"rank-0-{hello.pid}-{hello.start_ticks}"
    assert {header.src for header in collector.headers} == {identity}
    assert is_alive(ProcessId(hello.pid, hello.start_ticks))

    hellos = len(collector.of(telemetry.Hello))
    collector.command(identity, "identify")
    collector.collect(lambda c: len(c.of(telemetry.Hello)) > hellos)
    collector.command(identity, "stacks", reason="asked")
    collector.collect(lambda c: c.of(telemetry.Stacks))
    (stacks,) = collector.of(telemetry.Stacks)
    assert "single_loop.py" in stacks.text
    assert " in train" in stacks.text
    assert stacks.reason == "asked"
    for verb, word in (("snapshot", "no CUDA allocator"), ("arm", "no trace to read"), ("stop", "does not ask")):
        number = collector.command(identity, verb)
        collector.collect(lambda c, n=number: len([a for a in c.answers if a.id == n]) == 2)
        accepted, result = [answer for answer in collector.answers if answer.id == number]
        assert isinstance(accepted, Accepted)
        assert isinstance(result, Result)
        assert not result.ok
        assert word in result.text
    os.kill(hello.pid, signal.SIGINT)
    collector.finish()
    assert collector.of(telemetry.Goodbye)[0].reason == "stopped"


def test_without_a_hub_a_rank_ends_within_a_second_of_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    collector = Collector(tmp_path / "home")
    collector.telemetry.close()
    collector.ranks.close()
    try:
        single(collector)
        watched = seconds_to_end(collector.job, collector.run.rank_log(0, "out"))
        output = tmp_path / "unwatched"
        with output.open("wb") as file:
            environment = {**os.environ, "FTMON_RUN": str(tmp_path)}  # it saves there; nothing of ours is on its path
            alone = subprocess.Popen([BIN / "python", SCRIPTS / "single_loop.py"], stdout=file, env=environment)
        assert watched - seconds_to_end(alone, output) < 3
    finally:
        collector.close()


def seconds_to_end(job, log):
    """Measure how long a job's main thread sleeps after its last line: what it runs, or waits for a core, varies."""

    def asleep():
        ran, queued = map(int, Path(f"/proc/{job.pid}/schedstat").read_text().split()[:2])
        return time.monotonic() - (ran + queued) / 1e9

    eventually(lambda: log.exists() and "trained" in log.read_text(), "the last line", every=0.01)
    start = asleep()
    os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
    slept = asleep() - start
    assert job.wait() == 0
    return slept


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Two ranks with one line for ftmon in them, and the hub that the line started."""
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("FTMON_RUN", "RANK"))}
    script = SCRIPTS / "watched_loop.py"
    with (tmp_path / "output").open("wb") as output:
        job = subprocess.Popen(start_ranks.command(2, script), env=environment, stdout=output, stderr=output)

    def begun():
        assert job.poll() is None, (tmp_path / "output").read_text()
        runs = rundir.all_runs()
        return runs and runs[0].living_hub() and runs

    runs = eventually(begun, "a run with a hub")
    yield job, runs, tmp_path / "output"
    if job.poll() is None:
        job.kill()
        job.wait(10)
    hub = runs[0].living_hub()
    if hub is not None:
        os.kill(hub.process.pid, signal.SIGKILL)


def test_one_line_in_a_script_makes_all_its_ranks_one_run_that_stops_as_asked(watched):
    job, runs, output = watched
    assert [run.id.startswith("one-line-") for run in runs] == [True]
    addresses = runs[0].living_hub().addresses
    context = zmq.Context()
    stream, control = (sockets.peer_socket(context, channel) for channel in ("stream", "control"))
    try:
        stream.connect(addresses["stream"])
        control.connect(addresses["control"])
        training = set()
        while training != {0, 1}:
            assert stream.poll(60_000), output.read_text()
            message = wire.decode_body(stream.recv_multipart()[1])
            if isinstance(message, telemetry.Step) and message.step > 3:
                training.add(message.rank)
        control.send_multipart(wire.encode("test", 1, time.time(), Command("s", "stop")))
        assert job.wait(200) == 0, output.read_text()
    finally:
        stream.close()
        control.close()
        context.term()
    eventually(lambda: runs[0].living_hub() is None, "the hub's end")
    reader = Reader(runs[0].recording)
    messages = [frame.message for frame in reader.frames(0, 10_000)]
    reader.close()
    for rank in (0, 1):
        own = [message for message in messages if getattr(message, "rank", None) == rank]
        hello = next(m for m in own if isinstance(m, telemetry.Hello) and m.model)
        assert (hello.sends_logs, hello.world_size, hello.model, hello.backend) == (True, 2, "Linear", "gloo")
        assert [m.total_steps for m in own if isinstance(m, telemetry.Plan)][:1] == [3]
        lines = [(m.stream, m.text) for m in own if isinstance(m, telemetry.LogLine)]
        assert {("out", "a line of output"), ("err", "progress 2")} <= set(lines)
        step = next(m for m in own if isinstance(m, telemetry.Step))
        assert (step.step, step.tokens, step.padded_tokens) == (1, 32, 32)
        assert step.phase("backward").host_us > 0
    ends = [(m.rank, m.reason, m.step) for m in messages if isinstance(m, telemetry.Goodbye)]
    assert sorted(ends) == [(0, "stopped", ends[0][2]), (1, "stopped", ends[0][2])]
    assert f"stopped after {ends[0][2]}" in output.read_text()
