"""A real terminal for tests: tmux where it is installed, else a pseudo-terminal whose output is read as text."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from eventually import SECONDS, eventually

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
_KEYS = {"Enter": b"\r", "Escape": b"\x1b", "Tab": b"\t", "C-c": b"\x03", "Left": b"\x1b[D", "Right": b"\x1b[C"}


class Terminal(Protocol):
    """A shell in a terminal of a known size."""

    def press(self, *keys: str) -> None:
        """Press keys: single characters, words with a space in them as they are, or names (``Enter``, ``C-c``)."""
        ...

    def text(self) -> str:
        """Return what is on the screen (of a pseudo-terminal: what was written since the last key)."""
        ...

    def close(self) -> None:
        """End the shell."""
        ...


class TmuxTerminal:
    """A pane of a tmux server of its own."""

    def __init__(self, columns: int, lines: int, environ: Mapping[str, str], folder: Path) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux.sock"), "-f", "/dev/null"]
        size = ["-x", str(columns), "-y", str(lines)]
        shell = "env -u TMUX -u TMUX_PANE PS1='$ ' sh"
        environment = {**environ, "TERM": "xterm-256color"}
        subprocess.run([*self._tmux, "new-session", "-d", *size, shell], env=environment, check=True, timeout=200)

    def press(self, *keys: str) -> None:
        for key in keys:
            literal = ["-l"] if len(key) == 1 or " " in key else []
            subprocess.run([*self._tmux, "send-keys", *literal, key], check=True, timeout=200)

    def text(self) -> str:
        done = subprocess.run(
            [*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, timeout=200, check=False
        )
        return done.stdout

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True, timeout=200)


class PtyTerminal:
    """A pseudo-terminal. Nothing answers what an app asks of a terminal, which an app must bear too."""

    def __init__(self, columns: int, lines: int, environ: Mapping[str, str], folder: Path) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            environment = {**environ, "TERM": "xterm-256color", "PS1": "$ "}
            os.execvpe("sh", ["sh"], environment)
        self._pid = pid
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._written = b""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, *keys: str) -> None:
        with self._lock:
            self._written = b""
        for key in keys:
            os.write(self._fd, _KEYS.get(key, key.encode()))
            if key == "Escape":
                time.sleep(0.5)  # only the silence after it tells the key from the start of a sequence

    def text(self) -> str:
        with self._lock:
            return _ESCAPES.sub(b" ", self._written).decode(errors="replace")

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
                self._written += piece


def wait_for(terminal: Terminal, *words: str, seconds: float = SECONDS) -> str:
    """Wait until every word is on the screen at once; return the screen, or fail showing it."""
    return eventually(
        lambda: (text := terminal.text()) and all(word in text for word in words) and text,
        f"{words} on the screen",
        seconds,
        state=terminal.text,
        every=0.1,
    )


def wait_until_gone(terminal: Terminal, word: str, seconds: float = SECONDS) -> None:
    """Wait until a word has left the screen."""
    eventually(lambda: word not in terminal.text(), f"{word!r} gone from the screen", seconds, state=terminal.text)


def command(terminal: Terminal, *words: str) -> None:
    """Type a command line and press enter."""
    terminal.press(" " + shlex.join(words), "Enter")


@contextmanager
def open_terminal(columns: int, lines: int, environ: Mapping[str, str], folder: Path) -> Iterator[Terminal]:
    """Open a shell in a terminal of ``columns`` x ``lines``."""
    kind = TmuxTerminal if shutil.which("tmux") else PtyTerminal
    terminal = kind(columns, lines, environ, folder)
    try:
        # What is typed before is shown in front of the prompt, not behind it.
        wait_for(terminal, "$")
        yield terminal
    finally:
        terminal.close()
