"""The results file of a sweep: JSON lines, each on disk before the next run begins. A torn last line is ignored.

Sizes are in bytes, ``*_ms`` in milliseconds, ``time`` in seconds since the epoch.
"""

import os
from collections import Counter
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from ..errors import FtmonError, UsageError
from ..host.process import ProcessId
from ..messages.telemetry import Whole

FORMAT = 1  # version of the file; other versions are refused
Value = str | Whole | float | bool | None  # of one axis
Settings = dict[str, Value]  # one configuration of the sweep: a value for each axis
Verdict = Literal["done", "out-of-memory", "hang", "crash", "timeout", "refused", "no-steps", "unfinished"]
"""``refused``: the configuration is invalid, and the run was not started; ``no-steps``: it exited with status 0 without
an optimizer step; ``unfinished``: the sweep ended first (budget, interrupt), so the row is no result.
"""
Goal = Literal["largest", "fastest", "phases"]


class Budget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Budget of the sweep, wall-clock time of all its sessions."""

    seconds: float | None = None  # none: no limit
    money: float | None = None  # in the currency of the price; `seconds` has it as time
    price_per_gpu_hour: float | None = None  # price of one GPU for one hour, in any currency
    gpus: Whole = 0  # GPUs that are paid for: the ranks of the largest configuration; 0: not known


class Search(msgspec.Struct, frozen=True, omit_defaults=True):
    """The goal of a search along one axis, for each combination of the others."""

    goal: Goal
    axis: str = ""
    low: Whole = 1
    high: Whole = 1
    step: Whole = 1


class Header(msgspec.Struct, tag="sweep", frozen=True, omit_defaults=True):
    """The file's first entry: the sweep that is measured."""

    format: int
    name: str
    source: str  # the sweep file, as given
    fingerprint: str
    """Hash of what a row depends on besides its settings: base configuration or command, steps, environment."""
    axes: list[str]
    steps: Whole  # measured steps of a run
    warm_up: Whole  # steps at the beginning that are discarded
    created: float
    host: str = ""
    version: str = ""


class Predicted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prediction of a configuration by ``ftmon predict``; the highest rank's figures."""

    peak_bytes: Whole  # allocated peak of the highest phase
    phase: str
    reserved_bytes: Whole
    nvml_bytes: Whole
    fits: bool | None = None  # none: no capacity was known
    phases: dict[str, Whole] = {}  # allocated peak by phase
    step_seconds: float = 0.0  # time of an optimizer step; 0: not known


class Planned(msgspec.Struct, frozen=True, omit_defaults=True):
    """One configuration to run."""

    settings: Settings
    predicted: Predicted | None = None
    seconds: float | None = None  # expected duration of one run, its start included; None: not known


class Plan(msgspec.Struct, tag="plan", frozen=True, omit_defaults=True):
    """Beginning of a session: its process, and the planned runs in order."""

    time: float
    process: ProcessId
    runs: list[Planned]  # of a search, only what is known beforehand
    repeats: Whole = 1
    budget: Budget = Budget()
    search: Search | None = None
    timeout: float = 0.0  # seconds after which a run is ended
    capacity_bytes: Whole | None = None
    notes: list[str] = []
    columns: list[str] = []  # names of the figures in the table; empty: the default ones


class Started(msgspec.Struct, tag="start", frozen=True, omit_defaults=True):
    """Beginning of a run."""

    time: float
    settings: Settings
    repeat: Whole = 0
    run: str = ""  # its directory; empty: it was refused, or runs elsewhere
    job: str = ""  # number of its job, by an engine (`--on`)


class PhaseFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """One phase over the measured steps of a rank: highest peaks, median times."""

    allocated_peak_bytes: Whole = 0
    reserved_peak_bytes: Whole = 0
    resident_peak_bytes: Whole = 0  # resident set (CPU ranks): there the true high-water mark
    host_ms: float = 0.0
    device_ms: float | None = None
    ms_error: float = 0.0  # standard error of the device time, or of the host time if there is no device time

    @property
    def peak_bytes(self) -> int:
        """The figure that is a true high-water mark: resident memory if measured, else allocated."""
        return self.resident_peak_bytes or self.allocated_peak_bytes


class RankRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank of a run."""

    rank: Whole
    steps: Whole = 0  # measured steps
    step_ms: float = 0.0  # median
    step_ms_low: float = 0.0
    step_ms_high: float = 0.0
    tokens_per_second: float = 0.0
    phases: dict[str, PhaseFigures] = {}
    reserved_peak_bytes: Whole = 0  # highest of all steps, warm-up included: reserved memory is not given back
    nvml_bytes: Whole = 0  # highest that NVML showed for its process; 0: not known
    device: str = ""
    loss: float | None = None
    step_ms_error: float = 0.0  # standard error of `step_ms`; 0: unknown

    @property
    def peak_bytes(self) -> int:
        """Highest peak of its phases."""
        return max((figures.peak_bytes for figures in self.phases.values()), default=0)

    @property
    def peak_phase(self) -> str:
        """The phase of that peak; empty without phases."""
        return max(self.phases, key=lambda name: self.phases[name].peak_bytes, default="")


class Row(msgspec.Struct, tag="row", frozen=True, omit_defaults=True):
    """Result of one run. A failure is a row too."""

    settings: Settings
    verdict: Verdict
    time: float  # when it ended
    seconds: float = 0.0  # from its start until its GPUs were seen to be empty
    repeat: Whole = 0
    run: str = ""  # the run's identifier; empty: it was refused
    text: str = ""  # the evidence, one line
    phase: str = ""  # where it failed
    rank: Whole | None = None  # which rank failed, first or alone
    step: Whole | None = None
    asked_bytes: Whole = 0  # what the failed allocation asked for
    ranks: list[RankRow] = []
    predicted: Predicted | None = None
    note: str = ""  # a further remark, such as GPUs that were not empty afterwards

    @property
    def peak_bytes(self) -> int:
        """Highest peak over ranks and phases; 0: no step was measured."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)

    @property
    def peak_phase(self) -> str:
        """The phase of that peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes).peak_phase if self.ranks else ""

    @property
    def phase_peaks(self) -> dict[str, float]:
        """Highest peak of each phase over the ranks."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.phases)
        return {
            name: float(max(rank.phases[name].peak_bytes for rank in self.ranks if name in rank.phases))
            for name in names
        }

    @property
    def on_cpu(self) -> bool:
        """Whether peaks are of the resident set, with which a prediction for GPUs cannot be compared."""
        return any(figures.resident_peak_bytes for rank in self.ranks for figures in rank.phases.values())

    @property
    def reserved_bytes(self) -> int:
        """Highest reserved memory over the ranks."""
        return max((rank.reserved_peak_bytes for rank in self.ranks), default=0)

    @property
    def nvml_bytes(self) -> int:
        """Highest memory by NVML over the ranks; 0: unknown."""
        return max((rank.nvml_bytes for rank in self.ranks), default=0)

    @property
    def step_ms(self) -> float:
        """Median step time of the slowest rank; 0: no step was measured."""
        return max((rank.step_ms for rank in self.ranks), default=0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return sum(rank.tokens_per_second for rank in self.ranks)


class Ended(msgspec.Struct, tag="end", frozen=True, omit_defaults=True):
    """Regular end of a session."""

    time: float
    reason: Literal["finished", "budget", "failure", "interrupted", "gpus"]
    """``failure``: --fail-fast; ``gpus``: memory of the last run is still held."""
    text: str = ""
    not_run: Whole = 0  # planned runs without a row; of a search, 0


Entry = Header | Plan | Started | Row | Ended


def key_of(settings: Settings) -> str:
    """Return a key for a configuration: equal for equal settings in any order."""
    return msgspec.json.encode(settings, order="deterministic").decode()


def group_of(settings: Settings, axis: str) -> str:
    """Return the key of a configuration without one of its axes."""
    return key_of({name: value for name, value in settings.items() if name != axis})


_decoder = msgspec.json.Decoder(Entry)
_MOST_BYTES = 1 << 30


class ResultsError(UsageError):
    """A results file that cannot be used."""


class Results(NamedTuple):
    """Contents of a results file."""

    header: Header
    entries: list[Entry]  # all entries, the header first
    complete_bytes: int  # length of the file without a torn last line

    @property
    def rows(self) -> list[Row]:
        """The results, in order; runs that the sweep itself ended have none."""
        return [entry for entry in self.entries if isinstance(entry, Row) and entry.verdict != "unfinished"]

    @property
    def plan(self) -> Plan | None:
        """The newest session's plan; None: there is no session."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry, Plan)), None)

    @property
    def end(self) -> Ended | None:
        """How the newest session ended; None: it is running, or was killed."""
        last = self.entries[-1]
        return last if isinstance(last, Ended) else None

    @property
    def running(self) -> Started | None:
        """The run without a row, which is running or was lost with its session; None: there is none."""
        for entry in reversed(self.entries):
            if isinstance(entry, Started):
                return entry
            if not isinstance(entry, Plan):
                return None
        return None

    @property
    def unanswered(self) -> list[Started]:
        """The runs without a row: those that run, or were lost with their session."""
        found: dict[tuple[str, int], Started] = {}
        for entry in self.entries:
            if isinstance(entry, Started):
                found[key_of(entry.settings), entry.repeat] = entry
            elif isinstance(entry, Row):
                found.pop((key_of(entry.settings), entry.repeat), None)
        return list(found.values())

    @property
    def last_time(self) -> float:
        """Time of the newest entry; 0 without entries."""
        return max((entry.time for entry in self.entries if not isinstance(entry, Header)), default=0.0)

    def answered(self) -> dict[tuple[str, int], Row]:
        """Return the newest row of each configuration and repeat."""
        return {(key_of(row.settings), row.repeat): row for row in self.rows}

    def seconds_used(self) -> float:
        """Return the wall-clock time of all sessions; a killed one counts until its last entry."""
        used, begun, last = 0.0, 0.0, 0.0
        for entry in self.entries:
            if isinstance(entry, Plan):
                used += max(0.0, last - begun)
                begun = last = entry.time
            elif not isinstance(entry, Header):
                last = max(last, entry.time)
        return used + max(0.0, last - begun)


class Writer:
    """Appends to a results file, with an exclusive lock on it; a new file gets ``header``, which others must match.

    Raises ``ResultsError`` if it cannot be used, has results of another sweep, or another process writes it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        file: BinaryIO | None = None
        try:
            # Not truncated: until it is locked, the file may belong to another sweep that has just begun.
            self._file = file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            _lock(file, path)
            found = read(path) if path.stat().st_size else None
            if found is not None and found.header.fingerprint != header.fingerprint:
                raise ResultsError(
                    f"{path}: has results of another sweep ({found.header.name}; its base configuration, command or "
                    "steps differ): give another file with --output"
                )
            if found is not None:
                self._file.truncate(found.complete_bytes)
                self._file.seek(0, os.SEEK_END)
            else:
                self.append(header)
        except (FtmonError, OSError) as error:
            if file is not None:
                file.close()
            if isinstance(error, FtmonError):
                raise
            raise ResultsError(f"{path}: cannot be written: {error.strerror}") from None

    def append(self, entry: Entry) -> None:
        """Write one entry, which is on disk when this returns; raise ``FtmonError`` if that fails."""
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise FtmonError(f"{self.path}: cannot be written: {error.strerror}; make room and run it again") from None

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()


def read(path: Path) -> Results:
    """Return the contents of a results file, which may be in use by a writer.

    Raises ``ResultsError`` if it is missing, not a results file, or of another version.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ResultsError(f"{path}: is larger than 1 GiB, so it is not a results file")
        data = path.read_bytes()
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from None
    complete = data.rfind(b"\n") + 1
    lines = data[:complete].splitlines()
    header = _header(path, lines[0] if lines else b"")
    entries: list[Entry] = [header]
    for number, line in enumerate(lines[1:], 2):
        try:
            entries.append(_decoder.decode(line))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ResultsError(f"{path}:{number}: is no entry of a results file: {error}") from None
    return Results(header, entries, complete)


def is_results(path: Path) -> bool:
    """Return whether a file begins like a results file of any version."""
    try:
        with path.open("rb") as file:
            return file.read(16).startswith(b'{"type":"sweep"')
    except OSError:
        return False


def verdicts(rows: list[Row]) -> dict[Verdict, int]:
    """Return the number of rows by verdict."""
    return Counter(row.verdict for row in rows)


class _Version(msgspec.Struct):
    type: str
    format: int


def _header(path: Path, line: bytes) -> Header:
    try:
        version = msgspec.json.decode(line, type=_Version)
    except (msgspec.MsgspecError, ValueError):
        version = None
    if version is None or version.type != "sweep":
        raise ResultsError(f"{path}: is not a results file of a sweep; 'ftmon sweep SWEEP.yaml' writes one")
    if version.format != FORMAT:
        raise ResultsError(
            f"{path}: has results of format {version.format}, this version reads {FORMAT}: give another file with "
            "--output, or read it with the version that wrote it"
        )
    try:
        return msgspec.json.decode(line, type=Header)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ResultsError(f"{path}:1: is damaged: {error}") from None


def _lock(file: BinaryIO, path: Path) -> None:
    import fcntl  # absent on Windows, where no sweep runs

    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResultsError(f"{path}: another sweep is writing it") from None


def default_output(source: str) -> str:
    """Return the results file of a sweep file: ``lengths.results.jsonl`` for ``lengths.yaml``."""
    return f"{os.path.splitext(source)[0]}.results.jsonl"
