"""Predicts the memory of a run of ftmon's trainer in a background process that uses only idle resources."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import msgspec

from ....protocol.messages.prediction import Prediction
from ....protocol.messages.telemetry import Hello
from ....protocol.messages.wire import Message
from ....protocol.run.endings import ending_in_words
from ....protocol.run.rundir import RunDir, RunFile
from ....protocol.text import sanitize

_OWN = ("train", "demo")
_LONGEST_SECONDS = 1800.0
_ON_CPU = "the ranks train on the CPU, whose peaks are of the resident set; predictions are of a GPU's allocator"


class PredictionProcess:
    """Starts the prediction once the ranks have reported their kind of GPU, and emits it. Main loop only."""

    def __init__(self, run: RunDir, file: RunFile, emit: Callable[[Message], None]) -> None:
        self._run = run
        self._emit = emit
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._on_cpu = False
        """Whether no rank has reported a GPU."""
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
        try:
            with (self._run.logs / "predict.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, f"--gpu={hello.device.name}", f"--parent={os.getpid()}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
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
