"""The APIs of W&B, trackio, TensorBoard and MLflow, each behind ``trackers.Client``.

Where a run goes, and with which key, is set by the variables of each system; without any, into files in the working
directory. The clients' packages are imported when a run is opened, as that takes seconds.
"""

import contextlib
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ...protocol.errors import TargetError
from ...protocol.text import sanitize
from .trackers import About, Client, Note, Row, Tracker, Value

PROJECT = "ftmon"  # Project or experiment, if the tracker's own variable names none
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
_FAILED = {"failed": "FAILED", "stopped": "KILLED"}
_OPEN_SECONDS = 20.0
_MOST_METRICS = 1_000  # Metrics in one request of MLflow: what its server accepts


class Wandb:
    """Weights & Biases. Without a key, or if its server cannot be reached, the run is recorded offline."""

    float32 = False

    def __init__(self) -> None:
        self.where = ""
        self._run: Any = None

    def open(self, about: About) -> None:
        os.environ["WANDB_SILENT"] = "true"
        os.environ.setdefault("GOMAXPROCS", "1")  # of its service, whose idle threads wake each other
        wandb = import_module("wandb")
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, disable_job_creation=True,
            init_timeout=_OPEN_SECONDS, finish_timeout=_OPEN_SECONDS, x_disable_meta=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        named: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": about.run}
        named |= {} if about.replayed else {"id": re.sub(r"[^A-Za-z0-9_-]", "-", about.run), "resume": "allow"}
        try:
            self._run = wandb.init(**named, settings=settings)
        except wandb.UsageError:  # no key
            self._run = wandb.init(**named, settings=settings, mode="offline")
        except Exception as error:  # of many types: a wrong key, no answer
            print(f"wandb: {without_secrets(str(error))}; recording offline instead", file=sys.stderr)
            wandb.teardown()  # its service would go on with the run of this id
            self._run = wandb.init(**named, settings=settings, mode="offline")
        # Without a step of W&B's own, rows whose step falls after a resume are kept.
        self._run.define_metric("*", step_metric="train/global_step")
        offline = f"offline; to upload it: wandb sync {Path(self._run.dir).parent}"
        self.where = offline if self._run.offline else self._run.url or ""

    def configure(self, facts: Mapping[str, Value]) -> None:
        self._run.config.update(dict(facts), allow_val_change=True)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"train/global_step": row.step, **row.values, "_timestamp": row.time})
        disk = os.statvfs(self._run.dir)
        if not disk.f_bavail:  # on which it reports nothing
            raise TargetError(f"{self._run.dir}: no space left on the device")

    def alert(self, note: Note) -> None:
        self._run.alert(note.title, note.text, level=_LEVELS[note.severity])

    def close(self, state: str, ended: float) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(state in _FAILED))


class Trackio:
    """trackio: a database in its own folder, a Space, or a server."""

    float32 = False

    def __init__(self) -> None:
        self.where = ""
        self._run: Any = None
        self._trackio: Any = None
        self._warned = ""

    def open(self, about: About) -> None:
        self._trackio = trackio = import_module("trackio")
        warnings.simplefilter("always")
        warnings.showwarning = self._note_warning  # how it reports what it could not write
        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", PROJECT), about.run, resume="never" if about.replayed else "allow",
            auto_log_gpu=False, auto_log_cpu=False, embed=False,
        )  # fmt: skip
        self.where = str(self._run.url or trackio.utils.TRACKIO_DIR)

    def configure(self, facts: Mapping[str, Value]) -> None:
        self._run.config.update(facts)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"train/global_step": row.step, **row.values}, step=row.step)
        self._raise_warning()

    def alert(self, note: Note) -> None:
        level = self._trackio.AlertLevel[_LEVELS[note.severity]]
        self._run.alert(note.title, note.text, level, step=note.step)
        self._raise_warning()

    def close(self, state: str, ended: float) -> None:
        if self._run is not None:
            self._run.finish()
            self._raise_warning()

    def _note_warning(self, message: "Warning | str", *_: Any) -> None:
        self._warned = str(message)

    def _raise_warning(self) -> None:
        warned, self._warned = self._warned, ""
        if warned:
            self._run._warned_failures.clear()  # otherwise it reports the next failure of this kind no more
            raise TargetError(without_secrets(warned.replace("User code will continue, but ", "")))


class TensorBoard:
    """Event files of TensorBoard, in ``TENSORBOARD_LOGGING_DIR`` or ``runs/``, without TensorFlow."""

    float32 = True

    def __init__(self) -> None:
        self.where = ""
        self._file: Any = None
        self._writer: Any = None  # None: the next event begins another file

    def open(self, about: About) -> None:
        folder = Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or "runs", about.run).absolute()
        if about.replayed and folder.exists() and any(folder.iterdir()):
            raise TargetError(f"{folder}: has a run already, whose curves would be drawn twice; remove it first")
        self._file = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self.where = str(folder)
        self._write([])

    def configure(self, facts: Mapping[str, Value]) -> None:
        text = "\n".join(f"    {name}: {facts[name]}" for name in facts)
        self._write([self._event(0, time.time(), [self._text("configuration", text)])])

    def log(self, rows: Sequence[Row]) -> None:
        value = import_module("tensorboard.compat.proto.summary_pb2").Summary.Value
        self._write(
            self._event(row.step, row.time, [value(tag=name, simple_value=row.values[name]) for name in row.values])
            for row in rows
        )

    def alert(self, note: Note) -> None:
        text = self._text(f"alerts/{note.severity}", f"**{note.title}** {note.text}")
        self._write([self._event(note.step, note.time, [text])])

    def close(self, state: str, ended: float) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, events: Iterable[Any]) -> None:
        try:
            if self._writer is None:
                self._writer = self._file(self.where, max_queue_size=1_000)
            for event in events:
                self._writer.add_event(event)
            self._writer.flush()
        except OSError as error:  # with which the writer's thread has ended
            self._writer = None
            raise TargetError(f"{self.where}: {error.strerror or error}") from None

    @staticmethod
    def _event(step: int, at: float, values: list[Any]) -> Any:
        summary = import_module("tensorboard.compat.proto.summary_pb2").Summary(value=values)
        return import_module("tensorboard.compat.proto.event_pb2").Event(wall_time=at, step=step, summary=summary)

    @staticmethod
    def _text(tag: str, text: str) -> Any:
        metadata = import_module("tensorboard.plugins.text.metadata").create_summary_metadata(tag, "")
        tensor = import_module("tensorboard.util.tensor_util").make_tensor_proto([text])
        value = import_module("tensorboard.compat.proto.summary_pb2").Summary.Value
        return value(tag=tag, metadata=metadata, tensor=tensor)


class Mlflow:
    """MLflow: ``MLFLOW_TRACKING_URI``, or the SQLite database ``mlflow.db``."""

    float32 = False

    def __init__(self) -> None:
        self.where = ""
        self._client: Any = None
        self._run = ""

    def open(self, about: About) -> None:
        # Its own retries, of minutes, are replaced by those of ``report.Feed``.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').absolute()}"
        with _reported():
            client = import_module("mlflow").MlflowClient(address)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else client.create_experiment(name)
            tags = {"ftmon.run": about.run, "ftmon.replayed": str(about.replayed)}
            query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
            earlier = [] if about.replayed else client.search_runs([experiment], query)
            run = earlier[0] if earlier else client.create_run(experiment, int(about.started * 1000), tags, about.run)
        self._client, self._run = client, run.info.run_id
        self.where = f"{without_secrets(address)}, run {self._run}"

    def configure(self, facts: Mapping[str, Value]) -> None:
        with _reported():
            for name, value in facts.items():  # not as parameters, which cannot change when a job starts again
                self._client.set_tag(self._run, f"ftmon.{name}", str(value))

    def log(self, rows: Sequence[Row]) -> None:
        metric = import_module("mlflow.entities").Metric
        metrics = [
            metric(re.sub(r"[^\w\-./: ]", "_", name), value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        with _reported():
            for at in range(0, len(metrics), _MOST_METRICS):
                self._client.log_batch(self._run, metrics[at : at + _MOST_METRICS], synchronous=True)

    def alert(self, note: Note) -> None:
        with _reported():
            text = f"{note.severity}, step {note.step}: {note.title}: {note.text}"
            self._client.set_tag(self._run, f"ftmon.alert.{note.number}", text)

    def close(self, state: str, ended: float) -> None:
        if self._client is not None:
            with _reported():
                self._client.set_terminated(self._run, _FAILED.get(state, "FINISHED"), int(ended * 1000) or None)


@contextlib.contextmanager
def _reported() -> Generator[None, None, None]:
    """Raise what MLflow raises as a ``TargetError`` of one line without its secrets."""
    try:
        yield
    except ImportError as error:  # of what a database needs
        raise TargetError(f"{error}; pip install 'ftmon[mlflow]'") from None
    except import_module("mlflow.exceptions").MlflowException as error:
        raise TargetError(without_secrets(str(error))) from None


_USER = re.compile(r"(?<=://)[^/\s@]+@")
_SECRET = re.compile(r"(?i)key|token|secret|password")
_SHORTEST_SECRET = 4


def without_secrets(text: str) -> str:
    """Return the first line of a text of a client, without users in addresses and values of variables of secrets."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return sanitize(_USER.sub("", text).strip().partition("\n")[0], 300)


def _tracker(client: Callable[[], Client]) -> Tracker:
    """Return the tracker of a client, in a process whose output is the client's from now on, and discarded.

    The clients print, log and write tracebacks of their threads much, at worst addresses with keys.
    """
    discarded = os.open(os.devnull, os.O_WRONLY)
    os.dup2(discarded, 1)
    os.close(discarded)
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None
    return Tracker(client())


wandb, trackio, tensorboard, mlflow = (partial(_tracker, one) for one in (Wandb, Trackio, TensorBoard, Mlflow))
"""The targets of these names."""
