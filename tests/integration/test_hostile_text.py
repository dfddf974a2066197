"""What a recording, a log line, a name or a path says never makes a terminal do anything: the real program shows it."""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run.rundir import ExitFile, RunDir, RunFile
from ftmon_process import PROGRAM, Ftmon, ftmon_home
from hostile import C1, HOSTILE, OSC, TRACES, examples
from terminal import PtyTerminal

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


END = b"THE-END"


@contextmanager
def running(lines: list[str], home: Ftmon, folder: Path) -> Iterator[PtyTerminal]:
    """Run a script in a terminal of 120x40; at last it writes ``END``."""
    script = folder / "script.sh"  # typed words would be echoed
    script.write_text("\n".join([f"cd {folder}", *lines, f"echo {END.decode()}", ""]))
    terminal = PtyTerminal(120, 40, home.environ, folder)
    try:
        terminal.press(f"sh {script}", "Enter")
        yield terminal
    finally:
        terminal.close()


def settle(terminal: PtyTerminal) -> None:
    """Wait until it writes nothing for a moment, for 5 s at most."""
    for _ in range(20):
        before = len(terminal.raw)
        time.sleep(0.25)
        if len(terminal.raw) == before:
            return


def traces(written: bytes) -> dict[bytes, bytes]:
    """Find what must not be there, each with what stands around it."""
    found = {trace: written.find(trace) for trace in TRACES}
    return {trace: written[max(0, at - 60) : at + 30] for trace, at in found.items() if at >= 0}


def test_no_command_lets_anything_through(home: Ftmon, tmp_path: Path) -> None:
    name = f"evil{OSC}{C1}"
    lines = [f"{shlex.quote(PROGRAM)} {line.replace('EVIL', shlex.quote(name))}; echo" for line in LINES]
    with running(lines, home, tmp_path) as terminal:
        eventually(lambda: END in terminal.raw, "the last command's end", 500, state=lambda: terminal.raw[-2000:])
    assert terminal.raw.count(b"PWNED") > 50, terminal.raw
    assert b"Traceback" not in terminal.raw, terminal.raw
    assert not traces(terminal.raw)


def test_no_screen_of_the_app_lets_anything_through(home: Ftmon, tmp_path: Path) -> None:
    replay = f"{shlex.quote(PROGRAM)} replay {shlex.quote(str(home.newest().recording))}"
    with running([replay], home, tmp_path) as terminal:
        eventually(lambda: b"rank 3" in terminal.raw, "the app", 200, state=lambda: terminal.raw[-2000:])
        for key in KEYS:
            terminal.press(key)
            settle(terminal)
            assert END not in terminal.raw, (key, terminal.raw[-2000:])
        # An escape and a key that a busy program reads together are another key.
        eventually(lambda: END in terminal.raw, "its end", 200, each=lambda: terminal.press("Escape", "q"), every=2.0)
    assert terminal.raw.count(b"PWNED") > 10
    assert b"Traceback" not in terminal.raw, terminal.raw[-4000:]
    assert not traces(terminal.raw)
