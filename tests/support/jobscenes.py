"""A recorded driver script: a job that finished, one out of memory, one with a wrong configuration, one that trains."""

from collections.abc import Iterator
from pathlib import Path

from ftmon.protocol.messages.control import RankState
from ftmon.protocol.messages.telemetry import Failure, Goodbye, Hello, Step
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.trainer.hub.jobs import JobTable
from ftmon.trainer.hub.ranks import identity_of
from msgspec import structs
from streams import STARTED, Stream, write

LENGTHS = (24, 5, 0, 12)  # steps of each job
RATES = ("2e-5", "2e-5", "1e-4", "1e-4")
BATCHES = ("4", "8", "4", "4")
MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 139.80 GiB of "
    "which 3.25 GiB is free. Including non-PyTorch memory, this process has 136.55 GiB memory in use."
)
NO_DATA = "FileNotFoundError: no dataset at data/guanaco-1e-4.jsonl"


def driven(path: Path) -> Path:
    """Record the driver script, its jobs counted by the hub's own table; the last one trains at the end."""
    table = JobTable(lambda hello: False)
    frames: list[Frame] = []
    t = STARTED
    for number in range(1, len(LENGTHS) + 1):
        began = t + 9
        for t, message in _job(number, 2, began):
            frames += [Frame(0, t, told) for told in _counted(table, message, t)]
        frames += [Frame(0, t, told) for told in table.poll(t)]
    frames.append(Frame(0, t, table.describe(table.jobs[len(LENGTHS)], t)))
    return write(path, [structs.replace(frame, seq=seq) for seq, frame in enumerate(frames, 1)])


def _counted(table: JobTable, message: Message, t: float) -> Iterator[Message]:
    if isinstance(message, Hello):
        job, is_new = table.hello(message, t)
        if is_new and job.shown:
            yield table.describe(job, t)
    elif isinstance(message, RankState):
        table.state(message)
    elif isinstance(message, Step | Goodbye | Failure):
        sender = identity_of(table.shown.ranks[message.rank].hello)
        if isinstance(message, Step):
            table.step(sender, message)
        else:
            table.add(sender, message)
    yield message


def _job(number: int, ranks: int, started: float) -> Iterator[tuple[float, Message]]:
    steps, pids = LENGTHS[number - 1], 4000 + 100 * number
    over = number < len(LENGTHS)
    words = ["train.py", "llama3.yaml", "--lr", RATES[number - 1], "--batch", BATCHES[number - 1]]
    stream = Stream(ranks=ranks, steps=steps, seed=number, started=started, spike_every=0, finished=False)
    t = started
    for frame in stream.frames():
        t, message = frame.t, frame.message
        if isinstance(message, Hello):
            launch = f"{pids - 1}-900000"
            message = structs.replace(message, pid=pids + message.rank, argv=words, launch=launch)
        elif isinstance(message, RankState):
            if not steps and message.state == "training":
                continue
            message = structs.replace(message, pid=pids + message.rank)
        yield t, message
    if not over:
        return
    error = {2: MEMORY, 3: NO_DATA}.get(number, "")
    t += 0.4
    if error:
        first = 1 if error == MEMORY else 0
        yield t, Failure(rank=first, step=steps + 1, phase="forward", time=t, error=error)
    for rank in range(ranks):
        if not error:
            yield t, Goodbye(rank=rank, time=t, step=steps, reason="finished")
            yield t, RankState(rank=rank, state="finished", time=t, pid=pids + rank, exit_code=0)
            continue
        own = rank == (1 if error == MEMORY else 0)
        ending = {"exit_code": 1} if own else {"signal": 15}
        text = f"failed: {error} (exit code 1)" if own else "killed by SIGTERM"
        yield t, RankState(rank=rank, state="gone", time=t, text=text, pid=pids + rank, **ending)
