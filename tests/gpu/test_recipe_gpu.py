"""ftmon's own trainer on real GPUs: NCCL, bf16, fused Adam; each test uses what is there."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from ftmon.trainer.recipe import check, command, describe
from ftmon.trainer.recipe.decode import load
from ftmon.trainer.recipe.demo import DATA, demo_config
from ftmon.trainer.recipe.hardware import usable_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]
STEPS = 12


def train(folder: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    words = [f"training.max_steps={STEPS}", "schedule.warmup_steps=2", "output.log_every=1", f"output.dir={folder}/out"]
    resolved = check.resolve(demo_config([*words, *overrides]))
    path = folder / "train.yaml"
    path.write_text(describe.dump(resolved.config))
    environment = {**os.environ, **command.launch_environment(resolved), "HF_DATASETS_CACHE": str(folder / "cache")}
    environment.pop("FTMON_RUN", None)
    return subprocess.run(
        [*command.launch_command(resolved), str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+/\d+  loss (\S+)", text, re.MULTILINE)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["zero.stage=2"],
        ["zero.stage=3", "model.gradient_checkpointing=true"],
        ["zero.stage=0", "training.precision=fp16", "optimizer.kind=torch_foreach"],
        ["zero.stage=2", "zero.offload_optimizer=true", "optimizer.kind=torch_fused"],
    ],
    ids=["stage-2", "stage-3", "fp16", "offload"],
)
def test_the_demo_trains_on_all_gpus_and_its_model_loads(tmp_path: Path, overrides: list[str]) -> None:
    done = train(tmp_path, *overrides)
    assert done.returncode == 0, done.stdout
    found = losses(done.stdout)
    assert len(found) == STEPS
    assert found[-1] < found[0] - 0.5
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config.model_type == "qwen2"


def test_an_allocation_that_fails_on_the_gpu_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, "debug.fault=oom:step=3")
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stdout


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    loaded = load(None, ["model.config={model_type: qwen2}", f"data.path={DATA}", "run.ranks=99"])
    with pytest.raises(Exception, match=r"run\.ranks is 99, but \d+ GPUs? (is|are) visible"):
        check.resolve(loaded)
