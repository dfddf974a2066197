"""A process that predicts changes of a run, from its configuration: ``python -m ftmon.trainer.predict --what-if``."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...protocol.run.end import ending_in_words
from ...protocol.text import sanitize
from ..model.peaks import Answer, WhatIf

_MOST_BYTES = 64 << 20


class _Progress(msgspec.Struct):
    predicting: str


class DryRuns:
    """Predicts in a separate process, which ends with this one.

    ``words`` are options of ``ftmon predict``, ``environment`` the variables of the run that change its memory.
    """

    def __init__(
        self, config: str, words: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.found = WhatIf("running", time.monotonic())
        self._folder = tempfile.TemporaryDirectory(prefix="ftmon-what-if-")
        path = Path(self._folder.name) / "config.yaml"
        path.write_text(config)
        self._output, self._errors = Path(self._folder.name) / "answer", Path(self._folder.name) / "progress"
        command = [sys.executable, "-P", "-m", "ftmon.trainer.predict", "--what-if", "--json"]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, f"--background={os.getpid()}", *words, "--", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=cwd,
                env={**os.environ, **environment},
            )
        self._read = 0
        self._last = ""

    @property
    def running(self) -> bool:
        """Whether the answer has not been received yet."""
        return self.found.state == "running"

    def poll(self) -> bool:
        """Read new output of the process; return whether something changed."""
        if not self.running:
            return False
        changed = self._progress()
        status = self._process.poll()
        if status is None:
            return changed
        self._progress()
        self._finish(status)
        return True

    def cancel(self) -> None:
        """End the process."""
        if self.running:
            self._end()
            self._change("cancelled")

    def close(self) -> None:
        """End the process, and remove its files."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()

    def _progress(self) -> bool:
        with self._errors.open("rb") as file:
            file.seek(self._read)
            text = file.read(_MOST_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            try:
                progress = msgspec.json.decode(line, type=_Progress)
            except msgspec.MsgspecError:
                progress = None
            if progress is not None:
                self.found.done.append(sanitize(progress.predicting, 80))
            elif line.strip():
                # The file is a temporary copy: show the original name instead.
                self._last = sanitize(line.removeprefix("ftmon: ").replace(f"{self._folder.name}/", ""), 400)
        return bool(whole)

    def _finish(self, status: int) -> None:
        state, text = "failed", self._last or f"its process ended ({ending_in_words(status, None)})"
        if not status:
            try:
                self.found.answer = msgspec.json.decode(self._output.read_bytes()[:_MOST_BYTES], type=Answer)
                state, text = "done", ""
            except (OSError, msgspec.MsgspecError):
                text = "its answer cannot be read"
        self._change(state, text)
        self._folder.cleanup()

    def _change(self, state: str, text: str = "") -> None:
        self.found.state, self.found.text = state, text
