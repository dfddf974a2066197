"""A recording that is removed while it is written: a new one is begun, and says what is missing."""

import os
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Hello, Step
from ftmon.protocol.recording import writer as removed
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from hub_client import App, exit_of, fake_ranks, hub_gone, started
from streams import RUN, Stream

pytestmark = pytest.mark.usefixtures("private_home")


@pytest.mark.parametrize("logs", [True, False])
def test_what_explains_the_run_is_carried_over_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: bool
) -> None:
    monkeypatch.setattr(removed, "SETTLE_S", 0.0)
    frames = list(Stream(ranks=2, steps=200, spike_every=20).frames())
    writer = Writer(tmp_path / "r.sqlite", RUN)
    half = len(frames) // 2
    for count, frame in enumerate(frames, 1):
        writer.append(frame.seq, frame.t, frame.message)
        if count % 50 == 0 or count == half:
            writer.commit()
        if count == half:
            reader = Reader(tmp_path / "r.sqlite")
            whole = reader.state_at(frame.t)
            for path in tmp_path.glob("r.sqlite*"):
                if logs or not path.name.endswith(("-wal", "-shm")):
                    path.unlink()
            if not logs:
                reader.close()
    writer.close()
    assert writer.error == ""
    assert writer.notice
    with Reader(tmp_path / "r.sqlite") as found:
        kept = found.frames(limit=10**6)
        assert [frame for frame in kept if frame.seq > frames[half - 1].seq] == frames[half:]
        earlier = {frame.seq for frame in kept if frame.seq <= frames[half - 1].seq}
        assert {frame.seq for frame in whole if isinstance(frame.message, Hello | Alert)} <= earlier
        info = found.info()
        assert f"{half - len(earlier)} messages between " in info.missing
        assert "the recording was removed; a new one was begun" in info.missing
        assert not info.complete
    assert os.path.exists(tmp_path / "r.sqlite")
    assert not os.path.exists(tmp_path / "r.sqlite-wal")


def test_a_directory_on_its_way_out_gets_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "SETTLE_S", 0.0)
    (tmp_path / "run.json").touch()
    frames = list(Stream(ranks=2, steps=20).frames())
    writer = Writer(tmp_path / "r.sqlite", RUN)
    for frame in frames[:20]:
        writer.append(frame.seq, frame.t, frame.message)
    writer.commit()
    for path in [tmp_path / "run.json", *tmp_path.glob("r.sqlite*")]:
        path.unlink()
    for frame in frames[20:]:
        writer.append(frame.seq, frame.t, frame.message)
        writer.commit()
    assert not (tmp_path / "r.sqlite").exists()


def test_a_live_runs_recording_that_is_removed_goes_on_in_a_new_file_and_apps_have_its_history() -> None:
    with started(fake_ranks({"rate": 50}, {"rate": 50})) as run:
        with App(run) as app:
            app.wait_for(Step, lambda step: step.rank == 1 and step.step > 20)
            app.history()
            run.recording.unlink()
            app.wait_for(Alert, lambda alert: (alert.kind, alert.evidence.get("rule")) == ("disk", "removed"))
            app.frames.clear()
            later = app.wait_for(Step, lambda step: step.rank == 0)
            history = app.history()
            assert {frame.message.rank for frame in history if isinstance(frame.message, Hello)} == {0, 1}
            eventually(lambda: any(f.message == later for f in app.history()), "the step in the new file")
            assert app.command("kill", signal="KILL").ok
        exit_of(run)
        hub_gone(run)
        info = Reader(run.recording).info()
        assert info.steps > 0
        assert "the recording was removed" in info.missing
