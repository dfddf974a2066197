"""What is done about a hang in an unattended run, and how the stacks of a rank that holds the lock come out."""

import contextlib
import os
import signal
import time

import pytest
import start_ranks
from eventually import eventually
from ftmon.protocol.host.process import is_alive
from ftmon.protocol.messages.telemetry import Heartbeat, Stacks, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import exits
from ftmon.trainer.host.end import cleanup
from hub_client import App, exit_of, fake_ranks, hub_gone, members, started

pytestmark = pytest.mark.usefixtures("private_home")

HOLDS_THE_LOCK = """
import ctypes, os, sys, time, torch, torch.distributed as dist
from itertools import count
dist.init_process_group("gloo")
rank = dist.get_rank()
class Model(torch.nn.Linear):
    def forward(self, rows):
        time.sleep(0.02)
        return super().forward(rows)
model = Model(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def native_code():
    ctypes.PyDLL(None).sleep(600)
for step in count():
    loss = model(torch.ones(4, 4)).sum()
    loss.backward()
    if rank == 1 and os.path.exists(sys.argv[1]):
        open(sys.argv[1] + "-reached", "w").close()
        while not os.path.exists(sys.argv[1] + "-heard"):
            time.sleep(0.01)
        native_code()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
"""


def test_a_rank_that_holds_pythons_lock_is_named_with_its_line_and_the_run_is_ended_as_a_hang(tmp_path):
    script = tmp_path / "locked.py"
    script.write_text(HOLDS_THE_LOCK)
    now = tmp_path / "now"
    with started(start_ranks.command(2, str(script), str(now)), on_hang="kill", hang_grace=3.0) as run:
        with App(run) as app:  # the first three steps would have a minute and more
            app.wait_for(Step, lambda step: step.rank == 1 and step.step > 3)
            now.touch()
            eventually(now.with_name("now-reached").exists, "the place before the optimizer's step")
            reached = time.time()
            # Heard last between steps, where it may be for long, it would have 300 s.
            app.wait_for(
                Heartbeat,
                lambda beat: (beat.rank, beat.phase) == (1, "idle") and beat.micro_step > 0 and beat.time > reached,
            )
            now.with_name("now-heard").touch()
        end = exit_of(run)
        assert (end.state, end.cause) == ("failed", "hang")
        assert "--on-hang kill" in end.text
        assert exits.of_run(end) == exits.HANG
        eventually(lambda: members(run) == [], "the end of all")
        hub_gone(run)
        with Reader(run.recording) as reader:
            hang = next(alert for alert in reader.alerts() if alert.kind == "hang")
            saved = [frame.message for frame in reader.frames(0, 100_000) if isinstance(frame.message, Stacks)]
        assert (hang.evidence["rule"], hang.evidence["hung"]) == ("missing", [1])
        assert "in native_code" in hang.evidence["ranks"]["1"]["at"]
        assert hang.evidence["ranks"]["1"]["stacks_by"] == "signal"
        assert any(one.rank == 1 and one.taken_by == "signal" and "in native_code" in one.text for one in saved)
        (text,) = [path.read_text() for path in (run.path / "stacks").iterdir()]
        assert "==== rank 1 (signal)" in text


def test_a_rank_that_does_not_end_after_the_others_finished_is_ended_and_told_apart_from_a_failure():
    with started(fake_ranks({"steps": 3}, {"steps": 3, "lingers": True}), exit_timeout=2.0) as run:
        end = exit_of(run)
        assert (end.state, end.cause) == ("stopped", "hang-at-exit")
        assert "--exit-timeout 2" in end.text
        assert exits.of_run(end) == exits.HANG_AT_EXIT
        assert members(run) == []
        hub_gone(run)
        with Reader(run.recording) as reader:
            (alert,) = [alert for alert in reader.alerts() if alert.evidence.get("rule") == "on-hang"]
        assert (alert.kind, alert.severity) == ("note", "error")


def test_what_a_run_without_launcher_and_hub_left_is_found_and_ended_and_a_living_run_is_left_alone():
    with started(fake_ranks({"workers": 1})) as living, started(fake_ranks({"workers": 1})) as run:
        with App(living), App(run):
            left = eventually(lambda: len(found := members(run)) == 3 and found, "rank, worker and launcher")
            eventually(lambda: len(members(living)) == 3, "those of the other run")
        launcher = run.read_run().launcher
        os.kill(launcher.pid, signal.SIGKILL)
        hub = eventually(run.living_hub, "the hub")
        with contextlib.suppress(ProcessLookupError):
            os.kill(hub.process.pid, signal.SIGKILL)
        eventually(lambda: run.living_hub() is None and not is_alive(launcher), "the death of both")
        orphans = [one for one in cleanup.find() if one.run == str(run.path)]
        assert {one.pid for one in orphans} == {process.pid for process in left}
        assert all("whose launcher and hub are gone" in one.line for one in orphans)
        assert not [one for one in cleanup.find() if one.run == str(living.path)]
        assert cleanup.end(orphans) == []
        assert members(run) == []
        assert len(members(living)) == 3
