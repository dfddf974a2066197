"""Recorded scenes for tests of the screens: streams of known figures, one in which a rank hangs; and how to wait."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from eventually import SECONDS, eventually
from ftmon.protocol.messages.control import Alert, RankState
from ftmon.protocol.messages.telemetry import Stacks
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.tui.source.load import TAIL_FRAMES
from ftmon.tui.source.replay import ReplaySource
from ftmon.tui.widgets.base import Canvas
from streams import Stream, write

HANG_SECONDS = 34.0
COLLECTIVE = "all_gather_into_tensor"
_SITE = "/usr/lib/python3.11/site-packages"
STACKS = f"""Thread 0x00007f5a3c2d1700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/queue.py", line 180 in get

Thread 0x00007f5a41b0a740 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 930 in wait
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 256 in poll
  File "{_SITE}/torch/utils/data/dataloader.py", line 1251 in _try_get_data
  File "{_SITE}/torch/utils/data/dataloader.py", line 1410 in _get_data
  File "{_SITE}/torch/utils/data/dataloader.py", line 732 in __next__
  File "/home/user/train.py", line 41 in main
  File "/home/user/train.py", line 77 in <module>
"""
WAITS = f"""Thread 0x00007f5a41b0a740 (most recent call first):
  File "{_SITE}/torch/distributed/distributed_c10d.py", line 3843 in all_gather_into_tensor
  File "{_SITE}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "{_SITE}/deepspeed/comm/torch.py", line 218 in all_gather_into_tensor
  File "{_SITE}/deepspeed/comm/comm.py", line 117 in log_wrapper
  File "{_SITE}/deepspeed/runtime/zero/stage3.py", line 582 in fetch
  File "/home/user/train.py", line 44 in main
  File "/home/user/train.py", line 77 in <module>
"""


def recorded(path: Path, ranks: int, steps: int = 60, **options: Any) -> Path:
    return write(path, Stream(ranks=ranks, steps=steps, finished=False, **options).frames())


def hanging(path: Path) -> Path:
    """Record a stream of four ranks at whose end the last one hangs and the others wait for it."""
    ranks, hung = 4, 3
    frames = list(Stream(ranks=ranks, steps=44, finished=False).frames())
    t = frames[-1].t + HANG_SECONDS
    since = frames[-1].t
    states: list[Message] = [RankState(r, "waiting", t, f"in {COLLECTIVE} #8841", since, 4000 + r) for r in range(hung)]
    states.append(RankState(hung, "hung", t, f"not in {COLLECTIVE} #8841, in data loading", since, 4000 + hung))
    stacks = [Stacks(r, t, STACKS if r == hung else WAITS, "hang", taken_by="probe") for r in range(ranks)]
    title = f"rank {hung} has not entered {COLLECTIVE} #8841; {ranks - 1} ranks wait"
    text = "Rank 3 is still loading its batch. Look at its stacks: a worker of its data loader may be stuck."
    evidence = {"waiting_s": HANG_SECONDS, "collective": COLLECTIVE, "number": 8841, "longest_before_ms": 12.5}
    alert = Alert(900, "hang", "error", t, title, rank=hung, step=45, phase="data", text=text, evidence=evidence)
    found = enumerate([*states, *stacks, alert], frames[-1].seq + 1)
    return write(path, [*frames, *(Frame(seq, t, message) for seq, message in found)])


class ReadyReplay(ReplaySource):
    """A replay whose first state and marks are in before anything is painted, however slow the machine."""

    def start(self) -> None:
        """Begin to read, and take what comes first."""
        super().start()
        eventually(self._complete, "the recording's state and marks", each=self.pump, every=0.002)

    def _complete(self) -> bool:
        playback = self._playback
        if not self.model.last_seq or (len(self.model.alerts) and not self.transport.marks):
            return False
        if self.model.last_seq <= TAIL_FRAMES:
            return True
        # Of a longer recording the older part comes later, and changes rates and charts.
        return playback._overview is not None and not playback._updates and playback._showing is None


async def until(pilot: Any, condition: Callable[[], Any], what: str = "it", seconds: float = SECONDS) -> Any:
    """Let the app run until ``condition`` is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            shown = "\n".join(child.plain for child in pilot.app.screen.children if isinstance(child, Canvas))
            raise AssertionError(f"{what} did not happen in {seconds} s; {pilot.app.screen} shows:\n{shown}")
        await pilot.pause(0.02)
    return value


async def settled(pilot: Any) -> None:
    """Wait until a replay stands where it was asked to, and the screen shows it."""
    app = pilot.app
    transport = app.app_state.source.transport
    await until(pilot, lambda: app.app_state.model.last_seq and not transport.seeking, "the replay's state")
    await pilot.pause(0.1)
    app.pump()
    await pilot.pause(0.1)


SMALL, LARGE = (80, 24), (200, 60)


class Picture(NamedTuple):
    """A row of a module's ``PICTURES``: what its fixture ``shows`` gets after the size, in each of the sizes."""

    how: tuple[str, ...]
    options: dict[str, Any]
    sizes: tuple[tuple[int, int], ...]


def picture(*how: str, sizes: tuple[tuple[int, int], ...] = (SMALL,), **options: Any) -> Picture:
    return Picture(how, options, sizes)


def both(*how: str) -> Picture:
    return picture(*how, sizes=(SMALL, LARGE))
