"""A hub that dies takes nothing with it: another one adopts the ranks, and the numbers go on."""

import contextlib
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from eventually import eventually
from ftmon.protocol.errors import HubError
from ftmon.protocol.messages.control import Alert, HubStats, RankState
from ftmon.protocol.messages.telemetry import LogLine, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host.inspection.inspect import switches
from ftmon.trainer.launch.launcher import HubKeeper
from hub_client import SCRIPTS, App, exit_of, fake_ranks, hub_gone, hub_of, started

pytestmark = pytest.mark.usefixtures("private_home")


def test_a_killed_hub_is_replaced_and_the_stream_goes_on_where_it_ended():
    with started(fake_ranks({"rate": 300}, {"rate": 300})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.step >= 100)
            app.told(Step)  # of a hub that has recorded nothing, the next one knows nothing
            before = hub_of(run)
            os.kill(before.process.pid, signal.SIGKILL)
            last_published = max(frame.seq for frame in app.frames)
        eventually(lambda: (hub := run.living_hub()) is not None and hub.process != before.process, "a new hub")
        with App(run) as app:
            for rank in (0, 1):
                app.wait_for(Step, lambda step, rank=rank: step.rank == rank)
            assert app.frames[0].seq > last_published
            assert all(a.seq < b.seq for a, b in zip(app.frames, app.frames[1:], strict=False))
            history = app.history()
            seqs = [frame.seq for frame in history]
            assert seqs == sorted(set(seqs))
            assert [m for m in _messages(history, LogLine) if "rank 0 trains" in m.text][1:] == []
            assert "restarted" in [alert.evidence.get("rule") for alert in _messages(history, Alert)]
            for rank in (0, 1):
                steps = [step.step for step in _messages(history, Step) if step.rank == rank]
                assert len(steps) == len(set(steps))
                # What the dead hub had read and not yet written is gone; the next test counts it.
                missing = sorted(set(range(1, max(steps))) - set(steps))
                assert missing == [] or missing[-1] - missing[0] == len(missing) - 1
            assert app.command("kill", signal="KILL").ok
            assert exit_of(run).state == "stopped"


def test_what_hubs_that_are_killed_take_along_is_counted_to_the_message():
    with started(fake_ranks({"rate": 300}, {"rate": 300})) as run:
        for _ in range(3):
            with App(run) as app:
                app.wait_for(Step, lambda step: step.rank == 0)
                app.wait_for(Step, lambda step: step.rank == 1)
                before = hub_of(run)
                pids = [hello.pid for hello in app.hellos().values()]
            os.kill(before.process.pid, signal.SIGSTOP)
            # A rank waits once a step. What comes of it meanwhile lies in the hub's sockets, and dies with it.
            then = {pid: switches(pid, pid) for pid in pids}
            eventually(lambda then=then: all(switches(p, p) > n + 100 for p, n in then.items()), "steps meanwhile")
            os.kill(before.process.pid, signal.SIGKILL)
            eventually(lambda old=before: (hub := run.living_hub()) is not None and hub.process != old.process, "a hub")
        with App(run) as app:
            app.wait_for(Step, lambda step: step.rank == 0)
            app.wait_for(Step, lambda step: step.rank == 1)
            app.frames.clear()
            app.wait_for(HubStats)
            seen = next(frame.seq for frame in app.frames if isinstance(frame.message, HubStats))
            # A hub that is not given the time to commit answers without the newest.
            history = eventually(lambda: (found := app.history()) and found[-1].seq >= seen and found, "its record")
            assert app.command("kill", signal="KILL").ok
        # What was lost after the last report is in none.
        reported = max(place for place, frame in enumerate(history) if isinstance(frame.message, HubStats))
        history = history[: reported + 1]
        exit_of(run)
        hub_gone(run)
    missing = 0
    for rank in (0, 1):
        steps = {step.step for step in _messages(history, Step) if step.rank == rank}
        missing += max(steps) - len(steps)
    lost = {
        (stats.pid, sender): count for stats in _messages(history, HubStats) for sender, count in stats.lost.items()
    }
    with contextlib.closing(sqlite3.connect(run.recording)) as recording:
        (recorded,) = recording.execute("SELECT sum(messages) FROM gaps").fetchone()
    assert missing > 0
    assert missing <= sum(lost.values()) == recorded
    assert "a hub ended before it had recorded them" in Reader(run.recording).info().missing


def test_ranks_that_a_new_hub_does_not_know_are_asked_who_they_are_and_two_hubs_of_one_run_cannot_live():
    with started(fake_ranks({}, {})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.rank == 1)
            before = hub_of(run)
        os.kill(before.process.pid, signal.SIGSTOP)
        for file in run.path.glob("recording.sqlite*"):
            file.unlink()
        os.kill(before.process.pid, signal.SIGKILL)
        eventually(lambda: (hub := run.living_hub()) is not None and hub.process != before.process, "a new hub")
        with App(run) as app:
            eventually(lambda: sorted(app.hellos()) == [0, 1], "the ranks' introduction")
            assert app.wait_for(HubStats).lost == {}
            command = [sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)]
            second = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            assert second.returncode == 1
            assert "another hub of this run is alive" in second.stderr
            with pytest.raises(HubError):
                run.lock_hub()
            app.frames.clear()
            app.wait_for(Step)
            assert app.command("kill", ranks=[1], signal="KILL").ok


def test_a_rank_that_died_while_no_hub_lived_is_found_gone():
    with started(fake_ranks({}, {"workers": 0})) as run, App(run) as app:
        app.wait_for(Step, lambda step: step.rank == 1)
        pid = app.hellos()[1].pid
        hub = hub_of(run)
        launcher = eventually(lambda: run.read_run().launcher, "the launcher")
        os.kill(launcher.pid, signal.SIGSTOP)  # so that no hub comes back before the rank is dead
        job = next(p for p in _children(launcher.pid) if p != hub.process.pid)
        os.kill(job, signal.SIGSTOP)
        os.kill(hub.process.pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        os.kill(launcher.pid, signal.SIGCONT)
        eventually(lambda: (new := run.living_hub()) is not None and new.process != hub.process, "a new hub")
        with App(run) as second:
            # The recording has it if it was found before this app had subscribed.
            second.told(RankState, lambda s: (s.rank, s.state, s.signal) == (1, "gone", 9))
            os.kill(job, signal.SIGCONT)
        assert exit_of(run).state == "failed"


def test_a_hub_that_was_asked_to_end_stays_away_and_training_goes_on(tmp_path):
    go = tmp_path / "go"
    with started(fake_ranks({"rate": 20, "steps": 40, "awaits": str(go), "flush_s": 1})) as run:
        with App(run) as app:
            app.told(Step)
            assert app.command("shutdown").ok
        eventually(lambda: run.living_hub() is None, "the hub's end")
        assert run.read_exit() is None
        go.touch()
        assert exit_of(run).state == "finished"
        assert run.living_hub() is None


def test_a_damaged_recording_is_moved_aside_and_a_hub_whose_run_directory_was_removed_ends():
    run = rundir.create("damaged", ["true"], "watch")
    run.recording.write_bytes(b"not a database at all" * 1000)
    hub = _hub(run)
    try:
        with App(run) as app:
            app.told(Alert)
            alerts = [frame.message for frame in app.history() if isinstance(frame.message, Alert)]
            assert [(alert.kind, alert.evidence["rule"]) for alert in alerts] == [("disk", "damaged")]
            assert len(list(run.path.glob("recording.damaged-*.sqlite"))) == 1
        os.kill(hub.pid, signal.SIGSTOP)  # it writes into the directory
        shutil.rmtree(run.path)
        os.kill(hub.pid, signal.SIGCONT)
        assert hub.wait(200) == 0
    finally:
        hub.kill()
        hub.wait(200)


def test_with_a_full_disk_the_stream_goes_on_the_app_is_told_and_recording_resumes():
    run = rundir.create("full", ["true"], "watch")
    # A limit on the size of files the hub writes: what it meets is the same as a full disk, an error from write(2).
    hub = _hub(run, limit=600_000)
    words = [sys.executable, str(SCRIPTS / "fake_rank.py"), '{"rate": 800}']
    rank = subprocess.Popen(words, env={**os.environ, "FTMON_RUN": str(run.path)})
    try:
        with App(run) as app:
            app.wait_for(HubStats, lambda stats: stats.recording_error != "")
            app.wait_for(Alert, lambda alert: alert.kind == "disk" and alert.resolved is None)
            app.frames.clear()
            app.wait_for(Step)
            resource.prlimit(hub.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            app.wait_for(HubStats, lambda stats: stats.recording_error == "")

            def resolved() -> bool:  # the last one: an error may have ended by itself before
                alerts = [alert for alert in _messages(app.recorded(), Alert) if alert.kind == "disk"]
                return bool(alerts) and alerts[-1].resolved is not None

            eventually(resolved, "that the alert is resolved")
    finally:
        rank.kill()
        rank.wait(200)
        hub.terminate()
        assert hub.wait(200) == 128 + signal.SIGTERM
    assert Reader(run.recording).info().steps > 0


def _hub(run, limit: int = 0) -> subprocess.Popen[bytes]:
    def limit_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    hub = subprocess.Popen(
        [sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)], preexec_fn=limit_files if limit else None
    )
    eventually(lambda: run.living_hub() or hub.poll() is not None, "the hub's start")
    return hub


def _messages(frames, kind):
    return [frame.message for frame in frames if isinstance(frame.message, kind)]


def _children(pid: int) -> list[int]:
    def found() -> list[int]:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            words = file.read().split()
        return [int(word) for word in words] if len(words) >= 2 else []

    return eventually(found, "the launcher's children")


def test_each_start_that_fails_is_followed_by_another_later(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    keeper = HubKeeper(run)
    keeper.start()
    delays: list[float] = []
    while len(delays) < 3:
        delay = keeper.tend()
        assert delay is not None, "the launcher would wait for a signal without end"
        delays.append(delay)
        if len(delays) < 3:
            time.sleep(delay)
    assert delays == sorted(delays)
    assert not keeper.alive
