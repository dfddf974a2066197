"""Resuming is exact: on CPU ranks, in mid-epoch, with dropout, for every ZeRO stage, with adapters and offload."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import rank_jobs

pytest.importorskip("deepspeed")

import torch
from ftmon.protocol.errors import UsageError
from ftmon.trainer.recipe.chat import session
from ftmon.trainer.recipe.chat.session import load as load_chat
from ftmon.trainer.recipe.checkpoint import manifest
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.start import DATA

pytestmark = pytest.mark.timeout(1800)  # the jobs of all tests run in the first one's fixture
STEPS = 7
BASE = [
    "model.config={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,"
    " num_attention_heads: 2, num_key_value_heads: 1, attention_dropout: 0.2}",
    "tokenizer.vocab_size=300",
    f"data.path={DATA}",
    "data.limit=60",
    "optimizer.lr=5e-3",
    f"training={{max_steps: {STEPS}, micro_batch: 2, grad_accumulation: 2, sequence_length: 32, rehearsal: false}}",
    "checkpoint={every: 4, keep: 9, at_end: true}",
    "output={log_every: 1}",
    "run={device: cpu, threads: 1}",
]
LORA = ["lora={rank: 4, dropout: 0.2}", "optimizer.lr=2e-2"]
NO_MASTERS = ["training.precision=bf16", "optimizer.master_weights=none"]
KINDS: dict[str, list[str]] = {
    "z0": ["zero.stage=0"],
    "z0-bf16": ["zero.stage=0", "training.precision=bf16", "optimizer.kind=torch_fused"],
    "z1": ["zero.stage=1", "training.precision=bf16"],
    "z2": ["zero.stage=2"],
    "z2-offload": ["zero.stage=2", "zero.offload_optimizer=true", "optimizer.kind=torch_fused"],
    "z2-lora": ["zero.stage=2", *LORA],
    "z3": ["zero.stage=3"],
    "z3-lora": ["zero.stage=3", *LORA],
    "z1-shared": ["zero.stage=1", "training={sequence_parallel_size: 2, grad_accumulation: 4}"],
    "z0-no-masters": ["zero.stage=0", *NO_MASTERS, "optimizer.kind=adamw_bf16"],
    "z3-no-masters": ["zero.stage=3", *NO_MASTERS, "optimizer.kind=adamw_8bit"],
    "z2-muon": ["zero.stage=2", "training.precision=bf16", "optimizer={kind: muon, max_grad_norm: 0}"],
}
CUTS = {kind: random.Random(kind).randrange(5, STEPS) for kind in ("z0", "z2-offload", "z3")}
"""The step after which a run of each ZeRO stage is given up; two checkpoints were begun before it, so one is complete.

The other kinds go on from the fourth step of the whole run.
"""
OFTEN = "checkpoint.every=2"
FEWER = ("z0-bf16", "z2-lora", "z3")
ROBIN = ["zero.stage=2", "deepspeed.zero_optimization.round_robin_gradients=true"]
BY_ONE = ["run.ranks=1", "training.grad_accumulation=4"]
"""The same global batches on one rank."""


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.text: dict[str, str] = {}

    def job(self, name: str, *overrides: str, out: str = "", ranks: int = 2) -> str:
        words = [*BASE, f"run.ranks={ranks}", f"output.dir={self.path}/{out or name}", *overrides]
        resume = next((word.partition("=")[2] for word in words if word.startswith("checkpoint.resume=/")), None)
        if resume:  # is there before the job, but not yet
            Path(resume).mkdir(parents=True, exist_ok=True)
        loaded = load(None, words)
        path = self.path / f"{name}.yaml"
        path.write_text(write.dump(resolve.resolve(loaded).config))
        return str(path)

    def run(self, plan: list[dict[str, Any]]) -> None:
        environment = rank_jobs.environment_of(resolve.resolve(load(None, [*BASE, "run.ranks=2"])), self.path / "c")
        self.text = rank_jobs.sections(rank_jobs.forked(plan, environment, 1700))

    def losses(self, name: str) -> dict[str, str]:
        return dict(re.findall(r"^rank (\d+ \d+) (\S+)$", self.text[name], re.MULTILINE))

    def weights(self, name: str) -> "dict[str, torch.Tensor]":
        from safetensors.torch import load_file

        return load_file(self.path / name / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("resume"))
    jobs: list[str] = []
    for kind, words in KINDS.items():
        jobs.append(runs.job(f"whole-{kind}", *words))
        if kind == "z2":
            continue  # with offload and with adapters it is resumed
        if kind in CUTS:
            jobs.append(runs.job(f"cut-{CUTS[kind]}-{kind}", *words, OFTEN, out=f"resumed-{kind}"))
            jobs.append(runs.job(f"resumed-{kind}", *words))
        else:
            there = f"checkpoint.resume={runs.path}/whole-{kind}/checkpoints/step-4"
            jobs.append(runs.job(f"resumed-{kind}", *words, there))
    jobs.append(runs.job("term-3-z1", "zero.stage=1", "checkpoint.every=0"))
    jobs.append(runs.job("full-4-z2", "zero.stage=2", "checkpoint={every: 3, at_end: false, background: false}"))
    again = "checkpoint={every: 3, at_end: false}"
    jobs.append(runs.job("after-full", "zero.stage=2", again, out="full-4-z2"))
    step_4 = f"checkpoint.resume={runs.path}/whole-z2/checkpoints/step-4"
    for name, change in CHANGES.items():
        jobs.append(runs.job(f"changed-{name}", "zero.stage=2", step_4, change))
    adapters = f"checkpoint.resume={runs.path}/whole-z2-lora/checkpoints/step-4"
    jobs.append(runs.job("other-alpha", *KINDS["z2-lora"], adapters, "lora.alpha=32"))
    jobs.append(runs.job("other-optimizer", "zero.stage=2", step_4, "optimizer.kind=adamw_bf16"))
    jobs.append(runs.job("allowed", "zero.stage=2", step_4, CHANGES["seed"], "checkpoint.allow=[seed]"))
    short = "training.max_steps=2"
    jobs.append(runs.job("robin", *ROBIN, short))
    jobs.append(runs.job("no-robin", "zero.stage=2", f"checkpoint.resume={runs.path}/robin/checkpoints/step-2"))
    jobs.append(runs.job("unmerged", *KINDS["z3-lora"], "lora.merge=false", short))
    base = runs.path / "whole-z2" / "model"
    base.mkdir(parents=True, exist_ok=True)
    (base / "config.json").touch()
    jobs.append(runs.job("named", *KINDS["z3-lora"], "model.config=", f"model.name={base}", short))
    # One rank, killed in earnest while it may be writing.
    killed = runs.job("kill-5-z2", "zero.stage=2", OFTEN, ranks=1)
    alone = [
        runs.job("resumed-killed", "zero.stage=2", out="kill-5-z2", ranks=1),
        runs.job("whole-one", "zero.stage=2", ranks=1),
    ]
    for kind in FEWER:
        there = f"checkpoint.resume={runs.path}/whole-{kind}/checkpoints/step-4"
        alone.append(runs.job(f"fewer-{kind}", *KINDS[kind], there, *BY_ONE))
    there = f"checkpoint.resume={runs.path}/whole-z3-no-masters/checkpoints/step-4"
    alone.append(runs.job("fewer-8bit", *KINDS["z3-no-masters"], there, *BY_ONE))
    there = f"checkpoint.resume={runs.path}/robin/checkpoints/step-2"
    alone.append(runs.job("fewer-robin", *ROBIN, there, *BY_ONE))
    alone.append(runs.job("fewer-smaller", "zero.stage=2", step_4, "run.ranks=1"))
    runs.run(
        [
            {"module": "resume_ranks", "ranks": 2, "jobs": jobs},
            {"module": "resume_ranks", "ranks": 1, "jobs": [killed], "killed": True},
            {"module": "resume_ranks", "ranks": 1, "jobs": alone},
        ]
    )
    return runs


CHANGES = {"seed": "training.seed=7", "data": "data.limit=59", "model": "model.config.intermediate_size=96"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "z2"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(runs: Runs, kind: str) -> None:
    whole, resumed = runs.losses(f"whole-{kind}"), runs.losses(f"resumed-{kind}")
    # A run is given up before its step is saved. Of the checkpoints before it, every two steps, the last may not be
    # complete: it is written in the background. The one before it is, as the last waited for it.
    last = (CUTS[kind] - 1) // 2 * 2 if kind in CUTS else 4
    steps = {int(key.split()[1]) for key in resumed}
    assert min(steps) in ((last - 1, last + 1) if kind in CUTS else (5,))
    assert steps == set(range(min(steps), STEPS + 1))
    assert resumed == {key: loss for key, loss in whole.items() if key in resumed}
    first_weights, second = runs.weights(f"whole-{kind}"), runs.weights(f"resumed-{kind}")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first_weights.items())


def test_a_run_killed_with_sigkill_goes_on_and_sigterm_in_one_rank_saves_a_checkpoint_and_ends_all(runs):
    whole, resumed = runs.losses("whole-one"), runs.losses("resumed-killed")
    assert "0 7" in resumed
    assert resumed == {key: loss for key, loss in whole.items() if key in resumed}
    (step,) = re.findall(r"stopped on request after step (\d) of 7", runs.text["term-3-z1"])
    assert int(step) in (4, 5)
    assert f"checkpoints/step-{step}" in runs.text["term-3-z1"]
    assert [path.name for path in (runs.path / "term-3-z1" / "checkpoints").glob("step-*")] == [f"step-{step}"]


@pytest.mark.parametrize("name", list(CHANGES))
def test_what_changed_since_the_checkpoint_is_refused_by_name(runs: Runs, name: str) -> None:
    (line,) = [line for line in runs.text[f"changed-{name}"].splitlines() if line.startswith("refused")]
    if name == "model":
        assert re.search(r"is of another model: \S+ is 64x32 there and 96x32 here", line)
        return
    key = "data: the " if name == "data" else f"training.{name} was "
    assert key in line
    assert f"checkpoint.allow=[{name}]" in line


def test_states_of_another_optimizer_or_partition_and_adapters_of_another_scale_are_refused(runs):
    (line,) = [line for line in runs.text["other-optimizer"].splitlines() if line.startswith("refused")]
    assert "holds the optimizer states of adamw, and this run has adamw_bf16; set optimizer.kind" in line
    assert "step-4 has adapters of another scale; set lora.alpha=16" in runs.text["other-alpha"]
    (line,) = [line for line in runs.text["fewer-8bit"].splitlines() if line.startswith("refused")]
    assert "was written by 2 ranks, and the states of adamw_8bit without master weights cannot be divided" in line
    assert line.endswith("set run.ranks=2")
    (line,) = [line for line in runs.text["no-robin"].splitlines() if line.startswith("refused")]
    assert line.endswith("set deepspeed.zero_optimization.round_robin_gradients back")
    (line,) = [line for line in runs.text["fewer-robin"].splitlines() if line.startswith("refused")]
    assert "the states of adamw in round-robin order cannot be divided anew; set run.ranks=2" in line


def test_an_allowed_change_says_what_follows_and_a_smaller_global_batch_is_refused_with_the_fix(runs):
    assert "note: training.seed was 42 and is 7: the rest of this epoch" in runs.text["allowed"]
    assert "0 5" in runs.losses("allowed")
    assert "refused: " in runs.text["fewer-smaller"]
    assert "training.grad_accumulation=4 keeps it" in runs.text["fewer-smaller"]


@pytest.mark.parametrize("kind", FEWER)
def test_fewer_ranks_go_on_with_the_same_global_batches(runs: Runs, kind: str) -> None:
    assert "the global batches are the same" in runs.text[f"fewer-{kind}"]
    assert not list(runs.path.glob(f"whole-{kind}/checkpoints/*universal*")), "nothing is left of the conversion"
    whole, fewer = runs.losses(f"whole-{kind}"), runs.losses(f"fewer-{kind}")
    for step in range(5, STEPS + 1):
        over_ranks = sum(float.fromhex(whole[f"{rank} {step}"]) for rank in range(2))
        # Dropout is drawn anew; with another global batch the sums would be far apart.
        assert float.fromhex(fewer[f"0 {step}"]) == pytest.approx(over_ranks, rel=0.05)


def test_adapters_alone_are_saved_and_they_have_learned(runs: Runs) -> None:
    for kind in ("z2-lora", "z3-lora"):
        path = runs.path / f"whole-{kind}" / "checkpoints" / "step-4"
        found = manifest.examine(path)[0]
        assert found.manifest.base is not None
        assert all("lora_" in name for name in found.manifest.trained)
        (state, *_) = path.glob("*model_states.pt")
        saved: Any = torch.load(state, weights_only=False)
        frozen = set(found.manifest.parameters) - set(found.manifest.trained)
        assert frozen
        assert not frozen & set(saved["module"])
        base, adapted = runs.weights("whole-z2"), runs.weights(f"whole-{kind}")
        assert set(adapted) == set(base)


@pytest.mark.parametrize("kind", ["z0", "z0-bf16", "z2", "z3"])
def test_a_checkpoint_loads_for_a_chat_with_the_weights_that_were_trained(runs: Runs, kind: str) -> None:
    found = session.find(str(runs.path / f"whole-{kind}" / "checkpoints"))
    assert found.is_checkpoint
    assert f"after step {STEPS}" in found.text
    loaded = load_chat(found, "auto")
    weights: dict[str, torch.Tensor] = loaded.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in runs.weights(f"whole-{kind}").items())
    assert loaded.tokenizer.chat_template


def test_adapters_of_a_checkpoint_are_put_on_the_base_they_name_or_bring_random_weights_along(runs):
    assert "final model" in runs.text["named"]
    weights: dict[str, torch.Tensor] = load_chat(
        session.find(str(runs.path / "named" / "checkpoints" / "step-2")), "cpu"
    ).model.state_dict()
    base, final = runs.weights("whole-z2"), runs.weights("named")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[name], final[name])
    assert not torch.equal(weights[name], base[name])
    assert torch.equal(weights["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(runs.path / "unmerged" / "model")
    adapters = {name: one for name, one in loaded.named_parameters() if "lora_B" in name}
    assert adapters
    assert all(bool((one != 0).any()) for one in adapters.values())
    with pytest.raises(UsageError, match="adapters of a model with random weights"):
        load_chat(session.find(str(runs.path / "unmerged" / "checkpoints")), "cpu")


def test_the_final_model_has_a_card_and_its_own_settings(runs: Runs) -> None:
    folder = runs.path / "whole-z3" / "model"
    card = (folder / "README.md").read_text()
    assert "| optimizer steps | 7 of 8 examples |" in card
    assert "max_steps: 7" in card
    config = json.loads((folder / "config.json").read_text())
    assert config["use_cache"] is True
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]
    assert (folder / "chat_template.jinja").is_file()


def test_a_full_disk_stops_no_training_and_leaves_the_checkpoint_before_it(runs: Runs) -> None:
    text = runs.text["full-4-z2"]
    assert re.search(
        r"note: checkpoint step-6 could not be written: .*File too large; training continues, and the newest is step-3",
        text,
    )
    assert f"0 {STEPS}" in runs.losses("full-4-z2")
    names = {path.name for path in (runs.path / "full-4-z2" / "checkpoints").glob("step-*")}
    assert names == {"step-3", "step-6"}  # the second by the run that went on
    assert "0 4" in runs.losses("after-full")
