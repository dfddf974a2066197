"""The launcher of a run: starts the hub and the job, restarts a dead hub, and records the job's end.

``python -m ftmon.trainer.launch.launcher RUNDIR`` is detached from any terminal. It is the subreaper of everything the
job starts, so a dataloader worker whose rank was killed becomes its child and is found by the sweep. Signals are
forwarded to the job. A run that is tied to the command that started it is ended, as by SIGTERM, when that command is
gone.
"""

import argparse
import contextlib
import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ...protocol.analysis.deaths.logs import cancelled
from ...protocol.errors import FtmonError
from ...protocol.host.process import never_fail, this_process
from ...protocol.link.sockets import join_path
from ...protocol.run.end import LAUNCHER, EndRequest, ending_in_words, print_own, read_end_request, write_end_request
from ...protocol.run.rundir import ExitFile, LeftoversFile, RunDir, RunFile, RunOptions
from ...protocol.run.start import LauncherEnd, LauncherMessage, spawn_exporter, spawn_hub
from ...protocol.run.targets import EXPORTERS_END_SECONDS, METRICS
from ...protocol.text import counted
from ..host import processes
from ..host.end.kill import sweep
from .environment import executable_command, job_environment, push

_FIRST_DELAY_SECONDS = 0.2
_LONGEST_DELAY_SECONDS = 30.0
_HEALTHY_SECONDS = 60.0  # After a hub has run this long, the delay before the next start is reset


class HubKeeper:
    """Owns the hub process of one run, or another process beside it. One that ends with status 0 is not replaced.

    ``spawn`` starts it, with a file for its output.
    """

    def __init__(
        self, run: RunDir, spawn: Callable[[RunDir, BinaryIO], "subprocess.Popen[bytes]"] = spawn_hub, name: str = "hub"
    ) -> None:
        self._run = run
        self._spawn = spawn
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._delay = _FIRST_DELAY_SECONDS
        self._next_start = 0.0
        self._failed = False
        self.dismissed = False

    @property
    def pid(self) -> int | None:
        """The hub's pid, dead or alive; None before the first start."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the hub's process is running."""
        return not self._failed and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process in a new session, with its output in ``logs/NAME.log``."""
        self._started = time.monotonic()
        self._failed = False
        try:
            with self._log() as log:
                self._process = self._spawn(self._run, log)
        except OSError as error:  # memory or processes are exhausted; the job continues without a hub
            self._failed = True
            print_own(f"the {self._name} cannot be started: {error.strerror}; retrying")

    def tend(self) -> float | None:
        """Replace a dead hub when due; return the seconds until the next call (None: not before a signal arrives)."""
        if self.dismissed or (self._process is None and not self._failed):
            return None
        status = -1 if self._failed or self._process is None else self._process.poll()
        if status is None:
            return None
        now = time.monotonic()
        if status == 0:
            self.dismissed = True
            return None
        if self._next_start <= self._started:  # first poll since this hub died
            if now - self._started >= _HEALTHY_SECONDS:
                self._delay = _FIRST_DELAY_SECONDS
            self._next_start = now + self._delay
            self._delay = min(self._delay * 2, _LONGEST_DELAY_SECONDS)
            if not self._failed:
                print_own(f"the {self._name} ended ({ending_in_words(status, None)}); starting another")
        if now < self._next_start:
            return self._next_start - now
        self.start()
        return self.tend() if self._failed else None

    def _log(self) -> BinaryIO:
        try:
            return (self._run.logs / f"{self._name}.log").open("ab")
        except OSError:  # the run directory was removed, or the disk is full: the job continues without a log
            return open(os.devnull, "ab")

    def note_reaped(self, pid: int, status: int) -> bool:
        """Record that the launcher reaped the hub; return False if ``pid`` is not the hub."""
        if self._process is None or self._process.pid != pid:
            return False
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return True

    def wait(self, timeout: float, kill: bool = False) -> None:
        """Wait until the process has ended, for ``timeout`` seconds at most; then kill it, or leave it."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            if not kill:
                print_own(f"the {self._name} has not ended yet; leaving it")
                return
            self._process.kill()
            self._process.wait()

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        if self._process is not None:
            self._process.terminate()


TO_THE_JOB = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Forwarded to the job's process only; its launcher (torchrun, deepspeed) decides what its children receive."""
PASSED_ON = (signal.SIGINT, *TO_THE_JOB)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.5
"""Window in which equal signals count as one. timeout(1) and systemd signal every process of a group or service, so a
request reaches the launcher both directly and through the command that started the run."""


class Requests:
    """Signals waiting to be forwarded. ``note`` may be called from a signal handler."""

    def __init__(self) -> None:
        self._waiting: list[tuple[signal.Signals, float]] = []
        self._last: dict[signal.Signals, float] = {}

    def note(self, number: int) -> None:
        """Record one signal."""
        self._waiting.append((signal.Signals(number), time.monotonic()))

    def drain(self) -> list[signal.Signals]:
        """Return the signals to forward, in order; simultaneous requests to end count as one.

        Several SIGTERM or SIGHUP that wait here are one request, however far apart this process took them. A second
        SIGINT is another request, for a faster end.
        """
        waiting, self._waiting = self._waiting, []
        found: list[signal.Signals] = []
        for number, at in waiting:
            last = self._last.get(number)
            self._last[number] = at
            same = last is not None and at - last <= _SAME_SECONDS
            if number not in _ENDING or not (same or (number != signal.SIGINT and number in found)):
                found.append(number)
        return found


_ENOUGH_BYTES = 65_536


def cancelled_in(log: Path) -> str:
    """Return ``cancelled`` for the last 64 KiB of a file; empty also if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _ENOUGH_BYTES))
            return cancelled(file.read().decode("utf-8", "replace").splitlines())
    except OSError:
        return ""


_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_REAP_AFTER_SECONDS = 0.3  # Time for which an orphan stays a zombie, so that the hub can read its status from /proc
_LEFTOVER_GRACE_SECONDS = 1.5
_HUB_END_SECONDS = 60.0
_KILL_AGAIN_SECONDS = 1.0
_TROUBLE_SECONDS = 0.2


class Launcher:
    """One run's launcher.

    ``starter`` connects to the command that started it, if that waits; ``stdin``: the job reads this process's input.
    """

    def __init__(self, run: RunDir, starter: LauncherEnd | None = None, stdin: bool = False) -> None:
        self._run = run
        self._starter = starter
        self._stdin = stdin
        self._hub = HubKeeper(run)
        self._exporters: list[HubKeeper] = []
        self._job: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._requests = Requests()
        self._interrupts = 0
        self._end_request: EndRequest | None = None  # The request to end, in case ``intent.json`` cannot be written
        self._grace = 0.0
        self._kill_at: float | None = None
        self._reap_at: float | None = None
        self._wakeup, self._wakeup_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Run the job to its end; return the launcher's own exit status."""
        _become_subreaper()
        hangup = signal.getsignal(signal.SIGHUP)
        self._install_signals()
        started = self._run.read_run()
        self._grace = started.options.stop_grace
        with _disk_trouble("run.json"):
            self._run.write_run(msgspec.structs.replace(started, launcher=this_process()))
        self._send(LauncherMessage(launcher=this_process()))
        self._hub.start()
        self._start_exporters(started.options)
        self._send_key(started)
        environment = job_environment(self._run, os.environ)
        text = self._start_job(started.command, started.cwd, environment, nohup=hangup is signal.SIG_IGN)
        while self._status is None and not text:
            try:
                self._wait(self._tend())
                self._reap()
                self._check_starter()
                self._pass_on()
                self._kill_when_due()
            except Exception:  # on any error the launcher must still wait for the job's end
                traceback.print_exc()
                time.sleep(_TROUBLE_SECONDS)
        left = self._clear_leftovers()
        self._write_exit(text, left)
        if not self._hub.alive and not self._hub.dismissed:
            self._hub.start()  # the end of the run belongs in the recording too
        self._hub.wait(_HUB_END_SECONDS)
        deadline = time.monotonic() + EXPORTERS_END_SECONDS
        for exporter in self._exporters:
            exporter.ask_to_end()
        for exporter in self._exporters:
            exporter.wait(max(0.0, deadline - time.monotonic()), kill=True)
        return 0

    def _start_exporters(self, options: RunOptions) -> None:
        targets = [METRICS, *options.report_to] if options.metrics else options.report_to
        for target in dict.fromkeys(targets):
            self._exporters.append(HubKeeper(self._run, partial(spawn_exporter, target), f"{target}-exporter"))
        for exporter in self._exporters:
            exporter.start()

    def _tend(self) -> float | None:
        """Replace dead processes beside the job when due; return the seconds until the next call."""
        due = [keeper.tend() for keeper in (self._hub, *self._exporters)]
        return min((seconds for seconds in due if seconds is not None), default=None)

    def _send_key(self, started: RunFile) -> None:
        """Copy the run's key to the hosts that ssh or srun reaches; print the join command for the others."""
        hosts = started.options.multihost
        if hosts is None:
            return
        if hosts.by_hand:
            print_own(f"on each other host: ftmon run --join {shlex.quote(str(join_path(self._run)))} -- COMMAND")
        try:
            problems = push(self._run, hosts, os.environ)
        except (FtmonError, OSError) as error:
            problems = [str(error)]
        for problem in problems:
            print_own(f"{problem}; ranks there are not watched unless the run's directory is shared")

    def _start_job(self, command: list[str], cwd: str, environment: dict[str, str], nohup: bool) -> str:
        try:
            self._job = subprocess.Popen(
                executable_command(command, environment, cwd),
                cwd=cwd,
                env=environment,
                stdin=None if self._stdin else subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN) if nohup else None,
            )
        except OSError as error:
            text = f"{command[0]}: cannot be started: {error.strerror}"
            print_own(text)
            return text
        finally:
            _close_stdin()
        return ""

    def _install_signals(self) -> None:
        # Handlers rather than SIG_IGN: an exec resets a handler, so the job starts with the ordinary dispositions.
        signal.set_wakeup_fd(self._wakeup_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the signal itself wakes the main loop
        for number in PASSED_ON:
            signal.signal(number, lambda received, _frame: self._requests.note(received))

    def _wait(self, timeout: float | None) -> None:
        for due in (self._reap_at, self._kill_at):
            if due is not None:
                seconds = max(0.0, due - time.monotonic())
                timeout = seconds if timeout is None else min(timeout, seconds)
        sources: list[Any] = [self._wakeup]
        if self._starter is not None and self._starter.open:
            sources.append(self._starter)
        with contextlib.suppress(InterruptedError):
            select.select(sources, [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass

    def _reap(self, at_once: bool = False) -> None:
        """Reap dead children, ``_REAP_AFTER_SECONDS`` after the first was detected."""
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
                    any(keeper.note_reaped(pid, status) for keeper in (self._hub, *self._exporters))

    def _send(self, word: LauncherMessage) -> None:
        if self._starter is not None:
            self._starter.send(word)

    def _check_starter(self) -> None:
        """End the run if the command it is tied to is gone: no other process would wait for it or end it."""
        if self._starter is None or not self._starter.open or not self._starter.lost():
            return
        print_own("the command that started the run is gone; ending the run")
        self._intend(signal.SIGTERM, "the command that started it is gone")
        if self._kill_at is None:
            self._signal_job(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._grace

    def _pass_on(self) -> None:
        """Forward received signals to the job.

        SIGINT goes to its process group, as a terminal's ctrl-c would; a second one also sends TERM to all processes
        of the run, a third KILL. After SIGTERM the run has its grace period.
        """
        if self._job is None:
            return
        for number in self._requests.drain():
            print_own(f"received {number.name}; passed on to the job")
            if number in _ENDING:
                self._intend(number)
            if number in TO_THE_JOB:
                self._signal_job(number)
                if number == signal.SIGTERM and self._kill_at is None:
                    self._kill_at = time.monotonic() + self._grace
                continue
            self._interrupts += 1
            if self._status is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._job.pid, number)
            if self._interrupts > 1:
                self._signal_all(signal.SIGTERM if self._interrupts == 2 else signal.SIGKILL)

    def _intend(self, number: signal.Signals, why: str = "") -> None:
        """Record why the job ends; an earlier request is kept, unless it was a SIGHUP that the job survived."""
        earlier = read_end_request(self._run) or self._end_request
        if earlier is not None and earlier.verb != signal.SIGHUP.name:
            return
        self._end_request = EndRequest(number.name, time.time(), LAUNCHER, why=why)
        with _disk_trouble("intent.json"):
            write_end_request(self._run, number.name, LAUNCHER, why=why)

    def _signal_job(self, number: signal.Signals) -> None:
        # The job is not reaped before its status is known, so its pid cannot have been reused.
        if self._job is not None and self._status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._job.pid, number)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._members():
            with contextlib.suppress(PermissionError):
                processes.send_signal(process, number)

    def _kill_when_due(self) -> None:
        """Kill all processes of the run once its grace period is over, repeatedly until the job is gone."""
        now = time.monotonic()
        if self._kill_at is None or now < self._kill_at or self._status is not None:
            return
        print_own(f"the job has not ended {self._grace:g} s after it was asked to; killing it")
        self._kill_at = now + _KILL_AGAIN_SECONDS
        self._signal_all(signal.SIGKILL)

    def _members(self) -> list[processes.Process]:
        """Return the run's living processes: descendants but ftmon's own, and all with the run in their environment."""
        me = os.getpid()
        hub = None
        with contextlib.suppress(FtmonError):  # the disk fails: the run's processes must still be found and ended
            hub = self._run.living_hub()
        kept = (keeper.pid for keeper in (self._hub, *self._exporters) if keeper.pid)
        spared = {me, *kept, *([hub.process.pid] if hub else [])}
        table = {pid: process for pid, process in processes.table().items() if pid == me or pid not in spared}
        below = {process.pid for process in processes.descendants([me], table)}
        return processes.of_run(self._run.path, below, spared)

    def _clear_leftovers(self) -> list[processes.Process]:
        """End the processes that the job left running; return those that could not be ended.

        A wrapper script dies of SIGTERM at once while its ranks may still be saving: they get the rest of the grace
        period.
        """
        deadline = time.monotonic() + _LEFTOVER_GRACE_SECONDS
        while (members := self._members()) and time.monotonic() < deadline:
            self._reap(at_once=True)
            self._wait(0.1)
        if members:
            names = [f"{member.pid} ({member.name})" for member in members[:8]]
            with _disk_trouble("left.json"):
                self._run.write_leftovers(LeftoversFile(time.time(), self._status, len(members), names))
            how = "never began" if self._status is None else f"ended ({ending_in_words(self._status, None)})"
            count = counted(len(members), "process")
            print_own(f"the job {how} and left {count} to be ended: {', '.join(names)}")
            term = 2.0 if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            members = sweep(self._members, on_wait=self._between_polls, term_seconds=term)
        self._reap(at_once=True)
        return members

    def _between_polls(self) -> None:
        self._reap(at_once=True)
        self._check_starter()
        self._pass_on()

    def _write_exit(self, problem: str, left: list[processes.Process]) -> None:
        now = time.time()
        code = 127 if self._status is None else self._status
        text = problem or ending_in_words(code, None)
        end_request = read_end_request(self._run) or self._end_request
        if end_request is not None and not end_request.explains(code, now):
            end_request = None
        # SLURM signals the launcher too when it ends all processes of a job.
        may_be_slurm = code != 0 and (end_request is None or end_request.by == LAUNCHER)
        by_slurm = cancelled_in(self._run.logs / "launcher.log") if may_be_slurm else ""
        cause = "not-started" if problem else ""
        if by_slurm:
            state, text = "stopped", f"{by_slurm} ({text})"
        elif end_request is not None:
            # ftmon's own signals ended a job that hung: its exit code says nothing, and is not the command's status.
            how = "" if end_request.cause else f" ({text})"
            state, text, cause = end_request.state, end_request.text() + how, cause or end_request.exit_cause
        else:
            state = "finished" if code == 0 else "failed"
        if left:
            text += "; still there: " + ", ".join(f"pid {process.pid} in state {process.state}" for process in left)
        end = ExitFile(code, now, state, text, cause, [process.pid for process in left])
        self._send(LauncherMessage(end=end))
        with _disk_trouble("exit.json"):
            self._run.write_exit(end)
        print_own(f"the run {state}: {text}")


@contextlib.contextmanager
def _disk_trouble(name: str) -> Generator[None]:
    """Report, and otherwise ignore, a file that cannot be written."""
    try:
        yield
    except OSError as error:
        print_own(f"{name} cannot be written: {error.strerror}")


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print_own("cannot become a subreaper; leftovers are found by their environment alone")


def _close_stdin() -> None:
    """Close the launcher's copy of standard input, so that its writer gets EPIPE once the job closes it."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def main(argv: list[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.launch.launcher RUNDIR``; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.launch.launcher", description=__doc__)
    parser.add_argument("run", metavar="RUNDIR")
    parser.add_argument("--starter", type=int, metavar="FD", help="the line to the command that started the run")
    parser.add_argument("--stdin", action="store_true", help="the job reads this process's standard input")
    arguments = parser.parse_args(argv)
    never_fail()
    run = RunDir(arguments.run)
    try:
        starter = LauncherEnd(arguments.starter) if arguments.starter is not None else None
        run.check()
        return Launcher(run, starter, bool(arguments.stdin)).run()
    except (FtmonError, OSError) as error:
        print(error, file=sys.stderr)
        return error.exit_status if isinstance(error, FtmonError) else 1


if __name__ == "__main__":
    sys.exit(main())
