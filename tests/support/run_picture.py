"""What a run was doing when a test gave up on it: for the message of the failure, and so for a log of CI."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ftmon.protocol.host.process import is_alive
from ftmon.protocol.messages.control import RankState, RunState
from ftmon.protocol.messages.telemetry import Goodbye, Heartbeat, LogLine, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host import processes

LINES = 12  # lines of each log file


def picture(run: RunDir) -> str:
    """Describe the run: how it ended, its processes, each rank's last words, alerts, and the end of each log."""
    parts: list[str] = []
    for part in (_ends, _processes, _recorded, _logs):
        try:
            parts += part(run)
        except Exception as error:  # what can be told of it counts, not what cannot
            parts.append(f"{part.__name__}: {error!r}")
    return "\n".join(f"    {line}" for line in [f"{run.path} at {time.time():.1f}:", *parts])


@contextlib.contextmanager
def pictured(run: RunDir | Callable[[], RunDir | None]) -> Iterator[None]:
    """Add the picture of the run to whatever assertion fails inside, taken at that moment."""
    try:
        yield
    except AssertionError as error:
        found = run if isinstance(run, RunDir) else run()
        if found is not None:
            error.add_note(picture(found))
        raise


def _ends(run: RunDir) -> Iterator[str]:
    yield f"exit: {run.read_exit()}"
    launcher, hub = run.read_run().launcher, run.read_hub()
    yield f"launcher: {launcher}, alive: {launcher is not None and is_alive(launcher)}"
    yield f"hub: {hub and hub.process}, alive: {hub is not None and is_alive(hub.process)}"


def _processes(run: RunDir) -> Iterator[str]:
    for process in processes.of_run(run.path, [], []):
        wait = ""
        with contextlib.suppress(OSError):
            wait = Path(f"/proc/{process.pid}/wchan").read_text()
        yield f"process {process.pid} {process.state} {wait} {process.name}"


def _recorded(run: RunDir) -> Iterator[str]:
    last: dict[object, str] = {}
    with Reader(run.recording) as reader:
        seq = 0
        while frames := reader.frames(seq, 5_000):
            seq = frames[-1].seq
            for frame in frames:
                message = frame.message
                if isinstance(message, RunState):
                    last["run"] = f"{frame.t:.1f} {message}"
                elif isinstance(message, RankState | Step | Heartbeat | Goodbye):
                    last[type(message), message.rank] = f"{frame.t:.1f} {str(message)[:300]}"
                elif isinstance(message, LogLine):
                    last["log", message.rank] = f"{frame.t:.1f} {str(message)[:300]}"
        yield from (text for _, text in sorted(last.items(), key=lambda item: str(item[0])))
        for alert in reader.alerts():
            yield f"alert {alert.time:.1f} {alert.kind} {alert.severity} {alert.title!r} {str(alert.evidence)[:600]}"


def _logs(run: RunDir) -> Iterator[str]:
    for path in sorted(run.logs.glob("*")):
        if path.suffix in (".log", ".err", ".out") and (lines := path.read_text(errors="replace").splitlines()):
            yield f"{path.name}:"
            yield from (f"  {line[:300]}" for line in lines[-LINES:])
