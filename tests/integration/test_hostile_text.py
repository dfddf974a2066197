"""What a recording, a log line, a name or a path says never makes a terminal do anything: the real program shows it."""

import contextlib
import fcntl
import os
import pty
import select
import shlex
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run.rundir import ExitFile, RunDir, RunFile
from ftmon_process import PROGRAM, Ftmon, ftmon_home
from hostile import C1, HOSTILE, OSC, TRACES, examples

LINES = """
ls; status EVIL; logs EVIL; replay EVIL --plain; memory EVIL; events EVIL; oom EVIL; kill EVIL --yes; ls --json;
status EVIL --json; replay ./EVIL.sqlite; snapshot ./EVIL.pickle --text; attach EVIL-none
""".replace("\n", " ").split("; ")
KEYS = "\r\x1ba\r\x1b\x1bvl\x1bm\x1be\x1bo\x1bk\x1b?\x1bnR"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path / "home", LANG="C.UTF-8", LC_ALL="C.UTF-8", TERM="xterm-256color") as ftmon:
        evil_run(ftmon.home)
        yield ftmon


def evil_run(home: Path) -> RunDir:
    """Make a run every word of which is hostile, its directory's name too."""
    run = RunDir(home / "runs" / f"evil{OSC}{C1}")
    run.path.mkdir(mode=0o700, parents=True)
    run.logs.mkdir()
    dead = ProcessId(2**22 - 1, 1)
    file = RunFile(f"evil{HOSTILE}", HOSTILE, 1.78e9, ["python", HOSTILE], HOSTILE, HOSTILE, "run", dead)
    run.write_run(file)
    run.write_exit(ExitFile(1, 1.78e9 + 60, "failed", HOSTILE))
    for name in ("launcher.log", "rank-3.err", "rank-3.out"):
        (run.logs / name).write_text(f"{HOSTILE}\n")
    writer = Writer(run.recording, file)
    for turn in range(3):
        for number, message in enumerate(examples()):
            writer.append(100 * turn + number + 1, 1.78e9 + turn, message)
    writer.close()
    return run


class Screen:
    """A program in a pseudo-terminal, and every byte that it wrote."""

    def __init__(self, words: list[str], home: Ftmon, folder: Path) -> None:
        self.bytes = b""
        self.ended = False
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, home.environ)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))

    def read(self, seconds: float, until: bytes = b"") -> bool:
        """Take what it writes, until it writes ``until`` or ends; False when neither happened in time."""
        deadline = time.monotonic() + seconds
        begun = len(self.bytes)
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            if until and until in self.bytes[begun:]:
                return True
            if not select.select([self.descriptor], [], [], left)[0]:
                continue
            try:
                piece = os.read(self.descriptor, 65536)
            except OSError:
                piece = b""
            if not piece:
                self.ended = True
                return True
            self.bytes += piece
        return self.ended

    def settle(self) -> None:
        """Take what it writes until it is quiet, for 5 s at most."""
        for _ in range(20):
            before = len(self.bytes)
            self.read(0.25)
            if self.ended or len(self.bytes) == before:
                return


def traces(written: bytes) -> dict[bytes, bytes]:
    """Find what must not be there, each with what stands around it."""
    found = {trace: written.find(trace) for trace in TRACES}
    return {trace: written[max(0, at - 60) : at + 30] for trace, at in found.items() if at >= 0}


def test_no_command_lets_anything_through(home: Ftmon, tmp_path: Path) -> None:
    name = f"evil{OSC}{C1}"
    lines = [f"{shlex.quote(PROGRAM)} {line.replace('EVIL', shlex.quote(name))}; echo" for line in LINES]
    screen = Screen(["sh", "-c", "\n".join(lines)], home, tmp_path)
    assert screen.read(500), screen.bytes[-2000:]
    os.waitpid(screen.pid, 0)
    assert screen.bytes.count(b"PWNED") > 50, screen.bytes
    assert b"Traceback" not in screen.bytes, screen.bytes
    assert not traces(screen.bytes)


def test_no_screen_of_the_app_lets_anything_through(home: Ftmon, tmp_path: Path) -> None:
    recording = home.newest().recording
    screen = Screen([PROGRAM, "replay", str(recording)], home, tmp_path)
    assert screen.read(200, b"rank 3"), screen.bytes[-2000:]
    for key in KEYS:
        os.write(screen.descriptor, key.encode())
        assert not screen.ended, (key, screen.bytes[-2000:])
        screen.settle()
    # An escape and a key that a busy program reads together are another key.
    deadline = time.monotonic() + 200
    while not screen.ended and time.monotonic() < deadline:
        for key in ("\x1b", "q"):
            with contextlib.suppress(OSError):  # it ends
                os.write(screen.descriptor, key.encode())
            screen.read(2.0)
    assert screen.ended, screen.bytes[-2000:]
    os.waitpid(screen.pid, 0)
    assert screen.bytes.count(b"PWNED") > 10
    assert b"Traceback" not in screen.bytes, screen.bytes[-4000:]
    assert not traces(screen.bytes)
