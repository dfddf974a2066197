"""SIGTERM asks a training that makes progress to end, and ends one that does not."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ftmon_process import ftmon_home, lines_with

STEPS_ON = """
import sys, time
from ftmon.trainer.recipe.termination import Termination
termination = Termination()
print("ready", flush=True)
while not termination.requested:
    time.sleep(0.01)
    termination.step()
termination.acknowledge()
termination.close()
print("saved", flush=True)
"""
STUCK = """
import ctypes
from ftmon.trainer.recipe.termination import Termination
termination = Termination()
print("ready", flush=True)
# As in a collective that the others never enter: no Python runs in the main thread.
libc = ctypes.CDLL(None)
while True:
    libc.sleep(1000)
"""
EVALUATES = """
import time
from ftmon.trainer.recipe import termination as module
module._LEAST_SECONDS = 0.5
termination = module.Termination()
termination.step()
with termination.busy():
    print("ready", flush=True)
    while not termination.requested:
        time.sleep(0.01)
    time.sleep(2)
termination.step()
termination.acknowledge()
termination.close()
print("saved", flush=True)
"""
WITH_WORKER = """
import os, signal, sys, time
from ftmon.trainer.recipe.termination import Termination
termination = Termination()
worker = os.fork()
if worker == 0:
    time.sleep(1000)
os.kill(worker, signal.SIGTERM)
_, status = os.waitpid(worker, 0)
assert os.WTERMSIG(status) == signal.SIGTERM
assert not termination.requested
print("ready", flush=True)
time.sleep(1000)
"""

STARTS = """
import ctypes, sys, threading, time
from ftmon.trainer.recipe import termination as module
module._LEAST_SECONDS = 0.5
module.Termination.start_up()
module.Termination.kept = "out/checkpoints/step-4"
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
def tell():
    while mutex.raw[0] != 2:  # glibc's sign of a thread that waits
        time.sleep(0.01)
    print("ready", flush=True)
try:
    BEFORE
    print("ready", flush=True)
    BODY
except module.StoppedEarlyError:
    module.say_early()
    sys.exit(143)
"""
EARLY = "stopped before the first step: no step is done, and nothing is lost; out/checkpoints/step-4 stays as it is\n"
STARTING = {
    "loads": ("pass", "time.sleep(1000)", 143, EARLY),
    "waits in C": ("threading.Thread(target=tell).start(); lock(mutex); lock(mutex)", "", -signal.SIGTERM, EARLY),
    "first step": ("module.Termination.of_steps()", "time.sleep(1000)", 143, EARLY),
    "second step": (
        "ending = module.Termination.of_steps(); ending.step()",
        "while not ending.requested: time.sleep(0.01)\n    ending.acknowledge(); print('saved', flush=True)",
        0,
        "saved\n",
    ),
}


def signalled(script: str) -> tuple[int, str]:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_a_training_that_makes_steps_or_evaluates_ends_by_itself_and_a_stuck_thread_or_worker_dies():
    assert signalled(STEPS_ON) == (0, "saved\n")
    assert signalled(EVALUATES) == (0, "saved\n")
    # glibc's sleep returns at the signal and is called again: still no step is made.
    status, output = signalled(STUCK)
    assert status == -signal.SIGTERM
    assert output == ""
    status, _ = signalled(WITH_WORKER)
    assert status == -signal.SIGTERM  # it made no step either


@pytest.mark.parametrize("stage", STARTING)
def test_before_the_first_step_is_done_a_rank_says_that_nothing_is_lost_and_ends(stage):
    before, body, status, output = STARTING[stage]
    assert signalled(STARTS.replace("BEFORE", before).replace("BODY", body)) == (status, output)


def test_a_trainer_asked_to_end_in_an_evaluation_says_at_once_when_it_acts_and_that_the_grace_is_too_short(tmp_path):
    script = Path(__file__).parent / "scripts" / "stopped_trainer.py"
    with ftmon_home(tmp_path / "home") as home:
        words = ("run", "--plain", "--stop-grace", "2", "--", sys.executable, str(script), str(tmp_path / "output"))
        done = home.run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    # The fourth evaluated row of 20, each of 0.2 s and more: 3.2 s are left of at least 4 s.
    title = r"stop requested at step 4: acts after the evaluation, about [3-9]\.\d s left, but the grace is 2 s"
    raised = next(line for line in done.stdout.splitlines() if re.search(title, line))
    saved = next(line for line in done.stdout.splitlines() if "evaluation at step 4" in line)
    assert done.stdout.index(raised) < done.stdout.index(saved)
    assert lines_with(done.stdout, ["over: stop requested at step 4"])
    assert list((tmp_path / "output").glob("checkpoint-*"))
