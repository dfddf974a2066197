"""ftmon's own trainer on real GPUs: NCCL, bf16, fused Adam; each test uses what is there."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from ftmon.trainer.recipe import start
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.start import DATA, demo_config
from ftmon_process import Ftmon
from small_shape import write_model_and_data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]
STEPS = 12


def train(folder: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    words = [f"training.max_steps={STEPS}", "schedule.warmup_steps=2", "output.log_every=1", f"output.dir={folder}/out"]
    folder.mkdir(exist_ok=True)
    resolved = resolve.resolve(demo_config([*words, *overrides]))
    path = folder / "train.yaml"
    path.write_text(write.dump(resolved.config))
    environment = {**os.environ, **start.launch_environment(resolved), "HF_DATASETS_CACHE": str(folder / "cache")}
    environment.pop("FTMON_RUN", None)
    return subprocess.run(
        [*start.launch_command(resolved), str(path)],
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


@pytest.mark.parametrize("overrides", [[], ["model.gradient_checkpointing=layers", "model.activation_offload=inputs"]])
def test_compiled_layers_give_near_losses_and_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    words = ["data.packing=true", "zero.stage=2", "run.ranks=1", *overrides]
    plain = train(tmp_path / "plain", *words, "model.compile=off")
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    compiled = train(tmp_path / "compiled", *words)
    assert plain.returncode == compiled.returncode == 0, compiled.stdout
    assert compiled.stdout.index("compiled decoder layers") < compiled.stdout.index("step 1/")
    # Batches with another number of documents, and the steps after the rehearsal, run the same code.
    assert "Recompiling" not in compiled.stdout[compiled.stdout.index("compiled decoder layers") :]
    assert losses(compiled.stdout) == pytest.approx(losses(plain.stdout), rel=2e-2)


def test_the_best_choices_are_measured_on_the_gpus(home: Ftmon, tmp_path: Path) -> None:
    write_model_and_data(tmp_path)
    done = home.run("train", "--init", "model", "data.jsonl", cwd=tmp_path, seconds=280)
    assert done.returncode == 0, done.stderr
    measured = [line for line in done.stdout.splitlines() if line.startswith("measured ")]
    assert measured, done.stdout
    for line in measured:
        assert re.search(r" tokens/s, \d+\.\d [MG]iB reserved$", line), line


def test_an_allocation_that_fails_on_the_gpu_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, "debug.fault=oom:step=3")
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stdout


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    loaded = load(None, ["model.config={model_type: qwen2}", f"data.path={DATA}", "run.ranks=99"])
    with pytest.raises(Exception, match=r"run\.ranks is 99, but \d+ GPUs? (is|are) visible"):
        resolve.resolve(loaded)


def test_fp16_updates_that_overflow_are_no_steps_and_do_not_advance_the_schedule(tmp_path: Path) -> None:
    # A loss scale of 2^40 is halved about twenty times before gradients are finite.
    scale = "deepspeed={fp16: {initial_scale_power: 40, hysteresis: 1}}"
    done = train(tmp_path, "zero.stage=2", "training.precision=fp16", scale)
    assert done.returncode == 0, done.stdout
    steps = re.findall(r"^step (\d+)/\d+  loss \S+  lr (\S+)", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(1, STEPS + 1))
    rates = [float(rate) for _, rate in steps]
    assert rates[1] == max(rates)
    assert rates[-1] == pytest.approx(0.1 * max(rates), rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_fused_loss_in_bf16_learns_as_full_logits_do(tmp_path: Path, stage: int) -> None:
    fused = losses(train(tmp_path / "fused", f"zero.stage={stage}").stdout)
    plain = losses(train(tmp_path / "plain", f"zero.stage={stage}", "model.fused_loss=off").stdout)
    assert fused == pytest.approx(plain, abs=0.05)
