"""The prediction beside a run on a real GPU: it uses no GPU itself, and the measured peaks agree with it."""

from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.messages.memory import Prediction
from ftmon.protocol.messages.telemetry import DeviceSample
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.start import demo_config
from ftmon.tui.model import RunModel
from ftmon.tui.model.waterfall import compared_phases
from ftmon_process import Ftmon

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]


def model_of(run: RunDir) -> RunModel:
    model = RunModel()
    with Reader(run.recording) as reader:
        for frame in reader.frames(0, 1_000_000):
            model.apply(frame)
    return model


@pytest.mark.timeout(900)
def test_a_run_is_predicted_beside_it_without_its_gpu_and_as_it_comes_out(home: Ftmon, tmp_path: Path) -> None:
    settings = ["run.ranks=1", "training.max_steps=100000", "model.compile=off", "training.rehearsal=false"]
    (tmp_path / "train.yaml").write_text(write.dump(demo_config(settings).config))
    assert home.run("train", str(tmp_path / "train.yaml"), "--detach", seconds=300).returncode == 0
    (run,) = home.runs()

    def predictions() -> list[Prediction]:
        if run.living_hub() is None:  # it answers once it has made the recording
            return []
        with Reader(run.recording) as reader:
            return [one.message for one in reader.frames(0, 1_000_000) if isinstance(one.message, Prediction)]

    (found,) = eventually(predictions, "the prediction", 600)
    eventually(lambda: model_of(run).ranks[0].step >= 3, "steps to compare", 300)
    home.run("kill", run.id, "--yes", seconds=120)
    assert found.refused == ""
    model = model_of(run)
    for one in compared_phases(model.ranks[0], found):
        assert not one.parted, one
    assert {one.phase for one in compared_phases(model.ranks[0], found)} == {"forward", "backward", "optimizer"}
    with Reader(run.recording) as reader:
        frames = reader.frames(0, 1_000_000)
    samples = [frame.message for frame in frames if isinstance(frame.message, DeviceSample)]
    names = {process.rank for sample in samples for process in sample.processes if sample.kind == "gpu"}
    assert names <= {0, None}
    mine = model.ranks[0].hello
    assert mine is not None
    foreign = [
        process.name for sample in samples for process in sample.processes
        if process.pid != mine.pid and "predict" in process.name
    ]  # fmt: skip
    assert not foreign, "the dry run has no context on the GPU"
