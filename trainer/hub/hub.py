"""The hub of a run: one process with one main loop over its sockets; it never makes a rank wait."""

import gc
import os
import signal
import socket
import sys
import time
from types import FrameType

from ... import __version__
from ...protocol.analysis.findings.finding import Finding
from ...protocol.analysis.hub_facts import NotListeningFacts, RestartFacts
from ...protocol.host.process import this_process
from ...protocol.run.rundir import HubFile, RunDir
from .assemblies import ActAssembly, EndAssembly, IntakeAssembly, JudgeAssembly, WatchAssembly
from .core import Core
from .sockets import PollLoop

STATS_SECONDS = 2.0


class Hub:
    """One hub: create it, then call ``run``."""

    def __init__(self, run: RunDir) -> None:
        self._lock = run.lock_hub()
        self._core = core = Core(run)
        self._loop = PollLoop(self._tick, core.stream.flush, lambda: self._intake.after_read())
        self._watch = WatchAssembly(core)
        self._judge = JudgeAssembly(core, self._watch)
        self._intake = IntakeAssembly(core, self._judge)
        self._act = ActAssembly(core, self._intake.agents, self._judge, self._loop)
        self._end = EndAssembly(core, self._watch, self._judge, self._intake, self._act.commands)
        self._loop.add(core.mailbox.fileno(), core.mailbox.drain)
        self._act.add_sources(self._loop)
        self._intake.add_sources(self._loop)
        self._status = 0
        self._announced = False
        self._next_stats = 0.0
        self._adopt()

    def run(self) -> int:
        """Serve until the run is over (or the hub receives a signal to end); return the exit status."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ctrl-c meant for the job
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._watch.start()
        self._intake.history.start()
        self._act.start()
        self._announced = self._announce()
        # Objects created so far never become garbage, and others are freed by reference count: collect rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        try:
            self._loop.run()
        finally:
            self._close()
        return self._status

    def _tick(self, now: float) -> None:
        self._watch.tick()
        self._intake.tick()
        self._judge.tick(now)
        self._act.tick(now)
        self._intake.commit()
        if self._end.tick(now):
            self._loop.stop()
        if now >= self._next_stats:
            self._next_stats = now + STATS_SECONDS
            self._intake.report()
            self._announced = self._announced or self._announce()

    def _announce(self) -> bool:
        """Write the connection file; False if the disk refuses it (each report retries)."""
        channels = self._core.channels
        content = HubFile(
            *(this_process(), channels.addresses, __version__, socket.gethostname(), time.time()),
            listen=channels.listening,
            server_key=channels.server_key,
            read_only=self._core.file.options.read_only,
        )
        try:
            self._core.run.write_hub(content)
        except OSError as error:
            print(f"hub.json cannot be written: {error}", file=sys.stderr)
            return False
        return True

    def _adopt(self) -> None:
        core = self._core
        history, put = core.history.frames, core.analysis.put
        self._judge.restore(history)
        self._intake.agents.restore(frame.message for frame in history)
        if history:
            last = history[-1].t
            put(Finding("hub_restarted", RestartFacts(last, time.time() - last), severity="info"))
        if core.damage is not None:
            put(Finding("recording_damaged", core.damage, severity="error"))
        if core.channels.problem:
            put(Finding("not_listening", NotListeningFacts(core.channels.problem), severity="error"))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Not 0, because the end was not requested by a command: the launcher starts another hub.
        self._status = 128 + number
        self._loop.stop()

    def _close(self) -> None:
        self._act.close()
        self._judge.close()
        self._intake.history.stop()
        self._watch.close()
        self._core.stream.flush()
        self._core.stream.recorder.close()
        self._core.channels.close()
        os.close(self._lock)
