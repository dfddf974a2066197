"""A run from its start to its end through the real launcher and hub, with pretended ranks on real sockets."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys

import msgspec
import pytest
import zmq
from eventually import eventually
from ftmon.protocol.host.process import is_alive
from ftmon.protocol.link.sockets import peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Alert, HubStats, RankState, RunState
from ftmon.protocol.messages.telemetry import Goodbye, Hello, LogLine, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import RunOptions
from ftmon.protocol.run.start import StartRequest, spawn_start, started_run
from ftmon.trainer.launch.start import spawn_launcher
from hub_client import App, exit_of, fake_ranks, hub_gone, hub_of, members, started
from run_picture import pictured

pytestmark = pytest.mark.usefixtures("private_home")


def test_a_run_started_by_a_request_is_recorded_whole_to_the_end_that_is_told_and_nothing_of_it_stays(tmp_path):
    go = tmp_path / "go"
    rank = {"rate": 100, "steps": 300, "awaits": str(go)}
    options = RunOptions(logs=False, hang_grace=7.0)
    request = StartRequest("run", "x", options, command=fake_ranks({**rank, "workers": 1}, rank))
    process, written = spawn_start(request, environ=os.environ)
    output, errors = process.communicate(written, timeout=200)
    assert (process.returncode, errors) == (0, b"")
    run = started_run(output)
    assert run.read_run().options == options
    with pictured(run):
        try:
            with App(run) as app:
                app.told(Step)
                go.touch()
                end = app.wait_for(RunState, lambda state: state.state == "finished")
                with Reader(run.recording) as reader:
                    found = [frame.message for frame in reader.frames(0, 100_000)]
                    assert end in found, "who hears of the end finds it there"
        finally:
            go.touch()
        assert exit_of(run).state == "finished"
        hub_gone(run)
        assert members(run) == []
    info = Reader(run.recording).info()
    assert (info.steps, list(info.ranks), info.state, info.exit_code) == (600, [0, 1], "finished", 0)
    assert info.complete
    frames = Reader(run.recording).frames(0, 10_000)
    kinds = {type(frame.message) for frame in frames}
    assert {Hello, Step, Goodbye, LogLine, RunState, RankState, HubStats} <= kinds
    stats = [frame.message for frame in frames if isinstance(frame.message, HubStats)][-1]
    assert (stats.lost, stats.refused, stats.unknown) == ({}, 0, 0)
    assert [p.name for p in run.path.glob("*.sock")] == []
    assert oct(run.path.stat().st_mode & 0o777) == "0o700"
    assert oct((run.path / "hub.json").stat().st_mode & 0o777) == "0o600"
    size = run.recording.stat().st_size
    again = subprocess.run([sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)], timeout=200, check=False)
    assert (again.returncode, run.recording.stat().st_size) == (0, size), "a run that is over needs no hub"


def test_an_app_that_joins_late_has_every_step_once_and_a_read_only_hub_refuses_every_verb_that_acts():
    with started(fake_ranks({"rate": 50, "workers": 1}), read_only=True) as run, App(run) as app:
        app.wait_for(Step, lambda step: step.step >= 20)

        def recorded() -> list[wire.Frame]:
            answer = app.query("frames", after_seq=0, limit=100_000)
            assert answer.ok, answer.error
            return msgspec.msgpack.decode(answer.data, type=list[wire.Frame])

        # A hub that is not given the time to commit answers without the newest.
        history = eventually(lambda: (found := recorded()) and found[-1].seq >= app.frames[0].seq and found, "its past")
        app.wait_for(Step, lambda step: step.step > 20)
        merged = {frame.seq: frame.message for frame in [*history, *app.frames]}
        steps = [message.step for _, message in sorted(merged.items()) if isinstance(message, Step)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) > 20
        # Another program reads the recording while it is written.
        connection = sqlite3.connect(f"file:{run.recording}?mode=ro", uri=True)
        eventually(
            lambda: connection.execute("SELECT count(*) FROM steps").fetchone()[0] >= 20, "steps in the recording"
        )
        connection.close()
        assert app.query("no_such_query").ok is False
        assert "frames" in app.query("frames", nonsense=1).error
        for verb in ("kill", "stop", "stacks", "snapshot", "arm", "compose", "shutdown"):
            assert "--read-only" in app.refused(verb)
        assert app.command("ping").ok
        assert hub_of(run).read_only
        assert run.read_exit() is None


def test_a_command_that_fails_before_its_first_step_says_so_with_its_last_words():
    code = "import sys; print('no data at /nowhere', file=sys.stderr); sys.exit(3)"
    with started([sys.executable, "-c", code]) as run:
        end = exit_of(run)
        assert (end.state, end.exit_code, end.text) == ("failed", 3, "exit code 3")
        hub_gone(run)
        alerts = [alert for alert in Reader(run.recording).alerts() if alert.kind == "exit"]
        assert (len(alerts), alerts[0].evidence["rule"]) == (1, "before_first_step")
        assert "no data at /nowhere" in "\n".join(alerts[0].evidence["last_lines"])
        assert Reader(run.recording).info().state == "failed"


def test_a_command_that_replaces_pythonpath_is_told_so_while_it_runs_and_at_its_end(tmp_path):
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"code")
    maps = f"f = open('{library}'); kept = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
    code = f"import mmap, time; {maps}; time.sleep(600)"
    command = ["sh", "-c", 'PYTHONPATH=. exec "$0" -c "$1"', sys.executable, code]
    with started(command) as run, App(run) as app:
        note = app.told(Alert, lambda alert: alert.evidence.get("rule") == "unhooked")
        assert "PYTHONPATH=.:$PYTHONPATH" in note.title
        os.kill(note.evidence["pid"], signal.SIGTERM)
        end = app.wait_for(Alert, lambda alert: alert.evidence.get("rule") == "before_first_step")
        assert "no rank reported; pid" in end.title
        assert "PYTHONPATH=.:$PYTHONPATH" in end.title


def test_a_command_that_cannot_be_executed_fails_the_run_in_words(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with started([str(broken)]) as run:
        end = exit_of(run)
        assert (end.state, end.exit_code) == ("failed", 127)
        assert "cannot be started" in end.text


def test_what_is_wrong_is_refused_counted_and_told_and_ranks_that_do_not_answer_stop_or_die_are_named():
    with started(fake_ranks({}, {"silent": True})) as run, App(run) as app:
        for rank in (0, 1):
            app.wait_for(Step, lambda step, rank=rank: step.rank == rank)
        result = app.command("stacks")
        assert not result.ok
        assert result.data["silent"] == [1]
        assert app.command("stacks", ranks=[0]).ok
        assert "unknown command 'explode'" in app.refused("explode")
        assert "unknown command 'identify'" in app.refused("identify")
        assert "no rank 7" in app.refused("kill", ranks=[7])
        assert "ranks must be a list of numbers" in app.refused("kill", ranks="all")
        assert "phase must be empty or one of" in app.refused("arm", phase="lunch")
        assert "steps must be" in app.refused("arm", steps=9)
        assert "signal must be INT, TERM or KILL" in app.refused("kill", signal="HUP")
        header = msgspec.msgpack.encode({"v": [3, 1], "src": "app", "seq": 1, "t": 0.0})
        app.control.send_multipart([header, msgspec.msgpack.encode({"type": "command", "id": "x", "verb": "ping"})])
        answer = app.answer()
        assert answer.id == "x"
        assert "protocol 3.1" in answer.text
        # A string that is no UTF-8: refused like any other damage, and the hub goes on.
        broken = msgspec.msgpack.encode({"type": "command", "id": "y", "verb": "pin?"}).replace(b"pin?", b"pin\xff")
        app.control.send_multipart([msgspec.msgpack.encode({"v": [1, 0], "src": "app", "seq": 2, "t": 0.0}), broken])
        assert not app.answer().ok
        assert app.command("ping").ok
        context = zmq.Context()
        push = peer_socket(context, "telemetry")
        push.connect(app.hub.addresses["telemetry"])
        foreign = msgspec.msgpack.encode({"v": [2, 0], "src": "rank-9-1-1", "seq": 1, "t": 0.0})
        for _ in range(5):
            push.send_multipart([foreign, b"\x80"])
        push.send_multipart([wire.encode_header("rank-8-1-1", 1, 0.0), msgspec.msgpack.encode({"type": "new"})])
        push.send_multipart([b"nonsense"])
        assert app.wait_for(HubStats, lambda s: s.refused == 6 and s.unknown == 1).lost == {}
        alert = app.wait_for(
            Alert, lambda alert: str(alert.evidence.get("rule")).startswith("refused ") and "2.0" in alert.text
        )
        assert alert.count == 1
        context.destroy(linger=0)
        pid = app.hellos()[1].pid
        os.kill(pid, signal.SIGSTOP)
        stopped = app.wait_for(RankState, lambda s: (s.rank, s.state) == (1, "stopped"))
        os.kill(pid, signal.SIGCONT)
        app.wait_for(RankState, lambda s: (s.rank, s.state) == (1, "training") and s.time > stopped.time)
        os.kill(pid, signal.SIGKILL)
        gone = app.wait_for(RankState, lambda s: (s.rank, s.state) == (1, "gone") and s.signal == 9)
        assert "SIGKILL" in gone.text
        assert exit_of(run).state == "failed"
        app.wait_for(RunState, lambda s: s.state == "failed")
        app.wait_for(Alert, lambda alert: alert.kind == "died" and alert.rank == 1)


def test_a_port_that_was_taken_meanwhile_leaves_the_run_watched_locally():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        command = fake_ranks({})
        # Past the check at the start: the port is taken between it and the hub's own bind.
        run = rundir.create("test", command, "run", RunOptions(logs=False, listen=f"127.0.0.1:{port - 1}"))
        spawn_launcher(run)
        try:
            with App(run) as app:
                app.wait_for(Step)
                app.told(Alert, lambda alert: "already in use" in alert.text)
                alerts = msgspec.msgpack.decode(app.query("alerts").data, type=list[Alert])
                assert any("already in use" in alert.text for alert in alerts)
                assert app.hub.listen == {}
                assert app.command("kill").ok
                assert exit_of(run).state == "stopped"
        finally:
            hub_gone(run)


def test_the_launcher_outlives_a_hangup_and_passes_a_stop_on_for_which_no_rank_is_to_blame():
    # Under nohup the job outlives it too; otherwise the launcher would end what is left of the run meanwhile.
    with started(["nohup", *fake_ranks({"workers": 1}, {})]) as run, App(run) as app:
        app.wait_for(Step, lambda step: step.rank == 1)
        launcher = eventually(lambda: run.read_run().launcher, "the launcher")
        os.kill(launcher.pid, signal.SIGHUP)
        app.frames.clear()
        app.wait_for(Step)
        os.kill(launcher.pid, signal.SIGTERM)
        end = exit_of(run)
        assert (end.state, end.cause, end.text.split(" (")[0]) == ("stopped", "", "stopped by SIGTERM")
        hub_gone(run)
        eventually(lambda: not is_alive(launcher), "the launcher's end")
        assert members(run) == []
    with Reader(run.recording) as reader:
        assert [alert.title for alert in reader.alerts() if alert.severity == "error"] == []
        states = [f.message for f in reader.frames(limit=100_000) if isinstance(f.message, RunState)]
        assert ("stopping", "stopped by SIGTERM") in [(state.state, state.text) for state in states]


def test_a_run_whose_launcher_died_is_ended_by_its_hub(tmp_path):
    go = tmp_path / "go"
    with started(fake_ranks({"rate": 50, "steps": 60, "awaits": str(go)})) as run, App(run) as app:
        app.told(Step)
        os.kill(eventually(lambda: run.read_run().launcher, "the launcher").pid, signal.SIGKILL)
        go.touch()
        end = exit_of(run)
        assert end.state == "finished"
        assert "the launcher died" in end.text
        hub_gone(run)
        assert Reader(run.recording).info().steps == 60
