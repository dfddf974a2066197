"""Analyses traces of captured steps one by one in a worker process."""

import contextlib
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from ....protocol.messages.memory import Composition
from ....protocol.messages.telemetry import AllocatorEvents
from ....protocol.run.spawn import module_command
from .trace_worker import Found, read_frame, write_frame

_MOST_BYTES = 64 << 20
"""Maximum bytes of waiting traces; further ones are dropped and counted."""
_LONGEST_SECONDS = 60.0
"""Time limit per trace, seconds; a trace that takes longer is dropped and its worker process ended."""


class _Waiting(NamedTuple):
    sender: str
    body: bytes
    era: int


class TraceAnalysis:
    """Runs the worker process that analyses traces, without delaying the main loop.

    ``emit`` is called in the main loop.
    """

    def __init__(
        self, emit: Callable[[AllocatorEvents | Composition], None], post: Callable[[Callable[[], object]], None]
    ) -> None:
        self._emit = emit
        self._post = post
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._era = 0
        self._bytes = 0
        """Bytes of the traces that have not been analysed yet."""
        self._closing = False
        self.dropped = 0
        """Traces that were not analysed."""

    def submit(self, sender: str, body: bytes) -> None:
        """Queue a trace for analysis. Main loop only.

        ``body`` is an encoded ``StepTrace`` as received from the process ``sender``.
        """
        if self._bytes + len(body) > _MOST_BYTES:
            self.dropped += 1
            return
        self._bytes += len(body)
        self._queue.put(_Waiting(sender, body, self._era))
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
                self._post(partial(self._found, waiting, self._find(waiting.body)))
        finally:
            self._end_worker()

    def _found(self, waiting: _Waiting, found: Found) -> None:
        """Emit the worker's results. Main loop."""
        self._bytes -= len(waiting.body)
        if found.error:
            self.dropped += 1
            print(f"a trace of {waiting.sender} was not analysed: {found.error}", file=sys.stderr, flush=True)
        if waiting.era == self._era:
            for message in found.messages:
                self._emit(message)

    def _find(self, body: bytes) -> Found:
        try:
            worker = self._worker or self._start_worker()
            assert worker.stdin is not None
            assert worker.stdout is not None
            write_frame(worker.stdin, body)
            if not select.select([worker.stdout], [], [], _LONGEST_SECONDS)[0]:
                raise TimeoutError(f"no answer in {_LONGEST_SECONDS:.0f} s")
            answer = read_frame(worker.stdout)
            if answer is None:
                raise EOFError("its process has ended")
            return msgspec.msgpack.decode(answer, type=Found)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._end_worker()
            return Found(error=str(error))

    def _start_worker(self) -> "subprocess.Popen[bytes]":
        self._worker = subprocess.Popen(
            module_command("ftmon.trainer.hub.analyses.trace_worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self._worker

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            # Closes its pipes, and waits for it; a trace that it did not read is flushed once more.
            with contextlib.suppress(BrokenPipeError), worker:
                pass
