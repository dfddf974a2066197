"""ftmon's own trainer on real GPUs: NCCL, bf16, fused Adam; each test uses what is there."""

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ftmon.trainer.recipe import start
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.config.load import Loaded, load
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.start import DATA, demo_config
from small_shape import SMALL_SHAPE, write_model_and_data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]
STEPS = 12


def train(
    folder: Path, *overrides: str, loaded: Callable[[list[str]], Loaded] = demo_config
) -> "subprocess.CompletedProcess[str]":
    words = [f"training.max_steps={STEPS}", "schedule.warmup_steps=2", "output.log_every=1", f"output.dir={folder}/out"]
    folder.mkdir(exist_ok=True)
    resolved = resolve.resolve(loaded([*words, *overrides]))
    path = folder / "train.yaml"
    path.write_text(write.dump(resolved.config))
    environment = {**os.environ, **start.launch_environment(resolved), "HF_DATASETS_CACHE": str(folder / "cache")}
    environment.pop("FTMON_RUN", None)
    return subprocess.run(
        [*start.launch_command(resolved), str(path)], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip


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
def test_the_demo_trains_on_all_gpus_and_its_model_loads(tmp_path, overrides):
    done = train(tmp_path, *overrides)
    assert done.returncode == 0, done.stdout
    found = losses(done.stdout)
    assert len(found) == STEPS
    assert found[-1] < found[0] - 0.5
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config.model_type == "qwen2"


@pytest.mark.parametrize("overrides", [[], ["model.gradient_checkpointing=layers", "model.activation_offload=inputs"]])
def test_compiled_layers_give_near_losses_and_are_compiled_once(tmp_path, monkeypatch, overrides):
    words = ["data.packing=true", "zero.stage=2", "run.ranks=1", *overrides]
    plain = train(tmp_path / "plain", *words, "model.compile=off")
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    compiled = train(tmp_path / "compiled", *words)
    assert plain.returncode == compiled.returncode == 0, compiled.stdout
    assert compiled.stdout.index("compiled decoder layers") < compiled.stdout.index("step 1/")
    # Batches with another number of documents, and the steps after the rehearsal, run the same code.
    assert "Recompiling" not in compiled.stdout[compiled.stdout.index("compiled decoder layers") :]
    assert losses(compiled.stdout) == pytest.approx(losses(plain.stdout), rel=2e-2)


def test_the_best_choices_are_measured_on_the_gpus(home, tmp_path):
    write_model_and_data(tmp_path)
    done = home.run("train", "--init", "model", "data.jsonl", cwd=tmp_path, seconds=280)
    assert done.returncode == 0, done.stderr
    measured = [line for line in done.stdout.splitlines() if line.startswith("measured ")]
    assert measured, done.stdout
    for line in measured:
        assert re.search(r" tokens/s, \d+\.\d [MG]iB reserved$", line), line


def test_an_allocation_that_fails_on_the_gpu_ends_the_run(tmp_path):
    done = train(tmp_path, "debug.fault=oom:step=3")
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stdout


def test_more_ranks_than_gpus_are_refused(tmp_path):
    loaded = load(None, ["model.config={model_type: qwen2}", f"data.path={DATA}", "run.ranks=99"])
    with pytest.raises(Exception, match=r"run\.ranks is 99, but \d+ GPUs? (is|are) visible"):
        resolve.resolve(loaded)


def test_fp16_updates_that_overflow_are_no_steps_and_do_not_advance_the_schedule(tmp_path):
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
def test_the_fused_loss_in_bf16_learns_as_full_logits_do(tmp_path, stage):
    fused = losses(train(tmp_path / "fused", f"zero.stage={stage}").stdout)
    plain = losses(train(tmp_path / "plain", f"zero.stage={stage}", "model.fused_loss=off").stdout)
    assert fused == pytest.approx(plain, abs=0.05)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen3_moe": {"num_experts": 4, "output_router_logits": True, **EXPERTS},
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS},
}
PARTITIONED = ["zero.stage=3", "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"]


@pytest.mark.parametrize("adapters", ["", "lora={rank: 8, dropout: 0}"], ids=["whole", "adapters"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_partitioned_mixtures_have_the_losses_of_whole_ones(kind, adapters, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_and_data(tmp_path)  # of another kind, with a tokenizer for it
    shape = SMALL_SHAPE | {"vocab_size": 512, "hidden_size": 256, "head_dim": 16, "max_position_embeddings": 256}
    torch.manual_seed(2)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **MIXTURES[kind]}))
    made.save_pretrained(tmp_path / "mixture")
    common = [
        f"model.name={tmp_path}/mixture",
        f"tokenizer.name={tmp_path}/model",
        f"data={{path: {tmp_path}/data.jsonl, packing: true}}",
        "training={micro_batch: 2, grad_accumulation: 2, sequence_length: 128}",
        "optimizer.lr=1e-3",
        *filter(None, [adapters]),
    ]
    found: dict[str, list[float]] = {}
    for name, words in {"whole": ["zero.stage=1"], "partitioned": PARTITIONED}.items():
        done = train(tmp_path / name, *common, *words, loaded=partial(load, None))
        assert done.returncode == 0, done.stdout
        found[name] = losses(done.stdout)
    assert found["whole"][-1] < found["whole"][0] - 0.2
    assert found["partitioned"] == pytest.approx(found["whole"], rel=5e-3), "bf16 rounds sums in another order"
