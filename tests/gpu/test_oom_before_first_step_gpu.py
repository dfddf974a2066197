"""A model that does not fit fails before its first step, where no hook sees the device: its report is there too."""

import sys
from pathlib import Path

import pytest
from ftmon.protocol.messages.memory import OomReport
from ftmon.protocol.recording.reader import Reader
from ftmon_process import ftmon_home, lines_with
from ports import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

config = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
where = sys.argv[-1]
arguments = TrainingArguments("out", deepspeed=config, bf16=True, per_device_train_batch_size=1, max_steps=2)
small = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16)
limit = {"model": 300e6, "engine": 4.5e9}[where]
torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
model = AutoModelForCausalLM.from_config(small)
data = [{"input_ids": torch.ones(64, dtype=torch.long), "labels": torch.ones(64, dtype=torch.long)} for _ in range(8)]
Trainer(model=model, args=arguments, train_dataset=data).train()
"""


@pytest.mark.parametrize("where", ["model", "engine"])
def test_a_trainer_under_zero3_that_fails_before_its_first_step_has_its_report(where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with ftmon_home(tmp_path / "home") as home:
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
        words = [*launcher, "--master_port", str(free_port()), str(script), where]
        done = home.run("run", "--plain", "--", *words, cwd=tmp_path)
        assert done.returncode != 0, done.stdout
        assert lines_with(done.stdout, ["oom: rank 0 out of memory"]), done.stdout
        with Reader(home.newest().recording) as reader:
            frames = reader.frames(0, 10_000)
    reports = [frame.message for frame in frames if isinstance(frame.message, OomReport)]
    assert reports
    oom = reports[0].oom
    assert (oom.measure, oom.step) == ("cuda", 1)
    assert oom.requested_bytes > 0
    assert oom.reserved_bytes >= oom.allocated_bytes > 0
    assert any("train.py" in frame for frame in oom.stack)
