"""Resuming and exporting on real GPUs: exact with dropout, from every ZeRO stage, and on fewer GPUs."""

import re
from pathlib import Path

import pytest
import rank_jobs
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.start import DATA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]
PROGRAM = Path(__file__).parents[1] / "support" / "resume_ranks.py"
STEPS = 9
BASE = [
    "model.config={model_type: llama, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 4,"
    " num_attention_heads: 4, num_key_value_heads: 2, attention_dropout: 0.1}",
    "tokenizer.vocab_size=1024",
    f"data.path={DATA}",
    f"training={{max_steps: {STEPS}, micro_batch: 2, grad_accumulation: 2, sequence_length: 128}}",
    "checkpoint={every: 3, keep: 9}",
    "output={log_every: 1}",
    "run.device=cuda",
    "model.compile=off",
    "model.attention=eager",  # backward passes of fused attention kernels add in another order each time
]
KINDS: dict[str, list[str]] = {
    "z0": ["zero.stage=0"],
    "z1": ["zero.stage=1"],
    "z2": ["zero.stage=2"],
    "z2-lora": ["zero.stage=2", "lora={rank: 8, dropout: 0.1}"],
    "z3": ["zero.stage=3"],
    "z3-lora": ["zero.stage=3", "lora={rank: 8, dropout: 0.1}"],
    "z2-offload": ["zero.stage=2", "zero.offload_optimizer=true", "optimizer.kind=torch_fused"],
    "z3-offload-parameters": ["zero={stage: 3, offload_parameters: true}"],
    "z0-no-masters": ["zero.stage=0", "optimizer={kind: adamw_bf16, master_weights: none}", "training.precision=bf16"],
    "z1-8bit": ["zero.stage=1", "optimizer.kind=adamw_8bit"],
    "z3-no-masters": ["zero.stage=3", "optimizer={kind: adamw_8bit, master_weights: none}", "training.precision=bf16"],
    "z0-muon": ["zero.stage=0", "optimizer.kind=muon"],
    "z2-muon": ["zero.stage=2", "optimizer={kind: muon, max_grad_norm: 0}"],
    "z3-muon": ["zero.stage=3", "optimizer={kind: muon, max_grad_norm: 0}"],
}


def losses(text: str) -> dict[str, str]:
    return dict(re.findall(r"^rank (\d+ \d+) (\S+)$", text, re.MULTILINE))


def train(folder: Path, jobs: list[tuple[str, list[str], str]], ranks: int) -> dict[str, str]:
    """Train jobs, each with a name, overrides and an output folder, in one process group; return what each printed."""
    paths: list[str] = []
    for name, words, out in jobs:
        loaded = load(None, [*BASE, f"run.ranks={ranks}", f"output.dir={folder}/{out}", *words])
        path = folder / f"{name}.yaml"
        path.write_text(write.dump(resolve.resolve(loaded).config))
        paths.append(str(path))
    resolved = resolve.resolve(load(None, [*BASE, f"run.ranks={ranks}"]))
    words = [*rank_jobs.launcher(resolved), str(PROGRAM), *paths]
    return rank_jobs.outputs(words, rank_jobs.environment_of(resolved, folder / "cache"), 280)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_by_bit_on_gpus(tmp_path: Path, kind: str) -> None:
    words = KINDS[kind]
    text = train(
        tmp_path,
        [("whole", words, "whole"), ("cut-5-it", words, "cut"), ("resumed", [*words, "checkpoint.resume=auto"], "cut")],
        ranks=len(usable_gpus()),
    )
    whole, resumed = losses(text["whole"]), losses(text["resumed"])
    assert f"0 {STEPS}" in resumed
    assert resumed == {key: loss for key, loss in whole.items() if key in resumed}
    # The final model was compared with the training's weights, tensor by tensor, before this was printed.
    assert re.search(r"final model: \S+ \(\d+ tensors compared", text["resumed"])


@pytest.mark.skipif(len(usable_gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["z0", "z2", "z3"])
def test_one_gpu_goes_on_from_two_with_the_same_global_batches(tmp_path: Path, kind: str) -> None:
    words = KINDS[kind]
    whole = losses(train(tmp_path, [("whole", words, "whole")], ranks=2)["whole"])
    there = f"checkpoint.resume={tmp_path}/whole/checkpoints/step-6"
    text = train(tmp_path, [("fewer", [*words, there, "training.grad_accumulation=4"], "fewer")], ranks=1)["fewer"]
    assert "the global batches are the same" in text
    fewer = losses(text)
    for step in range(7, STEPS + 1):
        over_ranks = sum(float.fromhex(whole[f"{rank} {step}"]) for rank in range(2))
        assert float.fromhex(fewer[f"0 {step}"]) == pytest.approx(over_ranks, rel=0.05)
