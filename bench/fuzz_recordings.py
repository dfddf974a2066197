"""Damaged and hostile recordings against every command that opens one, and the app's source and screens.

``python bench/fuzz_recordings.py [--count 10000] [--seed 1] [--processes 2] [--recording FILE] [--seconds 600]``

Each number makes one corruption of a small whole recording (the same for the same seed): flipped bytes, files cut
short, shifted, swapped, repeated and zeroed pages, pages that lead back to themselves, hostile values and types in
every column, schemas with views, triggers, generated columns and virtual tables. On each the commands run in the
worker's process: ``ls``, ``status``, ``logs``, ``memory``, ``events``, ``oom``, ``stacks``, ``replay --plain``, then
the app's source through a load and two seeks, and for every ``--app``-th file the app itself, headless. Right is:
status 0 to 2, at most one line on standard error, nothing that a terminal would obey, at most 5 s of processor time
(SIGPROF ends a worker beyond) and 1 GiB of address space above what the worker began with (RLIMIT_AS).
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from recording_corruptions import corrupt

SECONDS = 5.0
MEMORY = 2**30
COMMANDS = (
    ["ls", "{}"], ["status", "{}"], ["logs", "{}"], ["memory", "{}"], ["events", "{}"], ["oom", "{}"],
    ["stacks", "{}"], ["replay", "--plain", "{}"], ["status", "--json", "{}"],
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0, help="end after so long with what was done; 0: never")
    parser.add_argument("--app", type=int, default=50, help="every so many files open in the app too; 0: none")
    parser.add_argument("--recording", default="", help="a whole recording to corrupt (default: a made one)")
    parser.add_argument("--keep", default="", help="keep the files that failed there")
    parser.add_argument("--json", default="", help="write the figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        first, last = map(int, args.worker.split("-"))
        Worker(args).run(first, last)
        return 0
    with tempfile.TemporaryDirectory(prefix="ftmon-fuzz-") as folder:
        if not args.recording:
            args.recording = str(Path(folder) / "whole.sqlite")
            make_recording(Path(args.recording))
        return supervise(args, Path(folder))


def make_recording(path: Path) -> None:
    """Write a recording that has every kind of message, as a hub would."""
    from ftmon.protocol.recording.writer import Writer
    from messages import EXAMPLES
    from streams import RUN, STARTED, Stream

    frames = list(Stream(ranks=2, steps=40).frames())
    writer = Writer(path, RUN)
    for frame in frames[:-3]:
        writer.append(frame.seq, frame.t, frame.message)
    seq, t = frames[-4].seq, frames[-4].t
    for number, message in enumerate(EXAMPLES, 1):
        if type(message).__name__ not in ("Command", "Query", "Answer", "Accepted", "Result"):
            writer.append(seq + number, max(t, STARTED), message)
    writer.close()


def supervise(args: argparse.Namespace, folder: Path) -> int:
    """Keep workers going over all numbers; a worker that dies costs the number it was at."""
    begun = time.monotonic()
    step = max(1, -(-args.count // args.processes))
    ends = args.first + args.count
    spans = [(first, min(first + step, ends)) for first in range(args.first, ends, step)]
    workers = [_Spawned(args, folder / f"{first}.out", first, last) for first, last in spans]
    while sum(worker.look() for worker in workers):
        time.sleep(0.5)
        if args.seconds and time.monotonic() - begun > args.seconds:
            for worker in workers:
                worker.stop()
            break
    rows = [row for worker in workers for row in worker.rows]
    return report(args, rows, time.monotonic() - begun)


class _Spawned:
    """One worker process after another over a span of numbers."""

    def __init__(self, args: argparse.Namespace, out: Path, first: int, last: int) -> None:
        self._args, self._out, self._next, self._last = args, out, first, last
        self.rows: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None

    def look(self) -> bool:
        """Take what the worker has written; start another where it died. False when all is done."""
        if self._process is None:
            if self._next >= self._last:
                return False
            self._out.write_bytes(b"")
            span = f"{self._next}-{self._last}"
            words = [sys.executable, str(Path(__file__).resolve()), "--worker", span, "--seed", str(self._args.seed)]
            words += ["--recording", self._args.recording, "--app", str(self._args.app), "--keep", self._args.keep]
            with self._out.open("wb") as out:
                self._process = subprocess.Popen(words, stdout=out)
            return True
        if self._process.poll() is None:
            return True
        self._take()
        self._process = None
        return True

    def stop(self) -> None:
        """End the worker, and keep what it has done."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._take(stopped=True)

    def _take(self, *, stopped: bool = False) -> None:
        assert self._process is not None
        at = ""
        for line in self._out.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if "at" in row:
                    at = row["at"]
                    continue
                self.rows.append(row)
                self._next = row["number"] + 1
                at = ""
        if not stopped and (self._process.returncode or (at and self._next < self._last)):
            why = f"{at}: the worker ended with {self._process.returncode}"
            self.rows.append({"number": self._next, "kind": at, "failures": [why], "seconds": SECONDS, "mb": 0})
            self._next += 1


def report(args: argparse.Namespace, rows: list[dict[str, Any]], seconds: float) -> int:
    failed = [row for row in rows if row["failures"]]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"].split(" ")[0], []).append(row)
    print("| corruption | files | opened | refused in one line | wrong | slowest command | most memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind, some in sorted(kinds.items()):
        opened = sum(row.get("opened", False) for row in some)
        wrong = sum(bool(row["failures"]) for row in some)
        refused = sum(not row.get("opened", False) and not row["failures"] for row in some)
        print(
            f"| {kind} | {len(some):,} | {opened:,} | {refused:,} | {wrong:,} "
            f"| {max(row['seconds'] for row in some):.2f} s | {max(row['mb'] for row in some):.0f} MB |"
        )
    slowest = max((row["seconds"] for row in rows), default=0.0)
    print(
        f"{len(rows):,} files in {seconds:.0f} s, {len(failed):,} wrong; slowest command {slowest:.2f} s of processor"
    )
    words = Counter(failure for row in failed for failure in row["failures"])
    for failure, count in words.most_common(40):
        numbers = [row["number"] for row in failed if failure in row["failures"]][:5]
        print(f"  {count:>5}  {failure}  (numbers {', '.join(map(str, numbers))})")
    if args.json:
        Path(args.json).write_text(json.dumps({"seconds": seconds, "rows": rows}, indent=1))
    return 1 if failed or len(rows) < args.count else 0


class Worker:
    """Corrupts, opens, judges."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._whole = Path(args.recording).read_bytes()
        self._folder = Path(tempfile.mkdtemp(prefix="ftmon-fuzz-worker-"))
        os.environ["FTMON_HOME"] = str(self._folder / "home")
        os.environ["TMPDIR"] = str(self._folder)
        orders, self._orders = os.pipe()
        answers, made = os.pipe()
        # Before there are threads: a process forked off beside them may wait for a lock of theirs for ever.
        if os.fork() == 0:
            os.close(self._orders)
            self._make(orders, made)
            os._exit(0)
        os.close(orders)
        os.close(made)
        self._answers = os.fdopen(answers)

    def run(self, first: int, last: int) -> None:
        from ftmon.tui.app import FtmonApp  # what it takes is not counted
        from ftmon.tui.cli import main as command_line

        del FtmonApp
        parser = command_line.build_parser()  # takes longer than most commands
        command_line.build_parser = lambda: parser
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address_space + MEMORY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            for number in range(first, last):
                self._one(number)
        finally:
            import shutil

            shutil.rmtree(self._folder, ignore_errors=True)

    def _one(self, number: int) -> None:
        path = self._folder / "recording.sqlite"
        for old in self._folder.glob("recording.sqlite*"):
            old.unlink()
        kind = self._corrupted(path, number)
        print(json.dumps({"at": kind}), flush=True)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is this file's from here on
        self._failures: list[str] = []
        self._slowest = 0.0
        opened = [self._guarded(words[0], lambda words=words: self._command(words, path)) for words in COMMANDS]
        self._guarded("source", lambda: self._source(path))
        if self._args.app and number % self._args.app == 0:
            self._guarded("app", lambda: asyncio.run(in_app(path)))
        if self._failures and self._args.keep:
            Path(self._args.keep).mkdir(parents=True, exist_ok=True)
            (Path(self._args.keep) / f"{number}.sqlite").write_bytes(path.read_bytes())
        most = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3
        row = {"number": number, "kind": kind, "failures": self._failures, "seconds": round(self._slowest, 3)}
        print(json.dumps({**row, "opened": opened[1] == 0, "mb": round(most, 1)}), flush=True)

    def _corrupted(self, path: Path, number: int) -> str:
        """Have the file made in the other process: some statements that make it take what they are to cost."""
        os.write(self._orders, f"{number} {path}\n".encode())
        return self._answers.readline().rstrip() or "nothing"

    def _make(self, orders: int, answers: int) -> None:
        """Make files as they are ordered, until nobody orders any more."""
        with os.fdopen(orders) as lines:
            for line in lines:
                number, path = line.rstrip().split(" ", 1)
                chance = random.Random(self._args.seed * 1_000_003 + int(number))
                try:
                    kind = corrupt(self._whole, Path(path), chance)
                except MemoryError:
                    kind = "memory"
                os.write(answers, (" ".join(kind.split())[:1000] + "\n").encode("utf-8", "replace"))

    def _guarded(self, name: str, act: Callable[[], int]) -> int:
        print(json.dumps({"at": f"{name} "}), flush=True)
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            return act()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            self._failures.append(f"{name}: {type(error).__name__} at {place}: {str(error)[:100]}")
            return -1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._slowest = max(self._slowest, time.process_time() - begun)

    def _command(self, words: list[str], path: Path) -> int:
        from ftmon.tui.cli.main import main as ftmon
        from hostile import TRACES

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = ftmon([word.format(path) for word in words])
        printed = f"{out.getvalue()}{err.getvalue()}".encode("utf-8", "surrogatepass")
        if status not in (0, 1, 2):
            self._failures.append(f"{words[0]}: status {status}")
        if err.getvalue().count("\n") > 1:
            self._failures.append(f"{words[0]}: {err.getvalue().count(chr(10))} lines of error")
        if status and not err.getvalue() and not out.getvalue():
            self._failures.append(f"{words[0]}: status {status} without a word")
        if any(trace in printed for trace in TRACES) or b"Traceback" in printed:
            self._failures.append(f"{words[0]}: printed what a terminal would obey, or a traceback")
        return status

    def _source(self, path: Path) -> int:
        from ftmon.protocol.errors import FtmonError
        from ftmon.tui.source.replay import ReplaySource

        try:
            source = ReplaySource(path)
        except FtmonError:
            return 1
        source.start()
        try:
            transport = source.transport
            settle(source)
            for share in (1.0, 0.4):
                transport.goto(f"{share:.2%}")
                settle(source)
            if "cannot be played" in source.connection.text:
                self._failures.append(f"source: {source.connection.text[:120]}")
        finally:
            source.close()
        return 0


def settle(source: Any) -> None:
    """Pump until the source has done what was asked of it, for at most 3 s of processor time."""
    begun = time.process_time()
    idle = 0
    while time.process_time() - begun < 3 and idle < 4:
        changed = source.pump(0.05)
        idle = 0 if changed or (source.transport.seeking and not source.connection.text) else idle + 1
        time.sleep(0.002)


async def in_app(path: Path) -> int:
    """Open a recording in the real app, headless, and walk through its screens."""
    from ftmon.protocol.errors import FtmonError
    from ftmon.tui.app import FtmonApp
    from ftmon.tui.source.replay import ReplaySource

    try:
        source = ReplaySource(path)
    except FtmonError:
        return 1
    app = FtmonApp(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.1)
        for key in (
            "enter",
            "escape",
            "a",
            "escape",
            "l",
            "escape",
            "m",
            "escape",
            "e",
            "escape",
            "o",
            "escape",
            "end",
        ):
            await pilot.press(key)
    source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
