"""Real training on two CPU ranks under DeepSpeed: every ZeRO stage, stopping, the final model."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import rank_jobs

pytest.importorskip("deepspeed")

import torch
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.start import DATA
from safetensors.torch import load_file

BASE = [
    "model.config={model_type: qwen2, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1,"
    " num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}",
    "tokenizer.vocab_size=512",
    f"data.path={DATA}",
    "data.limit=160",
    "optimizer.lr=5e-3",
    "training={max_steps: 8, micro_batch: 4, grad_accumulation: 2, sequence_length: 64, rehearsal: false}",
    "output={log_every: 1}",
    "run={ranks: 2, device: cpu, threads: 1}",
]
OPT = (
    "model.config={model_type: opt, hidden_size: 64, ffn_dim: 128, num_hidden_layers: 1, num_attention_heads: 4,"
    " word_embed_proj_dim: 64, max_position_embeddings: 64}"
)
NEW_TOKENS = [f"<|new {number}|>" for number in range(200)]
JOBS: dict[str, list[str]] = {
    "stage-0": ["zero.stage=0", "training.rehearsal=true"],
    "stage-1": ["zero.stage=1"],
    "stage-2": ["zero.stage=2", "checkpoint.every=4"],
    "stage-3": ["zero.stage=3", "model.gradient_checkpointing=true", "training.rehearsal=true"],
    "bf16": ["zero.stage=1", "training.precision=bf16", "data.workers=1"],
    "offload": ["zero.stage=2", "zero.offload_optimizer=true", "optimizer.kind=torch_fused"],
    "foreach": ["optimizer.kind=torch_foreach"],
    "lora": ["zero.stage=2", "lora.rank=4", "optimizer.lr=2e-2"],
    "nf4": [
        "model.quantization=nf4",
        "model.config=",
        "lora={rank: 4, merge: false}",
        "model.gradient_checkpointing=selective",
        "training.rehearsal=true",
    ],
    # Its attention does not isolate documents: rows are packed, found to leak, and padded.
    "leaking": ["model.config=", OPT, "schedule.warmup_steps=2", "training.max_steps=4"],
    "leaking-padded": ["model.config=", OPT, "schedule.warmup_steps=2", "training.max_steps=4", "data.packing=false"],
    "few-rows": ["data.limit=20", "training.max_steps=2"],
    "by-time": ["checkpoint={minutes: 1e-6, keep: 9}"],
    "stop-at-3": ["checkpoint.keep=1", "checkpoint.every=1"],
    # Asked for the third time, after the evaluation of step 2.
    "stop-at-evaluation-3": ["evaluation={share: 0.1, every: 2}"],
    "from-folder": ["zero.stage=3", "model.config=", f"tokenizer.special_tokens={NEW_TOKENS}"],
    "other-model": ["checkpoint.resume={out}/stage-2", "model.config.hidden_size=32"],
    "too-few": ["data.limit=10"],
    "no-such-size": ["model.config.hidden_sise=32"],
    "odd-heads": ["model.config.num_attention_heads=7"],
    "no-number": ["zero.stage=3", "deepspeed.zero_optimization.sub_group_size=few"],
    "not-together": ["zero.stage=2", "deepspeed.gradient_predivide_factor=2.0"],
}
REFUSED = ("other-model", "too-few", "no-such-size", "odd-heads", "no-number", "not-together")


class Outcome:
    def __init__(self, out: Path, text: str) -> None:
        self.out = out
        self.text = rank_jobs.sections(text)

    def losses(self, name: str) -> dict[int, float]:
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/\d+  loss (\S+)", self.text[name])}

    def weights(self, name: str) -> "dict[str, torch.Tensor]":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.out / name / "model").state_dict()


def written_by_a_job_before(folder: Path) -> None:
    """Let a folder pass the checks that come before all jobs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").touch()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("recipe")
    out = folder / "out"
    paths: list[str] = []
    resolved: Any = None
    for name, overrides in JOBS.items():
        words = [word.replace("{out}", str(out)) for word in [f"output.dir={{out}}/{name}", *overrides]]
        if name in ("from-folder", "nf4"):
            words.append(f"model.name={out}/stage-2/model")
            written_by_a_job_before(out / "stage-2" / "model")
        loaded = load(None, BASE + words)
        resume = loaded.config.checkpoint.resume
        if resume not in ("never", "auto"):
            written_by_a_job_before(Path(resume))
        resolved = resolve.resolve(loaded)
        path = folder / f"{name}.yaml"
        path.write_text(write.dump(resolved.config))
        paths.append(str(path))
    shutil.rmtree(out)
    plan = [{"ranks": 2, "module": "recipe_ranks", "jobs": paths}]
    return Outcome(out, rank_jobs.forked(plan, rank_jobs.environment_of(resolved, folder / "cache"), 1400))


@pytest.mark.parametrize("name", ["stage-0", "stage-1", "stage-2", "stage-3", "bf16", "offload", "foreach"])
def test_the_loss_falls_in_every_stage_and_variant(outcome: Outcome, name: str) -> None:
    losses = outcome.losses(name)
    assert list(losses) == list(range(1, 9))
    assert losses[8] < losses[1] - 0.5


@pytest.mark.parametrize("name", ["stage-1", "stage-2", "offload", "foreach"])
def test_how_states_are_partitioned_changes_no_loss(outcome: Outcome, name: str) -> None:
    assert list(outcome.losses(name).values()) == pytest.approx(list(outcome.losses("stage-0").values()), abs=2e-3)


def test_rank_0_s_clock_asks_for_checkpoints_that_all_ranks_write_a_step_later(outcome: Outcome) -> None:
    names = {path.name for path in (outcome.out / "by-time" / "checkpoints").glob("step-*")}
    assert names == {f"step-{step}" for step in range(2, 9)}
    assert outcome.losses("by-time") == outcome.losses("stage-2")
    assert "checkpoint.minutes 1e-06" in outcome.text["by-time"]
    assert not (outcome.out / "stage-1" / "checkpoints").exists()


@pytest.mark.parametrize("name", [name for name in JOBS if name not in REFUSED and "stop-at" not in name])
def test_the_final_model_loads_and_is_as_good_as_it_was(outcome: Outcome, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = outcome.out / name / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": "The capital of France is Paris."},
        ],
        tokenize=False,
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    random = 6.24  # the loss of guessing among 512 tokens
    assert loss < random
    assert model.config.use_cache  # as the model type has it, whatever training does without


def test_a_saved_model_is_fine_tuned_further_with_more_tokens(outcome: Outcome) -> None:
    assert outcome.losses("from-folder")[1] < outcome.losses("stage-2")[1] - 0.5
    before, after = (outcome.weights(name)["model.embed_tokens.weight"] for name in ("stage-2", "from-folder"))
    assert len(before) < len(after)
    assert len(after) % 64 == 0
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(outcome.out / "from-folder" / "model")
    assert tokenizer.convert_tokens_to_ids(NEW_TOKENS)[-1] == len(tokenizer) - 1 < len(after)
    assert "AutoTokenizer makes a tokenizer of its own" not in "".join(outcome.text.values())


def test_adapters_alone_learn_and_are_merged_or_saved_alone_on_a_base_in_4_bits(outcome):
    losses = outcome.losses("lora")
    assert losses[8] < losses[1]
    assert not (outcome.out / "lora" / "model" / "adapter_config.json").exists()
    assert not any("lora" in name for name in outcome.weights("lora"))
    folder = outcome.out / "nf4" / "model"
    assert (folder / "adapter_config.json").exists()
    assert not (folder / "model.safetensors").exists()
    sizes = {name: re.search(r"([\d,]+) parameters", outcome.text[name]) for name in ("lora", "nf4")}
    assert sizes["nf4"].group(1) == sizes["lora"].group(1)
    adapters = load_file(folder / "adapter_model.safetensors")
    assert all(bool(tensor.any()) for name, tensor in adapters.items() if "lora_B" in name), "they start as zeros"


def test_a_request_to_one_rank_or_in_an_evaluation_stops_all_at_the_same_step_with_a_checkpoint(outcome):
    text = outcome.text["stop-at-3"]
    assert list(outcome.losses("stop-at-3")) == [1, 2, 3, 4]
    assert "stopped on request after step 4 of 8" in text
    assert [path.name for path in (outcome.out / "stop-at-3" / "checkpoints").glob("step-*")] == ["step-4"]
    assert list(outcome.losses("stop-at-evaluation-3")) == [1, 2]
    assert "stopped on request after step 2 of 8" in outcome.text["stop-at-evaluation-3"]
    folder = outcome.out / "stop-at-evaluation-3" / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == ["step-2"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other-model", "refused: checkpoint.resume: "),
        ("too-few", "refused: data: one step takes 16 examples "),
        ("no-such-size", "refused: model.config.hidden_sise: qwen2 has no such setting"),
        ("odd-heads", "refused: model.config.hidden_size: 64 is not a multiple of num_attention_heads, 7"),
        ("no-number", "refused: deepspeed: DeepSpeed refuses its keys: 1 validation error for DeepSpeedZeroConfig"),
        ("not-together", "refused: deepspeed: DeepSpeed refuses its keys: gradient_predivide_factor != 1.0"),
    ],
)
def test_what_only_the_ranks_can_find_out_is_refused_in_one_line(outcome: Outcome, name: str, words: str) -> None:
    (line,) = [line for line in outcome.text[name].splitlines() if line.startswith("refused")]
    assert words in line


def test_progress_lines_are_plain_and_rows_packed_where_that_fills_a_step(outcome):
    assert re.search(
        r"^step 8/8  loss \d\.\d{4}  lr 5\.00e-04  [\d,]+ tokens/s  [\d.]+ m?s/step$",
        outcome.text["stage-2"],
        re.MULTILINE,
    )
    assert "\x1b" not in outcome.text["stage-2"]
    assert re.search(
        r"^packing: \d+ rows of up to 64 tokens \(data.packing=false turns it", outcome.text["stage-0"], re.M
    )
    leaking = outcome.text["leaking"]
    assert "note: data.packing: documents of one row see each other in opt: each record is padded instead" in leaking
    assert outcome.losses("leaking") == outcome.losses("leaking-padded")
    rates = [re.findall(r"lr (\S+)", outcome.text[name]) for name in ("leaking", "leaking-padded")]
    assert rates[0] == rates[1]
    assert "note: data.packing: packed rows would not fill a step: each record is padded" in outcome.text["few-rows"]
    assert list(outcome.losses("few-rows")) == [1, 2]
