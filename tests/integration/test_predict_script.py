"""``ftmon predict -- COMMAND``: scripts that know nothing of ftmon, run up to ``deepspeed.initialize``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
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
    "deepspeed",
    "--num_gpus",
    "1",
    str(SCRIPTS / "dry_loop.py"),
    "--model",
    "FOLDER",
    "--deepspeed_config",
    "plain",
]
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def predictions(folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(MODEL))  # and no weights
    for name, settings in {"plain": PLAIN, "auto": AUTO}.items():
        (folder / name).write_text(json.dumps(settings))
    own = ["--json", "--sequence-length=64", "--script", "--"]
    words = {
        "loop": [*own, *LOOP],
        "trainer": [*own, *TRAINER],
        "branches": [*own, *LOOP, "--branch"],
        "changed": ["--what-if", "--capacity=8000000000", *own, "python", str(SCRIPTS / "dry_composed.py"), "FOLDER"],
    }
    for name, (text, _) in OTHERS.items():
        path = folder / f"{name.replace(' ', '_')}.py"
        path.write_text(text)
        words[name] = [*own, "python", str(path)]
    given = json.dumps([[str(folder) if word == "FOLDER" else word.replace("=FOLDER", f"={folder}") for word in one]
                        for one in words.values()])  # fmt: skip
    command = [sys.executable, str(SCRIPTS / "predict_many.py"), given]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, check=True, cwd=folder, env={**os.environ}
    )
    return dict(zip(words, json.loads(done.stdout), strict=True))


PARAMETERS = 2 * 1024 * 128 + 4 * 128 * 128 + 3 * 128 * 256 + 3 * 128


def point(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["status"] == 0, answer["output"]
    found = json.loads(answer["output"])
    assert (found["ranks"], found["parameters"], found["trainable"]) == (1, PARAMETERS, PARAMETERS)
    (point,) = found["points"]
    assert (point["sequence_length"], point["micro_batch"]) == (64, 2)
    return point


@pytest.mark.parametrize("name", ["loop", "trainer"])
def test_a_script_has_the_states_of_its_model_and_configuration(predictions: dict[str, Any], name: str) -> None:
    # A Trainer of transformers has filled in what its configuration leaves to it (auto), under another ZeRO stage.
    parts = point(predictions[name])["ranks"][0]["phases"]["optimizer"]["parts"]
    assert parts["master_copies"] == pytest.approx(4 * PARAMETERS, rel=0.03)
    assert parts["optimizer_states"] == pytest.approx(8 * PARAMETERS, rel=0.03)
    assert 2 * PARAMETERS <= parts["parameters"] <= 4.2 * PARAMETERS


def test_changes_of_a_script_are_predicted_each_and_named_as_the_script_would_make_them(
    predictions: dict[str, Any],
) -> None:
    assert predictions["changed"]["status"] == 0, predictions["changed"]["output"]
    found = json.loads(predictions["changed"]["output"])
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


def test_no_script_is_run_beyond_the_engine_and_no_weights_are_read(predictions: dict[str, Any], folder: Path) -> None:
    assert predictions
    assert not (folder / "trained").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_followed_is_one_line_with_the_flags_to_use(predictions: dict[str, Any], name: str) -> None:
    answer = predictions[name]
    assert answer["status"] == 2
    assert len(answer["output"].splitlines()) == 1, answer["output"]
    assert f"{name.replace(' ', '_')}.py" in answer["output"]
    assert OTHERS[name][1] in answer["output"]
    assert answer["output"].strip().endswith("use --model and --deepspeed instead")


def test_a_script_that_decides_by_a_tensors_value_is_refused_with_its_line(predictions: dict[str, Any]) -> None:
    answer = predictions["branches"]
    line = next(number for number, text in enumerate((SCRIPTS / "dry_loop.py").read_text().splitlines(), 1)
                if "arguments.branch and" in text)  # fmt: skip
    assert answer["status"] == 2
    assert f"dry_loop.py:{line}: it depends on a tensor's value, which a dry run does not have" in answer["output"]
