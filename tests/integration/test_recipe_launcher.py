"""The launcher of the trainer's ranks: their environment, and how all of them end."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from eventually import eventually
from ftmon.trainer.recipe import launcher

RANK = """
    import json, os, signal, subprocess, sys, time
    from pathlib import Path
    folder, how = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    names += ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
    def leave(name, value):
        (folder / f"{name}-{rank}.new").write_text(json.dumps(value))
        os.replace(folder / f"{name}-{rank}.new", folder / f"{name}-{rank}")
    leave("environment", {name: os.environ.get(name) for name in names})
    if rank == 1 and how == "fails":
        sys.exit(3)
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and how == "last words":
        time.sleep(0.2)
        leave("words", "the same error")
    if how == "last words":
        sys.exit(2)
    if how != "ends":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        leave("pids", [os.getpid(), child.pid])
        time.sleep(600)
"""


def start(folder: Path, how: str, *options: str) -> "subprocess.Popen[bytes]":
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    words = launcher.command(2, options, 29500, [str(script), str(folder), how])
    return subprocess.Popen(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": "7,8,9"})


def pids(folder: Path) -> list[int]:
    return [pid for path in folder.glob("pids-?") for pid in json.loads(path.read_text())]


def test_ranks_have_the_environment_of_deepspeeds_launcher_and_their_gpus(tmp_path):
    assert start(tmp_path, "ends", "3", "GPU-aa").wait(60) == 0
    common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for rank in ("0", "1"):
        found = json.loads((tmp_path / f"environment-{rank}").read_text())
        own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "3,GPU-aa"}
        assert found == {**common, **own}


@pytest.mark.parametrize(("how", "status"), [("fails", 3), ("killed", 256 - signal.SIGKILL)])
def test_the_first_rank_that_fails_ends_the_others_with_all_that_they_started(tmp_path, how, status):
    assert start(tmp_path, how).wait(60) == status
    assert not [pid for pid in pids(tmp_path) if psutil.pid_exists(pid)]


def test_ranks_that_fail_together_report_it_before_they_are_ended(tmp_path):
    assert start(tmp_path, "last words").wait(60) == 2
    assert (tmp_path / "words-0").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_the_ranks(tmp_path, number):
    process = start(tmp_path, "stays")
    eventually(lambda: len(pids(tmp_path)) == 4, "both ranks", 60)
    process.send_signal(number)
    assert process.wait(60) == 1
    assert not [pid for pid in pids(tmp_path) if psutil.pid_exists(pid)]


def test_it_imports_no_torch():
    program = "import sys, ftmon.trainer.recipe.launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
