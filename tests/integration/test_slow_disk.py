"""A disk that takes seconds to make a write of the recording last, as one does that others keep busy."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.end import HANG
from ftmon_process import ftmon_home, wait_until_nothing_is_left
from sleeping_loader import job

SYNC_SECONDS = 6
SLOW = """
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void wait_for_disk(int fd) {
    char link[64], path[4096] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "recording.sqlite"))
        sleep(SECONDS);
}
int fsync(int fd) { wait_for_disk(fd); return syscall(SYS_fsync, fd); }
int fdatasync(int fd) { wait_for_disk(fd); return syscall(SYS_fdatasync, fd); }
"""
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture
def slow_disk(tmp_path: Path) -> Path:
    """Give a library that makes its process wait for its disk."""
    if COMPILER is None:
        pytest.skip("needs a C compiler, to make a disk slow")
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW.replace("SECONDS", str(SYNC_SECONDS)))
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_a_hung_rank_is_named_and_killed_in_time_though_the_disk_is_slow(slow_disk: Path, tmp_path: Path) -> None:
    preload = f"{slow_disk} {os.environ.get('LD_PRELOAD', '')}".strip()
    with ftmon_home(tmp_path / "home", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", LD_PRELOAD=preload) as ftmon:
        done = ftmon.run("run", "--on-hang", "kill", "--hang-grace", "1", "--", *job(tmp_path, 600), seconds=500)
        assert done.returncode == HANG, done.stdout + done.stderr
        run = ftmon.newest()
        began = float(re.findall(r"away since ([0-9.]+)", done.stdout)[0])
        with Reader(run.recording) as reader:
            (hang,) = [alert for alert in reader.alerts() if alert.kind == "hang"]
            assert reader.info().missing == ""
        assert hang.evidence["hung"] == [1]
        # Where the hub waited for the disk in its main loop, it saw the ranks every 6 s only, and told after 87 s.
        assert hang.time - began < 30
        wait_until_nothing_is_left(run)
