"""``ftmon predict`` beside peaks measured on H200s, and ``ftmon predict -- COMMAND`` of scripts that know no ftmon."""

import json
from pathlib import Path
from typing import Any

import pytest
import rank_jobs

SCRIPTS = Path(__file__).parent / "scripts"
DATA = Path(__file__).parents[2] / "bench" / "data" / "h200_peaks.jsonl"
MIB = 1 << 20
QWEN = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
PLAIN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    **ADAMW,
}
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
}
LOOP = [
    "deepspeed", "--num_gpus", "1", str(SCRIPTS / "dry_loop.py"), "--model", "FOLDER", "--deepspeed_config",
    "plain",
]  # fmt: skip
TRAINER = ["torchrun", "--nproc_per_node=1", str(SCRIPTS / "dry_trainer.py"), "FOLDER", "auto", "out"]
OTHERS = {
    "never calls it": ("print('hello')\n", "ended without calling deepspeed.initialize"),
    "wrapped by DDP": (
        "import torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('nccl')\nmodel = DDP(torch.nn.Linear(4, 4).cuda())\n",
        "wrapped_by_DDP.py:4: DistributedDataParallel is not predicted",
    ),
    "wrapped by FSDP2": (
        "import torch, torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('nccl')\ntry:\n    fully_shard(torch.nn.Linear(4, 4).cuda())\n"
        "except Exception:\n    pass\n",
        "wrapped_by_FSDP2.py:5: fully_shard is not predicted",
    ),
    "trains by itself": (
        "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\nwhile True:\n"
        "    model(torch.ones(2, 4).cuda()).sum().backward()\n",
        "trains_by_itself.py:4: it trains without deepspeed.initialize",
    ),
    "no language model": (
        "import deepspeed, torch\nmodel = torch.nn.Linear(4, 4)\n"
        "deepspeed.initialize(model=model, config={'train_micro_batch_size_per_gpu': 1})\n",
        "Linear is no transformers model that takes input_ids and labels",
    ),
}
"""Scripts, and what is said of them."""


def measured(stage: int, adam: str) -> dict[str, Any]:
    """Return the line of the 0.5B model with DeepSpeed's or PyTorch's Adam, one sequence."""
    wanted = {"model": "qwen1.5-0.5b", "zero_stage": stage, "micro_batch": 1, "adam": adam}
    lines = [json.loads(line) for line in DATA.read_text().splitlines()]
    return next(
        line
        for line in lines
        if all(line[key] == value for key, value in wanted.items())
        and not line["gradient_checkpointing"]
        and not line["offload_optimizer"]
    )


MEASURED = [(3, "deepspeed"), (0, "torch")]
BF16 = {"bf16": {"enabled": True}}


class Predictions:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: dict[str, list[str]] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, model: dict[str, Any], settings: dict[str, Any], *words: str) -> None:
        for what, content in (("model", model), ("ds", settings)):
            (self.folder / f"{name}-{what}.json").write_text(json.dumps(content))
        files = [f"--model={self.folder}/{name}-model.json", f"--deepspeed={self.folder}/{name}-ds.json"]
        self.words[name] = [*files, *words]

    def make(self) -> None:
        answers = rank_jobs.predictions(list(self.words.values()), self.folder)
        self.answers = dict(zip(self.words, answers, strict=True))

    def found(self, name: str) -> dict[str, Any]:
        assert self.answers[name]["status"] == 0, self.answers[name]["output"]
        return json.loads(self.answers[name]["output"])


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Predictions:
    made = Predictions(tmp_path_factory.mktemp("predict"))
    for stage, adam in MEASURED:
        settings = {**BF16, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
        words = ("--optimizer", adam, "--sequence-length", "4096", "--capacity", str(16 << 30), "--explain", "--json")
        made.ask(f"measured-{stage}", QWEN, settings, *words)
    model = {**QWEN, "num_hidden_layers": 4, "vocab_size": 32000, "tie_word_embeddings": False}
    partition = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    words = ("--ranks", "3", "--sequence-length", "64", "--json")
    made.ask("layers", model, {**BF16, "zero_optimization": partition}, *words)
    small = {**QWEN, "num_hidden_layers": 1, "vocab_size": 512}
    profile = made.folder / "profile.txt"
    profile.write_text("kept")
    for stage in (2, 3):
        settings = {
            **BF16,
            "zero_optimization": {"stage": stage},
            "csv_monitor": {"enabled": True, "output_path": f"{made.folder}/logs"},
            "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(profile)},
        }
        made.ask(f"outputs-{stage}", small, settings, "--sequence-length", "8", "--json")
    made.ask("refused", small, {**BF16, "zero_optimization": {"stage": 7}})
    (made.folder / "config.json").write_text(json.dumps(MODEL))  # and no weights
    for name, settings in {"plain": PLAIN, "auto": AUTO}.items():
        (made.folder / name).write_text(json.dumps(settings))
    own = ["--json", "--sequence-length=64", "--script", "--"]
    scripts = {
        "loop": [*own, *LOOP],
        "trainer": [*own, *TRAINER],
        "branches": [*own, *LOOP, "--branch"],
        "changed": ["--what-if", "--capacity=8000000000", *own, "python", str(SCRIPTS / "dry_composed.py"), "FOLDER"],
    }
    for name, (text, _) in OTHERS.items():
        path = made.folder / f"{name.replace(' ', '_')}.py"
        path.write_text(text)
        scripts[name] = [*own, "python", str(path)]
    for name, words in scripts.items():
        made.words[name] = [str(made.folder) if word == "FOLDER" else word for word in words]
    made.make()
    return made


@pytest.mark.parametrize(("stage", "adam"), MEASURED)
def test_a_step_takes_what_was_measured_on_a_gpu(predictions, stage, adam):
    prediction = predictions.found(f"measured-{stage}")
    line = measured(stage, adam)
    rows = {row["seq_len"]: row for row in line["rows"]}
    assert prediction["parameters"] == line["params"]
    for point in prediction["points"]:
        phases = point["ranks"][0]["phases"]
        assert phases["init"]["allocated_peak_bytes"] / MIB == pytest.approx(line["after_init_peak_mib"], rel=0.005)
        row = rows[point["sequence_length"]]
        for phase in ("forward", "backward", "optimizer"):
            predicted = phases[phase]["allocated_peak_bytes"] / MIB
            assert predicted == pytest.approx(row[f"{phase}_allocated_peak_mib"], rel=0.005), phase
            assert phases[phase]["reserved_peak_bytes"] >= phases[phase]["allocated_peak_bytes"]
    (point,) = prediction["points"]
    assert (point["fits"], point["fails_in"]) == (False, "forward")


def test_deepspeeds_estimate_and_sums_made_by_hand_are_beside_the_prediction(predictions):
    found = predictions.found("measured-3")
    count, vocabulary, hidden = found["parameters"], QWEN["vocab_size"], QWEN["hidden_size"]
    assert found["made"]["estimate"]["bytes"] == 18 * count + 4 * vocabulary * hidden  # stage3.py, one rank
    assert predictions.found("layers")["made"]["estimate"]["bytes"] == 2 * predictions.found("layers")["parameters"]
    assert predictions.found("measured-0")["made"]["estimate"] is None, "DeepSpeed has no estimator of ZeRO 0"
    (point,) = found["points"]
    phases = point["ranks"][0]["phases"]
    logits = sum(phases["backward"]["logits"].values())
    assert logits / (4096 * vocabulary) == pytest.approx(round(logits / (4096 * vocabulary)), abs=0.01)
    assert logits >= (2 + 4) * 4096 * vocabulary
    parts = {part["name"]: part for part in found["explained"]}
    assert parts["parameters"]["bytes"] == 2 * count
    for name in ("parameters", "master_copies", "optimizer_states", "buckets"):
        assert parts[name]["predicted_bytes"] == pytest.approx(parts[name]["bytes"], rel=0.03), name
    highest = max(sum(phase["logits"].values()) for name, phase in phases.items() if name != "init")
    assert parts["logits"]["predicted_bytes"] == highest


def test_ranks_with_other_layers_take_other_memory_and_a_dry_run_writes_none_of_deepspeeds_outputs(predictions):
    # As measured with an 8B on 4 H200s: with offloaded states the first and the last rank, which hold the embedding's
    # and the head's gradients, peak higher than those between.
    (point,) = predictions.found("layers")["points"]
    peaks = [rank["phases"]["backward"]["allocated_peak_bytes"] for rank in point["ranks"]]
    assert [rank["rank"] for rank in point["ranks"]] == [0, 1, 2]
    assert min(peaks[0], peaks[2]) > peaks[1] + 16 * MIB, peaks
    assert point["nvml_bytes"] == max(rank["nvml_bytes"] for rank in point["ranks"])
    for stage in (2, 3):
        assert predictions.found(f"outputs-{stage}")["points"]
    assert (predictions.folder / "profile.txt").read_text() == "kept"
    assert not (predictions.folder / "logs").exists()


def test_what_deepspeed_refuses_or_a_script_decides_by_a_tensors_value_is_one_line_with_status_2(predictions):
    answer = predictions.answers["refused"]
    assert answer["status"] == 2
    (line,) = answer["output"].splitlines()
    assert "stage" in line or "zero_optimization" in line
    answer = predictions.answers["branches"]
    line = next(number for number, text in enumerate((SCRIPTS / "dry_loop.py").read_text().splitlines(), 1)
                if "arguments.branch and" in text)  # fmt: skip
    assert answer["status"] == 2
    assert f"dry_loop.py:{line}: it depends on a tensor's value, which a dry run does not have" in answer["output"]


PARAMETERS = 2 * 1024 * 128 + 4 * 128 * 128 + 3 * 128 * 256 + 3 * 128


def point(found: dict[str, Any]) -> dict[str, Any]:
    assert (found["ranks"], found["parameters"], found["trainable"]) == (1, PARAMETERS, PARAMETERS)
    (point,) = found["points"]
    assert (point["sequence_length"], point["micro_batch"]) == (64, 2)
    return point


@pytest.mark.parametrize("name", ["loop", "trainer"])
def test_a_script_has_the_states_of_its_model_and_configuration(predictions, name):
    # A Trainer of transformers has filled in what its configuration leaves to it (auto), under another ZeRO stage.
    parts = point(predictions.found(name))["ranks"][0]["phases"]["optimizer"]["parts"]
    assert parts["master_copies"] == pytest.approx(4 * PARAMETERS, rel=0.03)
    assert parts["optimizer_states"] == pytest.approx(8 * PARAMETERS, rel=0.03)
    assert 2 * PARAMETERS <= parts["parameters"] <= 4.2 * PARAMETERS


def test_changes_of_a_script_are_predicted_as_it_would_make_them_without_running_it_or_its_weights(predictions):
    found = predictions.found("changed")
    changes = {one["name"]: one for one in found["what_if"]}
    assert set(changes) == {"expandable segments", "checkpointing", "micro-batch 2", "optimizer offload"}
    assert not any(one.get("refused") for one in changes.values()), changes
    assert changes["checkpointing"]["change"] == "model.gradient_checkpointing_enable()"
    assert changes["micro-batch 2"]["change"].startswith("train_micro_batch_size_per_gpu=2 (and batches of 2 rows) ")
    # The script's own AdamW cannot be offloaded: DeepSpeed's takes its place.
    offload = changes["optimizer offload"]
    assert offload["change"].endswith("deepspeed.ops.adam.DeepSpeedCPUAdam in place of its AdamW")
    assert offload["host_bytes"] > 12 * PARAMETERS > found["points"][0]["host_bytes"]
    assert offload["saved_bytes"] > 1 << 20
    assert any("LoRA" in note and "are not among the changes" in note for note in found["notes"])
    assert not (predictions.folder / "trained").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_followed_is_one_line_with_the_flags_to_use(predictions, name):
    answer = predictions.answers[name]
    assert answer["status"] == 2
    assert len(answer["output"].splitlines()) == 1, answer["output"]
    assert f"{name.replace(' ', '_')}.py" in answer["output"]
    assert OTHERS[name][1] in answer["output"]
    assert answer["output"].strip().endswith("use --model and --deepspeed instead")
