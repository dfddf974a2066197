"""Reads the run's log files as they grow: each rank's output and the launcher's.

- Returns whole lines; an unfinished line is returned after 2 s.
- Of a progress bar (text after carriage returns), only the last state is returned: at most every 5 s while it moves,
  and at its end. Several bars below each other count as one.
- A line is cut at 4,096 characters. If there are more than 200 lines per file and poll, the middle is omitted and
  counted; of more than 4 MiB, the beginning is skipped. A rank that prints a gigabyte must not stop the monitor.
- A file that shrank or was replaced is read from its beginning.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ...protocol.messages.telemetry import LogLine
from ...protocol.run.rundir import RunDir
from ...protocol.text import gib, sanitize

LINE_LIMIT = 4096
LINES_A_POLL = 200
LINES_IN_ALL = 4000
READ_LIMIT = 1 << 20
BACKLOG_LIMIT = 4 << 20
BACKLOG_KEPT = 256 << 10
PARTIAL_LIMIT = 64 << 10
PARTIAL_S = 2.0
BAR_S = 5.0
SCAN_S = 1.0
_SEARCHED = 1 << 20
_UP = b"\x1b[A"
_ROW_BELOW = re.compile(rb"(\n+)\r([^\n]*?)((?:\x1b\[A)+)")
"""One of several progress bars below each other (tqdm's ``position``): line feeds, its state, and cursor up."""
_RANK_LOG = re.compile(r"rank-(\d+)\.(out|err)\Z")
Stream = Literal["out", "err", "launcher"]


class _File:
    def __init__(self, path: Path, rank: int, stream: Stream, offset: int) -> None:
        self.path = path
        self.rank = rank
        self.stream: Stream = stream
        self.offset = offset
        self.inode = 0
        self.partial = b""
        self.bar = False  # Whether the unfinished line is the state of a progress bar
        self.skipping = False  # Whether the rest of a line that is too long is being skipped
        self.grew_at = 0.0
        self.bar_at = 0.0
        self.last_bar = ""

    def grow(self, now: float, quota: int) -> list[str]:
        """Read the added bytes; return at most ``quota`` lines, with a note of the number omitted."""
        try:
            info = os.stat(self.path)
        except OSError:
            return []
        if info.st_ino != self.inode:
            if self.inode:
                self._from_start()
            self.inode = info.st_ino
        elif info.st_size < self.offset:
            self._from_start()
        skipped = ""
        if info.st_size - self.offset > BACKLOG_LIMIT:
            skipped = f"... {gib(info.st_size - BACKLOG_KEPT - self.offset, 1)} of output skipped"
            self.offset = info.st_size - BACKLOG_KEPT
            self.partial, self.skipping = b"", True
        if info.st_size == self.offset:
            return self._waiting(now)
        data = self._read()
        self.grew_at = now
        return ([skipped] if skipped else []) + _thinned(self._split(data, now), quota)

    def take_unfinished(self) -> list[str]:
        text, self.partial = self._text(self.partial), b""
        return [text] if text and text != self.last_bar else []

    def _from_start(self) -> None:
        self.offset, self.partial, self.bar, self.skipping = 0, b"", False, False

    def _read(self) -> bytes:
        data = b""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(READ_LIMIT)
        self.offset += len(data)
        return data

    def _split(self, data: bytes, now: float) -> list[str]:
        text = self.partial + data
        if _UP in text:
            text = _ROW_BELOW.sub(_on_one_line, text)
        *whole, last = text.split(b"\n")
        lines: list[str] = []
        for raw in whole:
            if self.skipping:
                self.skipping = False
                continue
            text = self._text(raw)
            if text and text != self.last_bar:
                lines.append(text)
            self.last_bar = ""
        if len(last) > PARTIAL_LIMIT and b"\r" not in last[-PARTIAL_LIMIT:]:
            if not self.skipping:
                lines.append(self._text(last))
            last, self.skipping = b"", True
        # Only the visible part of a bar is kept: the last state, or the one being written over it.
        states = last.split(b"\r")
        self.bar = len(states) > 1
        self.partial = b"\r".join(states[-2:])
        return lines + self._bar_state(now)

    def _waiting(self, now: float) -> list[str]:
        if not self.partial or self.skipping:
            return []
        if self.bar:
            return self._bar_state(now)
        return [] if now - self.grew_at < PARTIAL_S else self.take_unfinished()

    def _bar_state(self, now: float) -> list[str]:
        if not self.bar or self.skipping or now - self.bar_at < BAR_S:
            return []
        text = self._text(self.partial)
        if not text or text == self.last_bar:
            return []
        self.bar_at, self.last_bar = now, text
        return [text]

    @staticmethod
    def _text(raw: bytes) -> str:
        # The last state that is not blank: tqdm clears its line with blanks before it writes again.
        for state in reversed(raw.split(b"\r")):
            if state.strip():
                text = state[: LINE_LIMIT * 4 + 1].decode("utf-8", errors="replace").rstrip()
                cut = " ... (cut)" if len(text) > LINE_LIMIT else ""
                return sanitize(text, LINE_LIMIT - len(cut)) + cut
        return ""


class LogTail:
    """Reads the log files of one run as they grow. Stores nothing on disk; call it from one thread.

    ``offsets`` are start offsets in bytes, by file name; other files are read from their beginning.
    """

    def __init__(self, run: RunDir, offsets: dict[str, int] | None = None) -> None:
        self._logs = run.logs
        self._offsets = offsets or {}
        self._files: dict[str, _File] = {}
        self._scan_at = 0.0

    def poll(self, *, last: bool = False) -> list[LogLine]:
        """Return the lines written since the last call, stamped with the time of reading; never waits.

        The ``last`` call returns unfinished lines too.
        """
        clock = time.monotonic()
        if last or clock >= self._scan_at:
            self._scan_at = clock + SCAN_S
            self._scan()
        now = time.time()
        quota = max(10, min(LINES_A_POLL, LINES_IN_ALL // max(1, len(self._files))))
        lines: list[LogLine] = []
        for file in self._files.values():
            texts = file.grow(clock, quota)
            if last:
                # One poll reads at most READ_LIMIT; the unread rest is at most BACKLOG_LIMIT.
                for _ in range(BACKLOG_LIMIT // READ_LIMIT):
                    texts += file.grow(clock, quota)
                texts += file.take_unfinished()
            lines += [LogLine(file.rank, now, file.stream, text) for text in texts]
        return lines

    def _scan(self) -> None:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(self._logs))
        for name in names:
            known = _rank_and_stream(name)
            if known is not None and name not in self._files:
                self._files[name] = _File(self._logs / name, *known, self._offsets.get(name, 0))


def offsets_after(run: RunDir, recorded: Iterable[LogLine]) -> dict[str, int]:
    """Return the offsets at which reading continues after a hub restart: after the last recorded line of each file.

    A file without recorded lines is read from its beginning. If the last recorded line is not found in the file's last
    MiB (it was a bar's state, or cut), reading continues at the file's end: a gap is better than duplicate lines.

    ``recorded`` lines are the oldest first.
    """
    texts = {(line.rank, line.stream): line.text for line in recorded}
    offsets: dict[str, int] = {}
    for (rank, stream), text in texts.items():
        if stream == "ftmon":
            continue
        path = run.logs / "launcher.log" if stream == "launcher" else run.rank_log(rank, stream)
        with contextlib.suppress(OSError):
            offsets[path.name] = _behind(path, text)
    return offsets


def _behind(path: Path, text: str) -> int:
    size = path.stat().st_size
    start = max(0, size - _SEARCHED)
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(_SEARCHED)
    end = data.rfind(b"\n")
    while end >= 0:
        newline = data.rfind(b"\n", 0, end)
        if _File._text(data[newline + 1 : end]) == text:
            return start + end + 1
        end = newline
    return size


def _on_one_line(found: "re.Match[bytes]") -> bytes:
    """Convert a bar in a row below into another state of the bar above it."""
    down, state, up = found.groups()
    return b"\r" + state if len(down) * len(_UP) == len(up) else found[0]


def _rank_and_stream(name: str) -> tuple[int, Stream] | None:
    if name == "launcher.log":
        return -1, "launcher"
    found = _RANK_LOG.match(name)
    return (int(found[1]), "out" if found[2] == "out" else "err") if found else None


def _thinned(lines: list[str], quota: int) -> list[str]:
    """Replace the middle of too many lines by a line with their number."""
    if len(lines) <= quota:
        return lines
    half = quota // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines skipped", *lines[-half:]]
