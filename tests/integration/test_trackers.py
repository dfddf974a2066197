"""W&B, trackio, TensorBoard and MLflow: a live run and a replayed recording, read back by each system's own reader."""

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import RecordedRun
from ftmon.protocol.run.rundir import RunDir
from ftmon.protocol.run.targets import TRACKERS
from ftmon.tui.source.imported import import_log
from hub_client import exit_of, fake_ranks, hub_gone, started
from streams import RUN, Stream, write

pytestmark = pytest.mark.timeout(1200)  # four clients are imported at a low priority
INSTALLED = [name for name in TRACKERS if find_spec(name)]
SECRETS = {
    name: f"{number:08x}5ec2e7" * 3
    for number, name in enumerate(("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "TRACKIO_WRITE_TOKEN"))
}
NAN_AT, LAST = 20, 200
ALERT = "rank 1 optimizer +0.9 GiB for 4 ms"


class Read(NamedTuple):
    """What a tracker's own reader finds of a run."""

    values: dict[str, list[tuple[int, float]]]
    """Steps and values of each name, in the order in which they were written."""
    alerts: str
    times: dict[int, float]
    """By step: the tracker's own, or ftmon's figure of it where that is the time of writing."""


def output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout


def read_wandb(folder: Path, _run: str) -> Read:
    values: dict[str, list[tuple[int, float]]] = {}
    alerts, times = "", {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for line in output(sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)).splitlines():
            record = json.loads(line)
            item = record.get("history", {}).get("item", {})
            step = item.get("train/global_step")
            for name, value in item.items():
                values.setdefault(name, []).append((step, float(value)))
            if "train/loss" in item:
                times[step] = item["_timestamp"]
            alerts += record.get("alert", {}).get("title", "")
    return Read(values, alerts, times)


def read_trackio(folder: Path, run: str) -> Read:
    def ask(*words: str) -> Any:
        return json.loads(output(sys.executable, "-m", "trackio.cli", *words, "--project", "ftmon", "--json"))

    (found,) = ask("list", "runs")["runs"]
    assert found == run or found["name"] == run
    values = {
        name: [
            (each["step"], float(each["value"]))
            for each in ask("get", "metric", "--run", run, "--metric", name)["values"]
        ]
        for name in ask("list", "metrics", "--run", run)["metrics"]
        if re.match("train/(global_step|loss)|system/timestamp", name)
    }
    times = dict(values["system/timestamp_seconds"])
    return Read(values, json.dumps(ask("list", "alerts")), times)


def read_tensorboard(folder: Path, run: str) -> Read:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found = accumulator(str(folder / "runs" / run), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    scalars = {name: found.Scalars(name) for name in found.Tags()["scalars"]}
    tensors = [each.tensor_proto for name in found.Tags()["tensors"] for each in found.Tensors(name)]
    texts = [each.string_val[0].decode() for each in tensors]
    values = {name: [(each.step, each.value) for each in some] for name, some in scalars.items()}
    return Read(values, "".join(texts), {each.step: each.wall_time for each in scalars.get("train/loss", [])})


def read_mlflow(folder: Path, run: str) -> Read:
    client = import_module("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("ftmon").experiment_id])
    assert (found.info.run_name, found.info.status) == (run, "FINISHED")
    metrics = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    values = {name: [(each.step, each.value) for each in some] for name, some in metrics.items()}
    return Read(values, str(found.data.tags), {each.step: each.timestamp / 1000 for each in metrics["train/loss"]})


READERS: dict[str, Callable[[Path, str], Read]] = {
    "wandb": read_wandb, "trackio": read_trackio, "tensorboard": read_tensorboard, "mlflow": read_mlflow,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the trackers' files into a folder of this module, and keys into the environment."""
    home = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTMON_HOME", str(home / "home"))
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("FTMON_RUN", raising=False)
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.chdir(home)
        yield


def exporters(run: RunDir) -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "ftmon.trainer.exporters" in words and str(run.path) in words and process.info["status"] != "zombie":
            found[words[-1]] = process
    return found


def opened(run: RunDir, name: str) -> list[str]:
    """Return the places of the run in a tracker, one for each process that opened it."""
    return re.findall("the run is there: (.*)", (run.logs / f"{name}-exporter.log").read_text())


@pytest.fixture(scope="module")
def live(_places: None) -> tuple[RunDir, Path]:
    """Make a live run whose exporters are killed once."""
    if not INSTALLED:
        pytest.skip("no tracker is installed")
    folder, go = Path.cwd(), Path("go").absolute()
    ranks = [{"rate": 20, "steps": LAST, "awaits": str(go)} for _ in range(2)]
    with started(fake_ranks(*ranks), report_to=INSTALLED) as run:
        logs = [run.logs / f"{name}-exporter.log" for name in INSTALLED]
        eventually(lambda: all(log.exists() for log in logs), "the exporters")
        eventually(lambda: all(opened(run, name) for name in INSTALLED), "the trackers", 400)
        killed = exporters(run)
        lines = "\n".join(" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
        assert not [name for name, secret in SECRETS.items() if secret in lines]
        for process in killed.values():
            process.send_signal(signal.SIGKILL)
        eventually(lambda: all(len(opened(run, name)) == 2 for name in INSTALLED), "other exporters", 400)
        go.touch()
        assert exit_of(run).exit_code == 0
        hub_gone(run)
    return run, folder


@pytest.mark.parametrize("name", TRACKERS)
def test_a_live_run_reaches_its_tracker_although_the_exporter_is_killed(name: str, live: tuple[RunDir, Path]) -> None:
    pytest.importorskip(name)
    run, folder = live
    found = READERS[name](folder, run.id)
    assert dict(found.values["train/loss"])[LAST] == pytest.approx(1 / LAST)
    assert dict(found.values["train/loss_finite"])[LAST] == 1.0
    log = (run.logs / "launcher.log").read_text()
    assert log.count(f"the {name}-exporter ended (killed by SIGKILL); starting another") == 1
    assert len(opened(run, name)) == 2
    assert len((run.logs / f"{name}-exporter.log").read_text().splitlines()) == 2, "nothing was dropped"


def test_no_key_is_in_the_run_directory_or_a_trackers_files(live: tuple[RunDir, Path]) -> None:
    run, folder = live
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert run.path.is_relative_to(folder)
    assert not [name for name, secret in SECRETS.items() if secret.encode() in content]


def resumed() -> Iterator[Frame]:
    """Give a run of 60 steps with a NaN whose second job begins at step 31 again."""
    seq = 0
    for stream, job in ((Stream(ranks=2, steps=60, finished=False), 1), (Stream(ranks=2, steps=60), 2)):
        for frame in stream.frames():
            message, t = frame.message, frame.t + (job - 1) * 100
            if isinstance(message, Step) and job == 2 and message.step <= 30:
                continue
            if isinstance(message, Step) and (job, message.step, message.rank) == (1, NAN_AT, 1):
                message = msgspec.structs.replace(message, loss=math.nan)
            if isinstance(message, Alert):
                message = msgspec.structs.replace(message, id=message.id + 10 * job, time=t)
            seq += 1
            yield Frame(seq, t, message)
            if seq == 1 or (job == 2 and frame.seq == 1):
                seq += 1
                yield Frame(seq, t, Job(job, t, "training", t, restart=job - 1))


@pytest.fixture(scope="module")
def recording(_places: None) -> Path:
    return write(Path("recording.sqlite").absolute(), resumed())


@pytest.mark.parametrize("name", TRACKERS)
def test_a_recording_is_replayed_with_its_times_falling_steps_and_alerts(name, recording, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))  # of a person without a key
    said = output(sys.executable, "-m", "ftmon.tui.cli", "export", str(recording), name, "-o", str(tmp_path))
    assert re.match(r"written: \d+ rows: ", said)
    found = READERS[name](tmp_path, RUN.id)
    steps = [step for step, _ in found.values["train/loss"]]
    assert sorted(steps) == sorted([*range(1, 61), *range(31, 61)]), "the steps that ran twice are there twice"
    if name in ("wandb", "tensorboard"):
        assert steps == [*range(1, 61), *range(31, 61)], "in their order"
    losses, flags = dict(found.values["train/loss"]), dict(found.values["train/loss_finite"])
    assert math.isnan(losses[NAN_AT])
    assert {step for step, flag in flags.items() if flag == 0.0} == {NAN_AT}
    first = next(frame for frame in resumed() if isinstance(frame.message, Step) and frame.message.step == 1)
    assert found.times[1] == pytest.approx(first.t, abs=0.01), "recorded, not replayed"
    assert ALERT in found.alerts
    if name in ("wandb", "tensorboard"):
        monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
        (folder,) = tmp_path.glob({"wandb": "wandb/offline-run-*", "tensorboard": "runs/*"}[name])
        imported = RecordedRun(import_log(folder, None).run.recording).steps(0)
        assert [step.step for step in imported] == [*range(1, 61)], "each step once"
        recorded = {step.step: step.host_us for step in RecordedRun(recording).steps(0)}
        assert [step.host_us for step in imported] == [pytest.approx(recorded[step.step], rel=0.1) for step in imported]
        assert {phase.name for phase in imported[0].phases} == {"data", "forward", "backward", "optimizer"}
