"""``ftmon run --on-hang stacks`` and ``stop`` from the command line, on real ranks; ``kill`` is in test_stall_end."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from eventually import eventually
from ftmon.protocol.errors import RecordingError
from ftmon.protocol.messages.control import RankState
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.exits import HANG
from ftmon_process import follow_to_end, wait_until_nothing_is_left
from sleeping_loader import WHERE, job, store_is_back


def test_stacks_are_saved_and_the_run_goes_on_when_the_stall_is_over(home, tmp_path):
    with home.start("run", "--on-hang", "stacks", "--hang-grace", "1", "--", *job(tmp_path)) as process:
        run = home.newest()

        def told() -> bool:
            with contextlib.suppress(RecordingError), Reader(run.recording) as reader:  # nothing is in it at first
                return any(alert.evidence.get("rule") == "on-hang" for alert in reader.alerts())
            return False

        eventually(told, "what is done about the hang", every=0.2)
        store_is_back(tmp_path)
        status, output, errors = follow_to_end(process)
    assert status == 0, output + errors
    assert output.count("all rows seen") == 2
    (saved,) = [path.read_text() for path in (run.path / "stacks").iterdir()]
    assert WHERE in saved
    assert "==== rank 0" in saved
    with Reader(run.recording) as reader:
        (hang,) = [alert for alert in reader.alerts() if alert.kind == "hang"]
        (note,) = [alert for alert in reader.alerts() if alert.evidence.get("rule") == "on-hang"]
    assert hang.evidence["hung"] == [1]
    assert hang.resolved is not None
    assert note.severity == "warning"
    assert "stacks saved" in output
    wait_until_nothing_is_left(run)


SYNC_SECONDS = 4
SLOW = """
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void wait_for_disk(int fd) {
    char link[64], path[4096] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (!access(__FILE__, F_OK) && readlink(link, path, sizeof path - 1) > 0 && strstr(path, "recording.sqlite"))
        sleep(SECONDS);
}
int fsync(int fd) { wait_for_disk(fd); return syscall(SYS_fsync, fd); }
int fdatasync(int fd) { wait_for_disk(fd); return syscall(SYS_fdatasync, fd); }
"""
"""Source of a library that delays each write of the recording, as a busy disk does, for as long as this file exists."""


def slow_disk(folder: Path) -> str:
    """Return the value of ``LD_PRELOAD`` that makes the recording's disk slow, where there is a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    before = os.environ.get("LD_PRELOAD", "")
    if compiler is None:
        return before
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(SLOW.replace("SECONDS", str(SYNC_SECONDS)))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return f"{library} {before}".strip()


def test_stop_interrupts_the_ranks_so_that_they_can_end_by_themselves_in_time_though_the_disk_is_slow(home, tmp_path):
    home.environ["LD_PRELOAD"] = slow_disk(tmp_path)
    done = home.run("run", "--on-hang", "stop", "--hang-grace", "1", "--", *job(tmp_path), seconds=500)
    assert done.returncode == HANG, done.stdout + done.stderr
    (tmp_path / "slow.c").unlink(missing_ok=True)  # what follows needs no slow disk
    assert "interrupted: the script puts its affairs in order" in done.stdout
    run = home.newest()
    end = run.read_exit()
    assert (end.state, end.cause) == ("failed", "hang")
    assert "--on-hang stop" in end.text
    assert "(exit code" not in done.stdout, "the status is ftmon's own"
    began = float(re.findall(r"away since ([0-9.]+)", done.stdout)[0])
    with Reader(run.recording) as reader:
        (hang,) = [alert for alert in reader.alerts() if alert.kind == "hang"]
        assert reader.info().missing == ""
        states = [frame.message for frame in reader.frames(0, 100_000) if isinstance(frame.message, RankState)]
    assert hang.evidence["hung"] == [1]
    # Where the hub waited for the disk in its main loop, it saw the ranks every 4 s only, and told too late.
    assert hang.time - began < 30
    assert not [state for state in states if state.signal == signal.SIGKILL], "nobody had to be killed a minute later"
    (saved,) = [path.read_text() for path in (run.path / "stacks").iterdir()]
    assert WHERE in saved
    wait_until_nothing_is_left(run)
