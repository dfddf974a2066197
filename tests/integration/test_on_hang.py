"""``ftmon run --on-hang stacks`` and ``stop`` from the command line, on real ranks; ``kill`` is in test_stall_end."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ftmon.protocol.messages.control import RankState
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.end import HANG
from ftmon_process import Ftmon, ftmon_home, wait_until_nothing_is_left
from sleeping_loader import WHERE, job


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path / "home", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="") as ftmon:
        yield ftmon


def test_stacks_are_saved_and_the_run_goes_on_when_the_stall_is_over(home: Ftmon, tmp_path: Path) -> None:
    done = home.run("run", "--on-hang", "stacks", "--hang-grace", "1", "--", *job(tmp_path, 30), seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all rows seen") == 2
    run = home.newest()
    (saved,) = [path.read_text() for path in (run.path / "stacks").iterdir()]
    assert WHERE in saved
    assert "==== rank 0" in saved
    with Reader(run.recording) as reader:
        (hang,) = [alert for alert in reader.alerts() if alert.kind == "hang"]
        (note,) = [alert for alert in reader.alerts() if alert.evidence.get("rule") == "on-hang"]
    assert hang.evidence["hung"] == [1]
    assert hang.resolved is not None
    assert note.severity == "warning"
    assert "stacks saved" in done.stdout
    wait_until_nothing_is_left(run)


def test_stop_interrupts_the_ranks_so_that_they_can_end_by_themselves(home: Ftmon, tmp_path: Path) -> None:
    done = home.run("run", "--on-hang", "stop", "--hang-grace", "1", "--", *job(tmp_path, 600), seconds=500)
    assert done.returncode == HANG, done.stdout + done.stderr
    assert "interrupted: the script puts its affairs in order" in done.stdout
    run = home.newest()
    end = run.read_exit()
    assert end is not None
    assert (end.state, end.cause) == ("failed", "hang")
    assert "--on-hang stop" in end.text
    assert "(exit code" not in done.stdout, "the status is ftmon's own"
    with Reader(run.recording) as reader:
        states = [frame.message for frame in reader.frames(0, 100_000) if isinstance(frame.message, RankState)]
    assert not [state for state in states if state.signal == signal.SIGKILL], "nobody had to be killed a minute later"
    (saved,) = [path.read_text() for path in (run.path / "stacks").iterdir()]
    assert WHERE in saved
    wait_until_nothing_is_left(run)
