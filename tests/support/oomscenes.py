"""Recorded out-of-memory errors for tests of the screens: one rank is held in a backward pass, three others wait."""

import shutil
from pathlib import Path
from typing import Any

from failed_allocations import HELD
from ftmon.protocol.analysis.oom.detector import OomContext
from ftmon.protocol.analysis.oom.words import explain
from ftmon.protocol.analysis.remedies import remedies
from ftmon.protocol.messages.control import Accepted, Alert, RankState, Result, Verb
from ftmon.protocol.messages.memory import OomReport, RankMoment
from ftmon.protocol.messages.telemetry import Oom
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.model import RunModel
from ftmon.tui.model.oom import CommandRecord
from ftmon.tui.source.base import Connection, Transport
from msgspec import structs
from streams import GIB, Stream, write

SNAPSHOT = Path(__file__).parents[1] / "data" / "oom_backward.pickle.gz"
NAME = "snapshots/rank-1-step-45-oom.pickle"
HELD_SECONDS = 134.0
TENSORS = """\
   61.00 GiB  bfloat16  4 x 4736 x 14336 x 32   hidden      model.py:88 forward
    9.06 GiB  float32   4 x 4736 x 128256       logits      loss_utils.py:59 ForCausalLMLoss
    2.26 GiB  bfloat16  1235814400              flat_params stage2.py:310
"""
"""What a rank's ``tensors(3)`` may print."""


def oom_of(rank: int = 1, t: float = 0.0, *, held: bool = True, console: bool = True) -> Oom:
    """Make an error as a rank of a 1B model under ZeRO-2 reports it, at ``t``."""
    return structs.replace(HELD, rank=rank, time=t, held=held, console=console)


def messages(t: float, *, held: bool = True, console: bool = True) -> list[Message]:
    """Make what a hub publishes when rank 1 runs out of memory at ``t``."""
    oom = oom_of(t=t, held=held, console=console)
    verdict = explain(oom, OomContext())
    waits: dict[str, Any] = {"batch_shape": [4, 2048], "collective": "reduce_scatter_tensor"}
    moments = [RankMoment(r, "waiting", 45, "backward", 2, (61 + r) * GIB, 70 * GIB, **waits) for r in range(4)]
    moments[1] = RankMoment(1, "held", 45, "forward", 2, oom.allocated_bytes, oom.reserved_bytes, batch_shape=[4, 4736])
    report = OomReport(1, 45, oom.phase, t, oom, verdict, remedies(oom, verdict, OomContext()), moments)
    states: list[Message] = [RankState(rank, "waiting", t, "", t, 4000 + rank) for rank in range(4)]
    states[1] = RankState(1, "held" if held else "waiting", t, "out of memory", t, 4001)
    title = f"rank 1 out of memory: {verdict.title}"
    alert = Alert(901, "oom", "error", t, title, rank=1, step=45, phase=oom.phase, text=verdict.text)
    return [oom, *states, report, alert]


def out_of_memory(folder: Path, *, console: bool = True) -> Path:
    """Record a run whose rank 1 runs out of memory at its end, with the snapshot of a real error beside it."""
    frames = list(Stream(ranks=4, steps=44, finished=False).frames())
    t, begun = frames[-1].t + 0.4, frames[-1].seq
    told = [Frame(begun + 1 + index, t, one) for index, one in enumerate(messages(t, console=console))]
    later = Frame(begun + 1 + len(told), t + HELD_SECONDS, RankState(0, "waiting", t + HELD_SECONDS, "", t, 4000))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recording.sqlite"
    write(path, [*frames, *told, later])
    (folder / "snapshots").mkdir(exist_ok=True)
    shutil.copy(SNAPSHOT, folder / NAME)
    return path


class HeldRun:
    """A live run as a source, without a hub: rank 1 is held, commands are kept for the test to answer."""

    def __init__(self, folder: Path, *, console: bool = True, can_command: bool = True) -> None:
        self.path = out_of_memory(folder, console=console)
        reader = Reader(self.path)
        self.frames = reader.frames(0, 100_000)
        reader.close()
        self.model = RunModel()
        self.model.info.name = self.model.info.id = "llama3-guanaco"
        self.transport = Transport("live", lambda request: None)
        self.transport.playing = True
        self.connection = Connection("live")
        self.commands: dict[str, CommandRecord] = {}
        self.folder: Path | None = folder
        self.can_command = can_command

    def start(self) -> None:
        """Nothing runs."""

    def pump(self, budget_s: float = 0.05) -> bool:
        """Fold everything at once."""
        del budget_s
        frames, self.frames = self.frames, []
        for frame in frames:
            self.model.apply(frame)
        return bool(frames)

    def send(self, verb: Verb) -> str:
        """Keep a command."""
        number = str(len(self.commands))
        self.commands[number] = CommandRecord(number, verb, self.model.now)
        return number

    def answer(self, number: str, output: str = "", error: str = "", **data: Any) -> None:
        """Answer a console's command as the hub does."""
        record = self.commands[number]
        record.accepted = Accepted(number, True)
        record.result = Result(number, True, record.verb.name, "", {"output": output, "error": error, **data})

    def close(self) -> None:
        """Nothing is open."""
