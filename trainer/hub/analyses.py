"""A hub's analyses: detectors in its own process; predictions and traces of captured steps in background processes."""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from ...protocol.analysis.findings.alerts import Action, AlertStore
from ...protocol.analysis.findings.finding import Finding
from ...protocol.analysis.pipeline import Detectors
from ...protocol.analysis.stalls.tracker import ProcessFact, RankTracker
from ...protocol.errors import ProtocolError
from ...protocol.messages import wire
from ...protocol.messages.memory import Composition, OomReport, Prediction
from ...protocol.messages.telemetry import AllocatorEvents, Hello, Step
from ...protocol.messages.wire import Frame, Message
from ...protocol.run.end import ending_in_words
from ...protocol.run.rundir import ExitFile, LeftoversFile, RunDir, RunFile
from ...protocol.run.start import module_command
from ...protocol.text import sanitize
from .ranks import Answers
from .trace_worker import Found

_BATCH = 64  # Maximum steps in a batch; more do not stay in the processor's cache
_TRACEBACKS = 20  # Number of its own failures that are logged with a traceback


class Analysis:
    """Passes messages to tracker and detectors in their order. Main loop only.

    ``emit`` appends a conclusion to the stream and returns its number and time; ``keep`` writes an OOM report.
    """

    def __init__(
        self,
        run_file: RunFile,
        emit: Callable[[Message], tuple[int, float]],
        keep: Callable[[OomReport], OomReport] | None = None,
    ) -> None:
        self._emit = emit
        self.act: Callable[[Iterable[Action]], None] = lambda _: None  # Sends the actions that detectors request
        self._store = AlertStore()
        self.tracker = RankTracker(has_launcher=run_file.kind != "watch")
        self._detectors = Detectors(self.tracker, self._store, keep)
        self._steps: list[tuple[float, Step]] = []  # Steps collected for the detectors, with their times of receipt
        self._failures = 0

    def restore(self, frames: Iterable[Frame]) -> None:
        """Restore from the history that an earlier hub recorded; raises no alert."""
        frames = list(frames)
        self._guard(lambda: self.tracker.restore(frames))
        self._guard(lambda: self._detectors.restore(frames))

    def feed(self, seq: int, t: float, message: Message) -> None:
        """Analyse one message of the stream.

        Steps are collected, and the detectors process them in a batch: before the next message of another type, at
        ``_BATCH`` steps, or at ``flush``.
        """
        try:
            states = self.tracker.feed(seq, t, message)
            if states:
                self._conclude(states)
            if type(message) is Step:
                self._steps.append((t, message))
                if len(self._steps) >= _BATCH:
                    self.flush()
                return
            self.flush()
            alerts = self._detectors.feed(seq, t, message)
            if alerts:
                self._conclude(alerts)
        except Exception:
            self._failed()

    def flush(self) -> None:
        """Pass the collected steps to the detectors."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        try:
            alerts = self._detectors.steps(steps, self._failed)
            if alerts:
                self._conclude(alerts)
        except Exception:
            self._failed()

    def fact(self, fact: ProcessFact) -> None:
        """Analyse a fact of a rank's process."""
        self._guard(lambda: self._conclude(self.tracker.fact(fact)))

    def tick(self, now: float) -> None:
        """Run the detectors that depend on time, such as those for silent ranks."""
        self._guard(lambda: self._conclude(self.tracker.tick(now)))
        self._guard(lambda: self._conclude(self._detectors.tick(now)))

    def answered(self, action: Action, answers: Answers) -> None:
        """Analyse the stacks that a detector requested."""
        self._guard(lambda: self._conclude(self._detectors.stacks(time.time(), action, answers)))

    def begin_job(self) -> None:
        """Judge how each rank of the current job ended; later messages belong to the next job."""
        now = time.time()
        for judge in (self.tracker.close_job, self._detectors.tick, self._detectors.begin_job):
            self._guard(lambda judge=judge: self._conclude(judge(now)))
        self._guard(self.tracker.begin_job)

    def follow_on(self) -> None:
        """Reset for another training in the same processes; the ranks keep their state."""
        self._guard(lambda: self._conclude(self._detectors.begin_job(time.time())))

    def job_ended_first(self, left: LeftoversFile) -> None:
        """Record that the job's command ended before its ranks."""
        found = left.exit_code, left.count, left.processes
        self._guard(lambda: self._conclude(self._detectors.job_ended_first(left.time, *found)))

    def ended(self, end: ExitFile) -> None:
        """Record the job's end."""
        state: Any = end.state if end.state in ("finished", "failed", "stopped") else "failed"
        self._guard(lambda: self._conclude(self.tracker.ended(time.time(), state, end.exit_code, end.text)))
        self._guard(lambda: self._conclude(self._detectors.tick(time.time())))

    def put(self, finding: Finding) -> None:
        """Raise, update or resolve the alert of one of the hub's own findings."""
        self._guard(lambda: self._conclude(self._detectors.put(time.time(), finding)))

    def _conclude(self, messages: Iterable[Message]) -> None:
        for message in messages:
            # A rank's texts may exceed the size limit of a message: then the message is dropped.
            with contextlib.suppress(OverflowError, ProtocolError):
                wire.decode_body(wire.encode_body(message))
                self._emit(message)
        actions = self._detectors.drain_actions()
        if actions:
            self.act(actions)

    def _guard(self, act: Callable[[], None]) -> None:
        self.flush()
        try:
            act()
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """Log an exception of a detector: only its verdict is lost."""
        self._failures += 1
        if self._failures <= _TRACEBACKS:
            traceback.print_exc(file=sys.stderr)


_OWN = ("train", "demo")
_LONGEST_SECONDS = 1800.0
_ON_CPU = "the ranks train on the CPU, whose peaks are of the resident set; predictions are of a GPU's allocator"


class PredictionProcess:
    """Starts the prediction of a run of ftmon's trainer once a rank has reported its GPU, and emits it. Main loop only.

    The process uses only idle resources.
    """

    def __init__(self, run: RunDir, file: RunFile, emit: Callable[[Message], None]) -> None:
        self._run = run
        self._emit = emit
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._on_cpu = False  # Whether no rank has reported a GPU
        self._done = file.kind not in _OWN or not file.options.predict or not run.config.is_file()

    def restore(self, messages: Iterable[Message]) -> None:
        """Restore the prediction that an earlier hub sent."""
        if any(isinstance(message, Prediction) for message in messages):
            self._done = True

    def hello(self, hello: Hello) -> None:
        """Start the prediction at the first rank's ``Hello``."""
        if self._done or self._process is not None:
            return
        if hello.device.kind == "cpu":
            # A rank on a GPU also reports the CPU until its script uses the GPU.
            self._on_cpu = True
            return
        command = [sys.executable, "-P", "-m", "ftmon.trainer.predict.live", str(self._run.path)]
        command += [f"--gpu={hello.device.name}", f"--parent={os.getpid()}"]
        try:
            with (self._run.logs / "predict.log").open("ab") as log:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as error:
            self._end(f"its process cannot be started: {error.strerror}")
            return
        self._on_cpu = False
        self._until = time.monotonic() + _LONGEST_SECONDS

    def tick(self, stepped: bool = False) -> None:
        """Emit the prediction once it is available; ``stepped``: whether a rank has finished a step."""
        if self._process is None:
            if stepped and self._on_cpu and not self._done:
                self._end(_ON_CPU)
            return
        status = self._process.poll()
        if status is None:
            if time.monotonic() > self._until:
                self.close()
                self._end(f"it was not made within {_LONGEST_SECONDS / 60:.0f} min")
            return
        self._process = None
        try:
            found = msgspec.json.decode(self._run.prediction.read_bytes(), type=Prediction)
        except (OSError, msgspec.MsgspecError):
            self._end(f"its process ended ({ending_in_words(status, None)}): see logs/predict.log")
            return
        self._done = True
        self._emit(found)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()
            self._process = None

    def _end(self, why: str) -> None:
        self._done = True
        self._emit(Prediction(time.time(), refused=sanitize(why, 400)))


_MOST_BYTES = 64 << 20  # Maximum bytes of waiting traces; further ones are dropped and counted
_TRACE_ANALYSIS_LONGEST_SECONDS = 60.0
"""Time limit per trace, seconds; a trace that takes longer is dropped and its worker process ended."""


class TraceAnalysis:
    """Runs the worker process that analyses traces, without delaying the main loop.

    ``emit`` is called in the main loop.
    """

    def __init__(
        self, emit: Callable[[AllocatorEvents | Composition], None], post: Callable[[Callable[[], object]], None]
    ) -> None:
        self._emit = emit
        self._post = post
        self._queue: queue.SimpleQueue[tuple[str, bytes, int] | None] = queue.SimpleQueue()  # Sender, trace and era
        self._thread: threading.Thread | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._peer: Any = None  # The connection to it
        self._era = 0
        self._bytes = 0  # Bytes of the traces that have not been analysed yet
        self._closing = False
        self.dropped = 0  # Traces that were not analysed

    def submit(self, sender: str, body: bytes) -> None:
        """Queue a trace for analysis. Main loop only.

        ``body`` is an encoded ``StepTrace`` as received from the process ``sender``.
        """
        if self._bytes + len(body) > _MOST_BYTES:
            self.dropped += 1
            return
        self._bytes += len(body)
        self._queue.put((sender, body, self._era))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="traces", daemon=True)
            self._thread.start()

    def forget(self) -> None:
        """Discard the results of earlier traces because another job begins. Main loop only."""
        self._era += 1

    def finish(self, seconds: float) -> None:
        """Wait until the received traces are analysed, and post the results. Main loop only, at the end of the run."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
            self._thread = None

    def close(self) -> None:
        """End the worker."""
        self._closing = True
        self._queue.put(None)
        worker = self._worker
        if worker is not None:
            with contextlib.suppress(OSError):
                worker.kill()
        if self._thread is not None:
            self._thread.join(1.0)

    def _serve(self) -> None:
        """Pass traces to the worker one by one; this object's thread."""
        try:
            while (waiting := self._queue.get()) is not None and not self._closing:
                self._post(partial(self._found, *waiting, self._find(waiting[1])))
        finally:
            self._end_worker()

    def _found(self, sender: str, body: bytes, era: int, found: Found) -> None:
        self._bytes -= len(body)
        if found.error:
            self.dropped += 1
            print(f"a trace of {sender} was not analysed: {found.error}", file=sys.stderr, flush=True)
        if era == self._era:
            for message in found.messages:
                self._emit(message)

    def _find(self, body: bytes) -> Found:
        try:
            if self._worker is None:
                self._start_worker()
            self._peer.send_bytes(body)
            if not self._peer.poll(_TRACE_ANALYSIS_LONGEST_SECONDS):
                raise TimeoutError(f"no answer in {_TRACE_ANALYSIS_LONGEST_SECONDS:.0f} s")
            return msgspec.msgpack.decode(self._peer.recv_bytes(), type=Found)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._end_worker()
            return Found(error=str(error) or "its process has ended")

    def _start_worker(self) -> None:
        import multiprocessing  # here, as it takes a part of a hub's start, and few runs have a GPU

        self._peer, its_own = multiprocessing.Pipe()
        with its_own:
            self._worker = subprocess.Popen(module_command("ftmon.trainer.hub.trace_worker"), stdin=its_own.fileno())

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._peer.close()
            worker.kill()
            worker.wait()
