"""Frees a name in the console of a held frame, in a process of its own; prints whether its tensor is given up."""

import sys
import threading
import time
import weakref
from queue import Queue
from typing import Any

import torch
from ftmon.protocol.run.rundir import RunOptions
from ftmon.trainer.probe.oom.console import Hold
from ftmon.trainer.probe.oom.report import frames_to


def work(_world: Any, _jobs: list[str]) -> None:
    hold = Hold(RunOptions(on_oom="hold", allow_console=True))
    seen: list[Any] = []

    def train() -> None:
        batch = torch.zeros(256, 1024)
        seen.append(weakref.ref(batch))
        allocate(batch)

    def allocate(batch: Any) -> None:
        hold.wait(frames_to(sys._getframe()), 1024, torch.device("cpu"))

    thread = threading.Thread(target=train)
    thread.start()
    while not hold.since:
        time.sleep(0.005)
    answers: Queue[Any] = Queue()
    hold.run("free('batch')", lambda ok, text, data: answers.put(data))
    while answers.empty():
        hold.tick()
        time.sleep(0.005)
    print(answers.get()["output"].strip(), seen[0]() is None, flush=True)
    hold.release()
    thread.join()
