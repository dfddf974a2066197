"""Reads a program's output: the error that ended it (an exception, a refusal, an abort), and SLURM's notice of its end.

slurmstepd writes that notice (``_handle_signal_container`` of its ``req.c``), and srun forwards it; old versions
name no node::

    slurmstepd: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***

Without a reason it is a user's ``scancel``, or srun ending the other tasks after a failure that it has reported
before. A failed node is not a request to end, and is ignored here.
"""

import re
from collections.abc import Iterable

import msgspec

from ...code_owner import is_probe, library_of

_PREFIX = re.compile(r"^\[rank(\d+)\]: ?")
_BEGIN = "Traceback (most recent call last):"
_TYPE = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::(?: (.*))?)?$")
"""A message may start with a newline, in which case the space before it may be stripped."""
_FILE = re.compile(r'^\s+File "(.+)", line (\d+), in (.+)$')
_LAUNCHER_TYPES = (
    "ChildFailedError",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "SignalException",
)
"""Exceptions that a launcher raises because one of its processes failed, or because it was ended; never the cause."""
_BY_PYTHON = "can't open file|can't find '__main__'|No module named|Error while finding module specification"
_REFUSALS = (
    re.compile(rf"^(\S+): ((?:{_BY_PYTHON}) .+)$"),
    # argparse
    re.compile(r"^(\S+): (error: .+)$"),
    # sh, bash
    re.compile(r"^(\S+): ((?:line )?\d+: .+: (?:(?:command )?not found|No such file or directory|Permission denied))$"),
    # click
    re.compile(r"^(Error): ((?:No such|Missing|Invalid value|Got unexpected) .+)$"),
)
"""Lines with which a program refuses a wrong file, module, argument or command; they have no traceback."""
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORTS = (re.compile(r"\bport: ?(\d{2,5})\b"), re.compile(r":(\d{2,5})\b(?=[^\d]*(?:errno|\(|,|\.|$))"))
_MESSAGE_LINES = 8
_ELSE = ("During handling", "The above exception", "[", "E0", "W0", "I0", "ftmon: ")
"""Starts of lines that are not part of a message."""
_ABORTS = (
    # PyTorch's watchdog of NCCL
    (
        "Watchdog caught",
        re.compile(r"(?:\[Rank \d+\] )?Watchdog caught collective operation timeout: .*?(?:timing out|$)"),
    ),
    # assert of C, and of CUDA's kernels
    ("Assertion ", re.compile(r"\S+:\d+: .*Assertion .* failed")),
    # glog
    ("Check failed: ", re.compile(r"Check failed: .+")),
    # glibc's checks of the heap and the stack
    ("(): ", re.compile(r"^(?:free|malloc|realloc|munmap_chunk|malloc_consolidate|_int_malloc)\(\): .+")),
    ("corrupt", re.compile(r"^(?:double free or corruption|corrupted (?:size|double-linked)).*")),
    ("detected ***", re.compile(r"^\*\*\* .+ detected \*\*\*.*")),
)
"""Lines that a library writes before it aborts the process, each with a part of it that is quickly searched."""
_THROWN = re.compile(r"terminate called after throwing an instance of '(.+)'")
_WHAT = re.compile(r"^\s*what\(\): +(.+)$")
_ENFORCE = re.compile(r"^\[enforce fail at [^\]]+\] ")
_ABORT_CHARACTERS = 1000
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S+ (?:ON \S+ )?CANCELLED AT \S+(?: DUE TO (TIME LIMIT|PREEMPTION|JOB REQUEUE))? \*\*\*"
)
_TROUBLE = re.compile(
    r"srun: error: \S+: tasks? [\d,-]+: |srun: .*Terminating |slurmstepd\S*: error: .*(?:oom[_-]kill|memory limit)",
    re.IGNORECASE,
)


class RaisedException(msgspec.Struct, frozen=True):
    """An exception from a traceback; or the error with which a program refused to start."""

    kind: str  # its type, without the module; or the program's name
    message: str  # its message, which may have several lines
    place: str = ""  # file, line and function that raised it, and the user's code that called it; empty if unknown
    rank: int | None = None  # rank from torchrun's prefix of the line

    @property
    def is_of_launcher(self) -> bool:
        """Whether it only reports that a process started by a launcher failed."""
        return self.kind in _LAUNCHER_TYPES

    @property
    def words(self) -> str:
        """Type and first line of the message: ``ValueError: no such dataset``."""
        first = next((line.strip() for line in self.message.splitlines() if any(map(str.isalnum, line))), "")
        return f"{self.kind}: {first}" if first else self.kind


class AbortReader:
    """Finds the reason for which native code aborts a process, in its output."""

    def __init__(self) -> None:
        self.reason = ""  # the latest reason; empty: none
        self._thrown = ""  # type of the C++ exception that nothing caught

    def read(self, line: str) -> None:
        line = line[:_ABORT_CHARACTERS]
        for part, pattern in _ABORTS:
            if part in line and (found := pattern.search(line)) is not None:
                self.reason = found[0].rstrip(".")
                return
        if (found := _THROWN.search(line)) is not None:
            self._thrown = found[1]
            self.reason = self.reason or f"an uncaught C++ exception: {self._thrown}"
        elif self._thrown and (found := _WHAT.match(line)) is not None:
            self.reason = f"{self._thrown}: {_ENFORCE.sub('', found[1])}".rstrip(".")


def last_exception(lines: Iterable[str]) -> RaisedException | None:
    """Return the exception of the last traceback in ``lines``, except for those that only report a failed child.

    If there is no other, return the last line with which a program refused to start; else the last exception; else
    None.
    """
    texts = list(lines)
    raised = list(_exceptions(texts))
    found = [one for one in raised if not one.is_of_launcher]
    return found[-1] if found else _refusal(texts) or (raised[-1] if raised else None)


def _refusal(lines: list[str]) -> RaisedException | None:
    """Return the last line with which a program refused a wrong file, module, argument or command."""
    matches = (pattern.match(line.rstrip()) for line in reversed(lines) for pattern in _REFUSALS)
    found = next(filter(None, matches), None)
    return RaisedException(found[1].rsplit("/", 1)[-1], found[2]) if found is not None else None


def _exceptions(lines: Iterable[str]) -> Iterable[RaisedException]:
    """Yield the exception of each traceback; lines of different ranks may be interleaved."""
    opened: dict[int | None, list[str]] = {}
    for text in lines:
        match = _PREFIX.match(text)
        rank = int(match[1]) if match else None
        line = text[match.end() :] if match else text
        if line.strip() == _BEGIN:
            yield from _read(opened.get(rank, []), rank)
            opened[rank] = []
        elif rank in opened:
            opened[rank].append(line)
    for rank, body in opened.items():
        yield from _read(body, rank)


def _read(body: list[str], rank: int | None) -> list[RaisedException]:
    """Parse the lines after a traceback's first one: frames are indented, the exception is not.

    The probe's frames count only if there are no others: native code called by a wrapper has no frame of its own.
    """
    place = own = ""
    for at, line in enumerate(body):
        frame = _FILE.match(line)
        if frame is not None:
            if not place or not is_probe(frame[1]):
                place = f"{frame[1]}:{frame[2]} in {frame[3]}"
                own = own if library_of(frame[1]) else place
        elif line.strip() and not line[0].isspace():
            found = _TYPE.match(line.rstrip())
            if found is None or not place:
                return []
            called = f", called from {own}" if own and own != place else ""
            message = _message(found, body[at + 1 :])
            return [RaisedException(found[1].rsplit(".", 1)[-1], message, place + called, rank)]
    return []


def _message(found: re.Match[str], following: list[str]) -> str:
    """Return the message of an exception; blank lines at its start do not end it."""
    if ":" not in found.group():
        return ""
    message = [found.group(2) or ""]
    for line in following[: _MESSAGE_LINES - 1]:
        if line.startswith(_ELSE) or (not line.strip() and any(message)):
            break
        message.append(line.rstrip())
    return "\n".join(message).strip()


def address_in_use(text: str) -> int | None:
    """Return the port of an "address in use" error: 0 if it names no port, None for other errors.

    PyTorch writes ``port: 29500, useIpv6: false, code: -98, name: EADDRINUSE``, its earlier versions
    ``failed to bind to [::]:29500 (errno: 98 - Address already in use)``, Python ``[Errno 98] Address already in use``.
    """
    if not _IN_USE.search(text):
        return None
    ports = (int(found[1]) for pattern in _PORTS if (found := pattern.search(text)) is not None)
    return next((port for port in ports if 0 < port < 65536), 0)


class SlurmWords:
    """Reads a job's output line by line."""

    def __init__(self) -> None:
        self._trouble = False

    def read(self, line: str) -> str:
        """Return ``cancelled by SLURM: time limit`` if ``line`` reports that; else an empty string."""
        if "srun: " not in line and "slurmstepd" not in line:
            return ""
        found = _CANCELLED.search(line)
        if found is None:
            self._trouble = self._trouble or bool(_TROUBLE.search(line))
            return ""
        if found[1]:
            return f"cancelled by SLURM: {found[1].lower()}"
        return "" if self._trouble else "cancelled by SLURM"


def cancelled(lines: Iterable[str]) -> str:
    """Return why SLURM ended the job that wrote these lines (see ``SlurmWords.read``); empty if it did not."""
    words = SlurmWords()
    return next(filter(None, map(words.read, lines)), "")
