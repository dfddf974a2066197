"""A real terminal for tests: tmux where it is installed, else a pseudo-terminal whose output is drawn here."""

import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import termios
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from eventually import SECONDS, eventually
from rich.cells import get_character_cell_size

_TOKEN = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)(?P<sequence>[@-~])|\x1b(?:[\]P][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])"
    r"|(?P<control>[\x00-\x1f])|(?P<text>[^\x00-\x1f])"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*|[\]P][^\x07\x1b]*\x1b?|[ -/]*)\Z")
"""The start of a sequence whose rest is still to be read."""

_KEYS = {
    "Enter": b"\r", "Escape": b"\x1b", "Tab": b"\t", "C-c": b"\x03", "C-z": b"\x1a", "C-p": b"\x10",
    "Left": b"\x1b[D", "Right": b"\x1b[C",
}  # fmt: skip


class Screen:
    """The cells of a terminal with their looks, after what was written to it; without ``lines`` it never scrolls."""

    def __init__(self, columns: int = 10_000, lines: int | None = None) -> None:
        self.columns, self.lines = columns, lines
        self.cells: dict[tuple[int, int], tuple[str, str]] = {}
        self.row = self.column = 0
        self._attributes, self._colors = "", ["", ""]
        self._wraps = True
        self._first = self.cells, 0, 0
        self._unfinished = ""

    def write(self, data: str) -> None:
        data = self._unfinished + data
        unfinished = _UNFINISHED.search(data)
        self._unfinished = unfinished[0] if unfinished else ""
        data = data.removesuffix(self._unfinished)
        for token in _TOKEN.finditer(data):
            if token["text"]:
                self._put(token["text"])
            elif token["control"]:
                self._control(token["control"])
            elif token["sequence"]:
                self._sequence(token["sequence"], token["parameters"])

    def _put(self, text: str) -> None:
        if self.column >= self.columns:
            self.column = self.columns - 1
            if self._wraps:
                self._control("\r")
                self._control("\n")
        width = get_character_cell_size(text)
        self.cells[self.row, self.column] = text, self._look(text)
        if width == 2:
            self.cells[self.row, self.column + 1] = "", self._look(text)
        self.column += width

    def _look(self, text: str) -> str:
        """Return the visible part of the style: a blank has no foreground."""
        if text == " " and "7" not in self._attributes:
            return self._colors[1]
        return f"{self._attributes} {self._colors}"

    def _control(self, control: str) -> None:
        if control == "\n":
            self.row += 1
            if self.lines is not None and self.row == self.lines:
                self.row -= 1
                self.cells = {(row - 1, column): cell for (row, column), cell in self.cells.items() if row}
        elif control == "\r":
            self.column = 0
        elif control == "\b":
            self.column = max(0, self.column - 1)

    def _sequence(self, name: str, parameters: str) -> None:
        if name == "m" and parameters[:1] != ">":
            self._style(parameters or "0")
        elif name == "H":
            row, _, column = parameters.partition(";")
            self.row, self.column = int(row or 1) - 1, int(column or 1) - 1
        elif name == "C":
            self.column += int(parameters or 1)
        elif name == "K":
            self.cells = {at: cell for at, cell in self.cells.items() if at[0] != self.row or at[1] < self.column}
        elif name == "J" and parameters in ("2", "3"):
            self.cells.clear()
        elif name == "h" and parameters == "?1049":  # the alternate screen
            self._first = self.cells, self.row, self.column
            self.cells, self.row, self.column = {}, 0, 0
        elif name == "l" and parameters == "?1049":
            self.cells, self.row, self.column = self._first
        elif name in "hl" and parameters == "?7":
            self._wraps = name == "h"

    def _style(self, parameters: str) -> None:
        for one in re.findall(r"[34]8;2;\d+;\d+;\d+|[34]8;5;\d+|\d+", parameters):
            if one == "0":
                self._attributes, self._colors = "", ["", ""]
            elif one[0] in "34" and len(one) > 1:
                self._colors[one[0] == "4"] = "" if one in ("39", "49") else one
            else:
                self._attributes += one

    def text(self) -> str:
        rows: list[list[str]] = [[] for _ in range(max((row for row, _ in self.cells), default=-1) + 1)]
        for (row, column), (text, _) in sorted(self.cells.items()):
            rows[row] += [" "] * (column - len(rows[row]))
            rows[row].append(text)
        return "\n".join("".join(row).rstrip() for row in rows)


class TmuxTerminal:
    def __init__(self, columns: int, lines: int, environ: Mapping[str, str], folder: Path) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux.sock"), "-f", "/dev/null"]
        size = ["-x", str(columns), "-y", str(lines)]
        shell = "env -u TMUX -u TMUX_PANE PS1='$ ' sh"
        environment = {**environ, "TERM": "xterm-256color"}
        subprocess.run([*self._tmux, "new-session", "-d", *size, shell], env=environment, check=True, timeout=200)

    def press(self, *keys: str) -> None:
        """Press keys: single characters, words with a space in them as they are, or names (``Enter``, ``C-c``)."""
        for key in keys:
            literal = ["-l"] if len(key) == 1 or " " in key else []
            subprocess.run([*self._tmux, "send-keys", *literal, key], check=True, timeout=200)

    def text(self) -> str:
        words = [*self._tmux, "capture-pane", "-p"]
        return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False).stdout

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True, timeout=200)


class PtyTerminal:
    """A pseudo-terminal. Nothing answers what an app asks of a terminal, which an app must bear too."""

    def __init__(self, columns: int, lines: int, environ: Mapping[str, str], folder: Path) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            os.execvpe("sh", ["sh"], {**environ, "TERM": "xterm-256color", "PS1": "$ "})
        self._pid = pid
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.raw = b""  # everything written so far
        self._screen, self._decode = Screen(columns, lines), getincrementaldecoder("utf-8")("replace").decode
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self._fd, _KEYS.get(key, key.encode()))
            if key == "Escape":
                time.sleep(0.5)  # only the silence after it tells the key from the start of a sequence

    def text(self) -> str:
        with self._lock:
            return self._screen.text()

    def close(self) -> None:
        self._closing.set()
        self._reader.join()  # afterwards the descriptor's number may be another file's
        os.close(self._fd)
        os.waitpid(self._pid, 0)

    def _read(self) -> None:
        while not self._closing.is_set():
            try:
                if not select.select([self._fd], [], [], 0.2)[0]:
                    continue
                piece = os.read(self._fd, 65536)
            except (OSError, ValueError):
                return
            with self._lock:
                self.raw += piece
                self._screen.write(self._decode(piece))


Terminal = TmuxTerminal | PtyTerminal  # a shell in a terminal of a known size


def wait_for(terminal: Terminal, *words: str, seconds: float = SECONDS) -> str:
    """Wait until every word is on the screen at once; return the screen, or fail showing it."""
    return eventually(
        lambda: (text := terminal.text()) and all(word in text for word in words) and text,
        f"{words} on the screen",
        seconds,
        state=terminal.text,
        every=0.1,
    )


def wait_until_gone(terminal: Terminal, word: str) -> None:
    eventually(lambda: word not in terminal.text(), f"{word!r} gone from the screen", state=terminal.text)


def command(terminal: Terminal, *words: str) -> None:
    terminal.press(" " + shlex.join(words), "Enter")


@contextmanager
def open_terminal(columns: int, lines: int, environ: Mapping[str, str], folder: Path) -> Iterator[Terminal]:
    kind = TmuxTerminal if shutil.which("tmux") else PtyTerminal
    terminal = kind(columns, lines, environ, folder)
    try:
        # What is typed before is shown in front of the prompt, not behind it.
        wait_for(terminal, "$")
        yield terminal
    finally:
        terminal.close()
