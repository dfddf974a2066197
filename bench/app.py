"""What the app costs while a run goes on: its share of a core, and the bytes it writes to the terminal.

    python bench/app.py [--ranks 8 64] [--seconds 20] [--size 80x24 200x60] [--demo] [--replay FILE]

The hub is the real process, the ranks are simulated (steps of half a second, a heartbeat at every phase, device
samples once a second), and the app is ``ftmon attach`` in a pseudo-terminal whose output is counted. CPU time is the
app's alone, from /proc. First paint is from the start of the app's process to the first rank on the screen; a bare
interpreter with Textual imported is measured beside it, since a slow machine makes both slow. With ``--replay`` only
the first paint of a recording is measured (``bench/make_recording.py`` makes a long one). With ``--demo`` the run is
``ftmon demo``, measured from its 30th step on; its processes share the cores with the app.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ftmon.protocol.link.sockets import peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Alert, HubStats, RankState, RunState
from ftmon.protocol.run import rundir
from streams import Stream

STEPS_BEFORE = 30
TICK = os.sysconf("SC_CLK_TCK")
FROM_THE_HUB = (Alert, HubStats, RankState, RunState)


def simulate(run_path: str, ranks: int, seconds: float) -> None:
    """Send a stream's messages as ranks would, each when it is due."""
    context = zmq.Context()
    address = rundir.RunDir(run_path).ipc_address("telemetry")
    senders = {}
    begun = time.time()
    for frame in Stream(
        ranks=ranks, steps=round(seconds / 0.5), heartbeats=True, started=begun, finished=False
    ).frames():
        message = frame.message
        if isinstance(message, FROM_THE_HUB):
            continue
        rank = getattr(message, "rank", 0)
        if rank not in senders:
            senders[rank] = [peer_socket(context, "telemetry"), 0]
            senders[rank][0].connect(address)
        while (wait := frame.t - time.time()) > 0.0005:
            time.sleep(wait)
        sender = senders[rank]
        sender[1] += 1
        sender[0].send_multipart(
            wire.encode(f"rank-{rank}-{4000 + rank}-{900_000 + rank}", sender[1], time.time(), message)
        )


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Attached:
    """The app in a pseudo-terminal; everything it writes is counted."""

    def __init__(self, words: list[str], columns: int, lines: int) -> None:
        self.begun = time.perf_counter()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
            code = f"from ftmon.tui.cli.main import main; main({words!r})"
            # The window is set by the child itself, so that the app never sees another size.
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            os.execve(sys.executable, [sys.executable, "-c", code], environment)
        self.written, self.tail = 0, b""

    def read_until(self, deadline: float, text: bytes | None = None) -> float | None:
        """Read until ``deadline``, or until ``text`` was written; return when that was, from the start."""
        seen = b""
        while (left := deadline - time.perf_counter()) > 0:
            if not select.select([self.fd], [], [], left)[0]:
                break
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                raise SystemExit(f"the app ended: {(seen or self.tail)[-2000:].decode(errors='replace')}") from None
            self.tail = (self.tail + data)[-4000:]
            self.written += len(data)
            if text is not None:
                seen = (seen + data)[-200_000:]
                if text in seen:
                    return time.perf_counter() - self.begun
        return None

    def close(self) -> None:
        """Leave as a person does, and make sure."""
        with contextlib.suppress(OSError, SystemExit):
            os.write(self.fd, b"q")
            self.read_until(time.perf_counter() + 3)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@contextlib.contextmanager
def simulated(ranks: int, seconds: float) -> Iterator[str]:
    """Yield the name of a run with a real hub and simulated ranks."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["FTMON_HOME"] = home
        run = rundir.create("bench", ["bench"], "watch")
        with (run.logs / "hub.log").open("wb") as log:
            hub = subprocess.Popen([sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)], stderr=log)
        while run.living_hub() is None:
            if hub.poll() is not None:
                raise SystemExit((run.logs / "hub.log").read_text())
            time.sleep(0.02)
        sender = get_context("spawn").Process(target=simulate, args=(str(run.path), ranks, seconds + 30), daemon=True)
        sender.start()
        time.sleep(6)
        try:
            yield run.id
        finally:
            sender.terminate()
            sender.join(10)
            hub.terminate()
            hub.wait(20)


@contextlib.contextmanager
def demo(ranks: int) -> Iterator[str]:
    """Yield the name of a demo that has done some steps."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["FTMON_HOME"] = home
        ftmon = [sys.executable, "-P", "-m", "ftmon.tui.cli"]
        subprocess.run(
            [*ftmon, "demo", "--ranks", str(ranks), "--steps", "100000", "--name", "demo", "--detach"], check=True
        )
        try:
            run = rundir.find("demo")
            while json.loads(subprocess.check_output([*ftmon, "status", run.id, "--json"]))["step"] < STEPS_BEFORE:
                time.sleep(1)
            yield run.id
        finally:
            subprocess.run([*ftmon, "kill", "demo", "--yes"], check=True)


def measure(run: str, columns: int, lines: int, seconds: float) -> tuple[float, float, float]:
    """Return the app's first paint (s), its share of a core (%), and KB a second to the terminal."""
    app = Attached(["attach", run], columns, lines)
    try:
        paint = app.read_until(time.perf_counter() + 20, b"peak")
        app.read_until(time.perf_counter() + 5)
        cpu, written, wall = cpu_seconds(app.pid), app.written, time.perf_counter()
        app.read_until(time.perf_counter() + seconds)
        wall = time.perf_counter() - wall
        share = 100 * (cpu_seconds(app.pid) - cpu) / wall
        rate = (app.written - written) / wall / 1000
    finally:
        app.close()
    return paint if paint is not None else float("nan"), share, rate


def replay_paint(recording: str, columns: int, lines: int, times: int = 7) -> list[float]:
    """Seconds from the start of a replay's process to the first rank on the screen, of several starts."""
    found: list[float] = []
    for _ in range(times):
        app = Attached(["replay", recording], columns, lines)
        try:
            found.append(app.read_until(time.perf_counter() + 20, b"peak") or float("nan"))
        finally:
            app.close()
    return found


def bare_start() -> float:
    """Seconds that the interpreter takes to start, import Textual, and end."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import textual.app"], check=True)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--size", nargs="+", default=["80x24", "200x60"])
    parser.add_argument("--replay", metavar="FILE", help="measure the first paint of this recording instead")
    parser.add_argument("--demo", action="store_true", help="measure beside ftmon demo instead of simulated ranks")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    print(f"bare interpreter with Textual imported: {bare_start():.2f} s\n")
    if arguments.replay:
        print("| replay, terminal | first paint, median | slowest |\n| --- | ---: | ---: |")
        for size in arguments.size:
            found = replay_paint(arguments.replay, *map(int, size.split("x")))
            print(f"| {size} | {statistics.median(found):.2f} s | {max(found):.2f} s |", flush=True)
        return
    print("| ranks | terminal | first paint | one core | KB/s to the terminal |")
    print("| ---: | --- | ---: | ---: | ---: |")
    for ranks in arguments.ranks:
        for size in arguments.size:
            with demo(ranks) if arguments.demo else simulated(ranks, arguments.seconds) as run:
                paint, share, rate = measure(run, *map(int, size.split("x")), arguments.seconds)
            print(f"| {ranks} | {size} | {paint:.2f} s | {share:.1f} % | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
