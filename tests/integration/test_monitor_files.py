"""The files of a run under attack: a full disk, a removed or moved directory. The training is untouched."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from eventually import eventually
from ftmon_process import follow_to_end

TESTS = Path(__file__).parents[1]
PRINTS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
while True:
    print("a line of output", flush=True)
    time.sleep(0.02)
"""
FULL = """
import json, os, signal, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2] + "/support")
disk, script = Path(sys.argv[1]), sys.argv[3]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], check=True)
from eventually import eventually
from ftmon_process import follow_to_end, ftmon_home
from ftmon.protocol.host.process import is_alive
found = {}
with ftmon_home(disk / "home") as ftmon:
    command = ftmon.start("run", "--plain", "--", sys.executable, "-c", script)
    next(line for line in command.stdout if "a line of output" in line)
    run = ftmon.newest()
    old = eventually(run.living_hub, "a hub").process
    with (disk / "filler").open("wb", buffering=0) as filler:
        def fill():
            try:
                while filler.write(bytes(512)):
                    pass
            except OSError:
                return
        fill()
        os.kill(old.pid, signal.SIGKILL)
        eventually(lambda: not is_alive(old), "the old hub gone")
        fill()
        new = eventually(run.living_hub, "another hub, though the disk is full", each=fill)
        found["new hub"] = new.process != old
        fill()
        command.send_signal(signal.SIGTERM)
        status, output, errors = follow_to_end(command)
        found["status"] = status
        end = run.read_exit()
        found["end"] = [end.state, end.exit_code, end.text]
print(json.dumps(found))
"""


def test_on_a_full_disk_the_hub_is_replaced_signals_are_passed_on_and_the_status_is_the_scripts(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: a small file system cannot be mounted")
    (tmp_path / "disk").mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL]
    done = subprocess.run(
        [*command, str(tmp_path / "disk"), str(TESTS), PRINTS], capture_output=True, text=True, timeout=400, check=False
    )
    if done.returncode and ("unshare:" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"new hub": True, "status": 5, "end": ["stopped", 5, "stopped by SIGTERM (exit code 5)"]}


def is_removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_without_its_directory_a_run_goes_on_gets_its_signals_and_gives_its_status(home, tmp_path, how):
    command = home.start("run", "--plain", "--", sys.executable, "-c", PRINTS)
    assert command.stdout is not None
    next(line for line in command.stdout if "a line of output" in line)
    run = home.newest()
    hub = eventually(run.living_hub, "a hub").process
    if how == "moved":
        os.rename(run.path, tmp_path / "elsewhere")
    else:
        eventually(lambda: is_removed(run.path), "the end of the directory, into which the run may still write")
    eventually(lambda: not os.path.exists(f"/proc/{hub.pid}"), "the hub's end, with nothing left to serve")
    assert command.poll() is None
    command.send_signal(signal.SIGTERM)
    status, output, errors = follow_to_end(command)
    assert status == 5, output + errors
    assert "Traceback" not in output + errors
