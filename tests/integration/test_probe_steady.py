"""A run's disk that is full must not raise at a script's ``print``."""

import os
import resource
import signal
import subprocess
import sys

import pytest
from ftmon.trainer.host.processes import INJECT_DIR

SCRIPT = """
import logging, sys
logging.basicConfig(stream=sys.stdout)
held = sys.stdout
for _ in range(100):
    print("x" * 100)
    logging.getLogger().error("y" * 100)
    sys.stderr.write("z" * 100 + "\\n")
sys.stdout.flush()
assert held is sys.stdout and sys.stdout.name == "<stdout>" and sys.stdout.fileno() == 1
sys.stdout.buffer.write(b"bytes")
(open(sys.argv[1], "w")).close()
"""
LIMIT = 4096


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("of_the_run", [True, False])
def test_what_the_runs_log_does_not_take_is_lost_and_the_script_goes_on(tmp_path, unbuffered, of_the_run):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / ("launcher.log" if of_the_run else "the-persons-own.log")
    environment = {**os.environ, "FTMON_RUN": str(tmp_path), "PYTHONPATH": str(INJECT_DIR)}
    # The limit would cut bytecode short, too, for every later process: Python does not look how much was written.
    environment |= {"PYTHONUNBUFFERED": unbuffered, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "done")]
    with log.open("ab") as out:
        done = subprocess.run(command, stdout=out, stderr=out, env=environment, preexec_fn=limit_files, check=False)
    assert log.stat().st_size == LIMIT
    assert (done.returncode == 0) is of_the_run
    assert (tmp_path / "done").exists() is of_the_run
