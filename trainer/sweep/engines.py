"""Engines that run a sweep's jobs elsewhere: Slurm through submitit, and Ray. Queues and hosts are the cluster's.

An engine's ``submit`` starts a job, ``poll`` returns how it ended, ``cancel`` ends it. A job measures
one configuration by the code of a local sweep (``work``), on a host that sees the sweep file, the data and
``FTMON_HOME`` under the same paths, and returns the row. ``measure_on`` keeps the rows; a job that is lost with its
host or process is an unfinished row, and is submitted again.

submitit's local executor, for trying the path on one host, has neither a queue nor an allocation of GPUs (every job
gets GPU 0): there a job takes free GPUs itself, by a lock on each.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from ...protocol.errors import FtmonError, UsageError
from ...protocol.run.rundir import home
from ...protocol.sweep.rows import (
    FORMAT,
    Budget,
    Ended,
    Entry,
    Header,
    Planned,
    Predicted,
    Results,
    Row,
    Settings,
    Started,
)
from ...protocol.text import first_line
from ..recipe.hardware import usable_gpus
from . import plan as spec
from .run import Session, StopError

ENGINES = ("local", "slurm", "ray", "submitit")  # Where a sweep's jobs run; ``submitit``: its local executor
_POLL_SECONDS = 1.0
_ATTEMPTS = 3  # of a job in one session, if it is lost
_MARGIN_MINUTES = 15  # of a Slurm job's limit: start, end, and waiting for empty GPUs
_PASSED = ("DS_ACCELERATOR", *spec.ALLOCATOR_ENVIRONMENT)  # variables that a job has as the sweep's process has them
_TEXT = 300


class Request(msgspec.Struct, frozen=True):
    """A job: one configuration to measure."""

    source: str  # The sweep file
    folder: str  # The sweep's working directory
    fingerprint: str
    settings: Settings
    repeat: int
    predicted: Predicted | None
    name: str  # Of the run
    gpus: int  # GPUs of the job; 0: it runs on the CPU
    environment: dict[str, str]
    visible: str | None = None  # The submitter's ``CUDA_VISIBLE_DEVICES``
    takes_gpus: bool = False  # The job takes free GPUs of its host itself; else those in its ``CUDA_VISIBLE_DEVICES``


class Lost(NamedTuple):
    """A job that ended without a row."""

    text: str


class Submitit:
    """Slurm, or processes of this host (``cluster="local"``), through submitit; its files are in a folder."""

    def __init__(self, folder: Path, cluster: str, minutes: int, options: dict[str, str]) -> None:
        self._module = _package("submitit", "slurm")
        if cluster == "slurm" and shutil.which("srun") is None:
            raise UsageError("--on slurm: no srun in PATH; run the sweep where jobs are submitted")
        self.takes_gpus = cluster == "local"
        self._folder, self._minutes, self._options = folder.absolute(), minutes, options
        self._cluster = cluster
        self._jobs: dict[str, Any] = {}

    def submit(self, request: Request) -> str:
        """Start a job; return its number."""
        executor = self._module.AutoExecutor(folder=self._folder, cluster=self._cluster)
        slurm = {f"slurm_{name}": value for name, value in self._options.items()}
        gpus = {"gpus_per_node": request.gpus} if request.gpus and not self.takes_gpus else {}
        executor.update_parameters(name=request.name, timeout_min=self._minutes, **gpus, **slurm)
        job = executor.submit(work, msgspec.json.encode(request))
        self._jobs[job.job_id] = job
        return job.job_id

    def poll(self, number: str) -> Row | Lost | None:
        """Return how a job ended; None: it waits or runs."""
        job = self._jobs.get(number) or self._earlier(number)
        if not job.paths.result_pickle.exists() and number in self._jobs and not job.done():
            return None
        try:
            return _row(job.result())
        except Exception as error:  # submitit has several, also of the job's own
            return Lost(_text(error))

    def cancel(self, number: str) -> None:
        """End a job, also one of an earlier session."""
        if not self.takes_gpus:
            self._earlier(number).cancel(check=False)
            return
        with contextlib.suppress(psutil.Error, ValueError):
            process = psutil.Process(int(number))
            if str(self._folder) in " ".join(process.cmdline()):  # not another process with its number
                process.send_signal(signal.SIGTERM)

    def _earlier(self, number: str) -> Any:
        kind = self._module.LocalJob if self.takes_gpus else self._module.SlurmJob
        return kind(self._folder, number)


class Ray:
    """The Ray cluster of ``RAY_ADDRESS``, or the one of this host. A job is a task, which Ray never runs again."""

    takes_gpus = False

    def __init__(self) -> None:
        self._ray = _package("ray", "ray")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False)
        except ConnectionError as error:
            raise UsageError(
                f"--on ray: no cluster at {address}: {_text(error)}; start one with 'ray start --head', or set "
                "RAY_ADDRESS"
            ) from None
        for number, handler in handlers.items():  # Ray installs its own
            signal.signal(number, handler)
        self._tasks: dict[str, Any] = {}

    def submit(self, request: Request) -> str:
        """Start a task; return its number."""
        most = max((node["Resources"].get("GPU", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        if request.gpus > most:  # such a task waits for ever
            raise UsageError(f"--on ray: a job needs {request.gpus} GPUs of one node, and the largest has {most:g}")
        # Ray would run the task of a lost node three times more: the sweep's own file decides that.
        remote = self._ray.remote(num_gpus=request.gpus, max_retries=0)(work)
        task = remote.options(name=request.name).remote(msgspec.json.encode(request))
        number = task.hex()
        self._tasks[number] = task
        return number

    def poll(self, number: str) -> Row | Lost | None:
        """Return how a task ended; None: it waits or runs."""
        task = self._tasks.get(number)
        if task is None:
            return Lost("its session ended")
        if not self._ray.wait([task], timeout=0)[0]:
            return None
        try:
            return _row(self._ray.get(task))
        except Exception as error:  # the worker, its node, or the task
            return Lost(_text(error))

    def cancel(self, number: str) -> None:
        """End a task. Its process ends at once, and the launcher of the run it measured ends that."""
        if (task := self._tasks.get(number)) is not None:
            self._ray.cancel(task, force=True)


Engine = Submitit | Ray  # Runs jobs, which are known by a number. A finished job of an earlier session is known, too.


def engine(name: str, results: Path, timeout: float, options: dict[str, str]) -> Engine:
    """Return the engine of a name of ``ENGINES``, other than ``local``.

    ``results`` is the sweep's file; submitit's files are in ``NAME.jobs`` beside it. ``timeout``: of one run, seconds.
    ``options``: of ``sbatch``, by name. Raises ``UsageError`` if its package is not installed, or there is no cluster.
    """
    if name == "ray":
        return Ray()
    folder = results.with_name(f"{results.name.removesuffix('.results.jsonl')}.jobs")
    return Submitit(folder, "local" if name == "submitit" else name, int(timeout // 60) + _MARGIN_MINUTES, options)


def _package(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(f"--on needs the package {name}; run: pip install 'ftmon[{extra}]'") from None


def _row(answer: bytes) -> Row:
    return msgspec.json.decode(answer, type=Row)


def _text(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return first_line(lines[0] if lines else type(error).__name__, _TEXT)


class Jobs:
    """The jobs of a session: submitted, polled, and kept as rows."""

    def __init__(self, of: Engine, session: Session, gpus: Callable[[Settings], int], most: int) -> None:
        self._engine, self._session = of, session
        self._gpus = gpus  # GPUs of a configuration's job
        self._most = most  # Jobs at a time
        self._open: dict[str, tuple[Planned, int, float]] = {}  # Configuration, repeat and submission time, by number
        self._attempts: Counter[tuple[str, int]] = Counter()

    def measure(self, runs: Sequence[tuple[Planned, int]], progress: Callable[[], object]) -> None:
        """Run configurations, each with its repeat; ``progress`` is called after each row.

        Raises ``StopError`` if the session ends before all have a row.
        """
        waiting = deque(runs)
        given_up = 0
        try:
            while waiting or self._open:
                self._session.check()
                while waiting and len(self._open) < self._most:
                    self._submit(*waiting.popleft())
                for number in list(self._open):
                    ended = self._engine.poll(number)
                    if ended is None:
                        continue
                    planned, repeat, begun = self._open.pop(number)
                    if isinstance(ended, Row) and ended.verdict != "unfinished":
                        self._session.keep(ended)
                        progress()
                        continue
                    text = ended.text or "the job was ended" if isinstance(ended, Row) else ended.text
                    self._session.lost(_unfinished(planned.settings, repeat, begun, text))
                    again = self._attempts[str(planned.settings), repeat] < _ATTEMPTS
                    waiting.extend([(planned, repeat)] * again)
                    given_up += not again
                time.sleep(_POLL_SECONDS)
        finally:
            for number, (planned, repeat, begun) in self._open.items():  # the session ends before them
                self._engine.cancel(number)
                self._session.lost(_unfinished(planned.settings, repeat, begun, "the sweep ended"))
            self._open.clear()
        if given_up:
            text = f"{given_up} runs were lost {_ATTEMPTS} times"
            raise StopError(Ended(time.time(), "failure", text))

    def _submit(self, planned: Planned, repeat: int) -> None:
        session, wanted = self._session, self._session.spec
        request = Request(
            *(os.path.abspath(wanted.source), os.getcwd(), spec.fingerprint(wanted), planned.settings, repeat),
            *(planned.predicted, session.next_name, self._gpus(planned.settings)),
            {"FTMON_HOME": str(home()), **{name: os.environ[name] for name in _PASSED if name in os.environ}},
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            self._engine.takes_gpus,
        )
        number = self._engine.submit(request)
        session.lines.begins(planned.settings, repeat, planned.predicted)
        session.started(planned.settings, repeat, job=number)
        self._attempts[str(planned.settings), repeat] += 1
        self._open[number] = planned, repeat, time.time()


def recover(of: Engine | None, started: Started) -> Row:
    """Return the row of a job of a killed session: its own if it ended meanwhile, else an unfinished one."""
    found = of.poll(started.job) if of is not None else None
    if isinstance(found, Row):
        return found
    if of is not None:
        of.cancel(started.job)
    return _unfinished(started.settings, started.repeat, started.time, "the sweep was killed")


def _unfinished(settings: Settings, repeat: int, begun: float, text: str) -> Row:
    now = time.time()
    return Row(settings, "unfinished", now, round(now - begun, 3), repeat, text=text)


class _One(Session):
    name = ""

    @property
    def next_name(self) -> str:
        return self.name


def work(encoded: bytes) -> bytes:
    """Measure the configuration of a ``Request`` on this host; return its row. Both are JSON."""
    request = msgspec.json.decode(encoded, type=Request)
    for name in _PASSED:
        os.environ.pop(name, None)
    os.environ.update(request.environment)
    os.chdir(request.folder)
    interrupts: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, _frame: interrupts.append(number))
    try:
        with _gpus_for(request):
            row = _measured(request, lambda: bool(interrupts))
    except FtmonError as error:
        row = Row(request.settings, "refused", time.time(), repeat=request.repeat, text=first_line(str(error), _TEXT))
    finally:
        signal.signal(signal.SIGTERM, earlier)
    return msgspec.json.encode(row)


def _measured(request: Request, interrupted: Callable[[], bool]) -> Row:
    wanted = spec.read(request.source)
    if spec.fingerprint(wanted) != request.fingerprint:
        raise UsageError(f"{request.source}: has changed since the sweep began, or differs on this host")
    wanted = wanted._replace(budget=Budget())
    entries: list[Entry] = []
    header = Header(FORMAT, wanted.name, wanted.source, request.fingerprint, wanted.axis_names, 0, 0, time.time())
    lines = spec.Lines(wanted, lambda text: print(text, flush=True))
    session = _One(wanted, entries.append, Results(header, [], 0), lines, False, interrupted)
    session.name = request.name
    with contextlib.suppress(StopError):  # it was interrupted, or GPUs were not empty: the row says so
        session.measure(request.settings, request.repeat, request.predicted)
    rows = [entry for entry in entries if isinstance(entry, Row)]
    return rows[-1] if rows else _unfinished(request.settings, request.repeat, time.time(), "the job was ended")


@contextlib.contextmanager
def _gpus_for(request: Request) -> Generator[None]:
    """Give the job its GPUs in ``CUDA_VISIBLE_DEVICES``, and check their number."""
    if not request.gpus:  # without the variable the job would see every GPU of the host
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        yield
        return
    if not request.takes_gpus:
        _check_number(usable_gpus(), request.gpus)
        yield
        return
    if request.visible is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = request.visible
    gpus = usable_gpus()
    _check_number(gpus, request.gpus, exactly=False)
    with _taken(gpus, request.gpus) as taken:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
        yield


def _check_number(gpus: Sequence[str], needed: int, exactly: bool = True) -> None:
    if len(gpus) < needed or (exactly and len(gpus) != needed):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UsageError(f"the job needs {needed} GPUs and has {len(gpus)} (CUDA_VISIBLE_DEVICES: {seen})")


@contextlib.contextmanager
def _taken(gpus: Sequence[str], needed: int) -> Generator[list[str]]:
    """Lock GPUs that no other job of this user has; wait until there are enough."""
    folder = home()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        with contextlib.ExitStack() as held:
            taken: list[str] = []
            for gpu in gpus:
                file = held.enter_context((folder / f"gpu-{gpu.replace('/', '_')}.lock").open("w"))
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    taken.append(gpu)
                if len(taken) == needed:
                    yield taken
                    return
        time.sleep(_POLL_SECONDS)
