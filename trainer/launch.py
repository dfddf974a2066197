"""The launcher of a run: starts the hub and the job, keeps a hub alive, and writes down how the job ended.

``python -m ftmon.trainer.launch RUNDIR`` is detached from any terminal. It is the subreaper of everything the job
starts, so a dataloader worker whose rank was killed becomes its child and is found by the sweep.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from types import FrameType

import msgspec

from ..protocol.errors import FtmonError
from ..protocol.join import join_path
from ..protocol.process import this_process
from ..protocol.rundir import ExitFile, RunDir, RunFile
from . import processes
from .environment import job_environment
from .hubkeeper import HubKeeper
from .intent import LEFT_OVER, Intent, read_intent, write_intent
from .joining import push
from .several import Several
from .slurm import cancelled_in
from .sweep import sweep

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_REAP_AFTER_SECONDS = 0.3
"""An orphan of the job stays a zombie this long, so that the hub can read from /proc how it ended."""
_LEFTOVER_GRACE_SECONDS = 1.5
_HUB_END_SECONDS = 60.0
_LAUNCHER = "launcher"
"""Who asked for the end, where a signal came to the launcher."""


class Launcher:
    """One run's launcher."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._hub = HubKeeper(run)
        self._job: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._stop_requests: list[signal.Signals] = []
        self._stops_forwarded = 0
        self._reap_at: float | None = None
        self._wakeup, self._wakeup_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Run the job to its end; return the launcher's own exit status."""
        _become_subreaper()
        self._install_signals()
        started = self._run.read_run()
        with _disk_trouble("run.json"):
            self._run.write_run(msgspec.structs.replace(started, launcher=this_process()))
        self._hub.start()
        self._tell_other_hosts(started)
        text = self._start_job(started.command, started.cwd, job_environment(self._run, started.options, os.environ))
        while self._status is None and not text:
            self._wait(self._hub.tend())
            self._reap()
            self._forward_stops()
        left = self._clear_leftovers()
        self._write_exit(text, left)
        if not self._hub.alive and not self._hub.dismissed:
            self._hub.start()  # the end of the run belongs in the recording too
        self._hub.wait(_HUB_END_SECONDS)
        return 0

    def _tell_other_hosts(self, started: RunFile) -> None:
        """Bring the run's key to the hosts that ssh or srun reaches; say how the others join."""
        found = started.options.get("several")
        if found is None:
            return
        several = msgspec.convert(found, Several)
        if several.by_hand:
            print(f"ftmon: on each other host: ftmon run --join {join_path(self._run)} -- COMMAND", flush=True)
        try:
            problems = push(self._run, several, os.environ)
        except (FtmonError, OSError) as error:
            problems = [str(error)]
        for problem in problems:
            print(f"ftmon: {problem}; ranks there are not watched unless the run's directory is shared", flush=True)

    def _start_job(self, command: list[str], cwd: str, environment: dict[str, str]) -> str:
        """Start the job; return why it could not be, or an empty string."""
        try:
            self._job = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            text = f"{command[0]}: cannot be started: {error.strerror}"
            print(f"ftmon: {text}", flush=True)
            return text
        return ""

    def _install_signals(self) -> None:
        # Handlers rather than SIG_IGN: an exec resets a handler, so the job starts with the ordinary dispositions.
        signal.set_wakeup_fd(self._wakeup_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.signal(signal.SIGHUP, _nothing)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGTERM, self._on_stop)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        self._stop_requests.append(signal.Signals(number))

    def _wait(self, timeout: float | None) -> None:
        if self._reap_at is not None:
            until_reap = max(0.0, self._reap_at - time.monotonic())
            timeout = until_reap if timeout is None else min(timeout, until_reap)
        with contextlib.suppress(InterruptedError):
            select.select([self._wakeup], [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass

    def _reap(self, at_once: bool = False) -> None:
        """Collect dead children, a moment after the first was seen."""
        now = time.monotonic()
        if self._reap_at is None:
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    self._reap_at = now + _REAP_AFTER_SECONDS
        if not at_once and (self._reap_at is None or now < self._reap_at):
            return
        self._reap_at = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._job is not None and pid == self._job.pid:
                    self._status = self._job.returncode = os.waitstatus_to_exitcode(status)
                else:
                    self._hub.note_reaped(pid, status)

    def _forward_stops(self) -> None:
        """Pass a stop on: first as it came, to the job's group; a second one as TERM, a third as KILL, to all."""
        while self._stop_requests and self._job is not None:
            number = self._stop_requests.pop(0)
            if read_intent(self._run) is None:
                with _disk_trouble("intent.json"):
                    write_intent(self._run, number.name, _LAUNCHER)
            print(f"ftmon: received {number.name}; stopping the job", flush=True)
            if self._stops_forwarded == 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._job.pid, number)
            else:
                harder = signal.SIGTERM if self._stops_forwarded == 1 else signal.SIGKILL
                for process in self._members():
                    with contextlib.suppress(PermissionError):
                        processes.send_signal(process, harder)
            self._stops_forwarded += 1

    def _members(self) -> list[processes.Process]:
        """List what lives of the run: every descendant of ours but the hub, and whatever carries the run's mark."""
        me = os.getpid()
        hub = self._run.living_hub()
        spared = {me, *([self._hub.pid] if self._hub.pid else []), *([hub.process.pid] if hub else [])}
        below = {process.pid for process in processes.descendants([me], _without(processes.table(), spared - {me}))}
        return processes.of_run(self._run.path, below, spared)

    def _clear_leftovers(self) -> list[processes.Process]:
        """End what the job left running; return what could not be ended."""
        deadline = time.monotonic() + _LEFTOVER_GRACE_SECONDS
        members = self._members()
        while members and time.monotonic() < deadline:
            self._reap(at_once=True)
            self._wait(0.1)
            members = self._members()
        if members:
            names = ", ".join(f"{member.pid} ({member.name})" for member in members[:8])
            how = "never began" if self._status is None else _how_it_ended(self._status)
            # The hub reads this line (detectors/death.py).
            print(f"ftmon: the job ended ({how}) and left {len(members)} processes, ending them: {names}", flush=True)
            members = sweep(self._members, on_wait=lambda: self._reap(at_once=True))
        self._reap(at_once=True)
        return members

    def _write_exit(self, problem: str, left: list[processes.Process]) -> None:
        now = time.time()
        code = 127 if self._status is None else self._status
        text = problem or _how_it_ended(code)
        intent = read_intent(self._run)
        asked = intent is not None and intent.explains(code, now)
        # A signal to the launcher is SLURM's too, where it ends all that the job has started.
        by_slurm = cancelled_in(self._run.logs / "launcher.log") if code and (not asked or _by_signal(intent)) else ""
        cause = ""
        if by_slurm:
            state, text = "stopped", f"{by_slurm} ({text})"
        elif intent is not None and asked:
            state, text, cause = intent.state, f"{intent.text()} ({text})", intent.cause
        else:
            state = "finished" if code == 0 else "failed"
        if left:
            text += f"; {LEFT_OVER}: " + ", ".join(f"pid {process.pid} in state {process.state}" for process in left)
        with _disk_trouble("exit.json"):
            self._run.write_exit(ExitFile(code, now, state, text, cause))
        print(f"ftmon: the run {state}: {text}", flush=True)


@contextlib.contextmanager
def _disk_trouble(name: str) -> Generator[None]:
    """Go on without a file that a full disk does not take."""
    try:
        yield
    except OSError as error:
        print(f"ftmon: {name} cannot be written: {error.strerror}", flush=True)


def _without(table: dict[int, processes.Process], pids: set[int]) -> dict[int, processes.Process]:
    return {pid: process for pid, process in table.items() if pid not in pids}


def _by_signal(intent: Intent | None) -> bool:
    return intent is not None and intent.by == _LAUNCHER


def _how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {processes.signal_name(-code)}"


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Only wake the main loop."""


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("ftmon: cannot become a subreaper; leftovers are found by their environment alone", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.launch RUNDIR``; return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m ftmon.trainer.launch RUNDIR", file=sys.stderr)
        return 2
    run = RunDir(arguments[0])
    try:
        run.check()
        return Launcher(run).run()
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
