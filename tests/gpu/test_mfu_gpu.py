"""Throughput and MFU of a real model on a GPU, against the time and the FLOPs that a loop measures itself."""

import json
import sys
from pathlib import Path

import pytest
import torch
from ftmon.protocol.host.machine import peak_flops
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon_process import ftmon_home

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]

LOOP = """
import json, sys, time
import deepspeed, torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=8,
                     num_attention_heads=16, num_key_value_heads=16)
model = LlamaForCausalLM(config)
optimizer = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}
config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "optimizer": optimizer}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
ids = torch.randint(0, 32000, (4, 2048), device="cuda")
ends = []
for step in range(30):
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    ends.append(time.perf_counter())
    torch.cuda.synchronize()
measured = int(sys.argv[2])
seconds = (ends[-1] - ends[-1 - measured]) / measured
matrices = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
pairs = 4 * 2048 * 2049 // 2
flops = 6 * matrices * 4 * 2048 + 12 * 8 * 2048 * pairs
told = {"tokens_per_second": 4 * 2048 / seconds, "flops": flops, "seconds": seconds}
print(json.dumps(told), file=open(sys.argv[1], "w"))
"""


def test_mfu_is_that_of_the_loop_s_own_clock_and_formula(tmp_path: Path) -> None:
    script, told = tmp_path / "loop.py", tmp_path / "told.json"
    script.write_text(LOOP)
    with ftmon_home(tmp_path / "home") as ftmon:
        launcher = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"
        done = ftmon.run(
            "run", "--plain", "--", *launcher, str(script), str(told), "29"
        )  # all but the first, as for an ended run
        assert done.returncode == 0, done.stdout + done.stderr
        status = ftmon.status(ftmon.newest().id)
    expected = json.loads(told.read_text())
    name = torch.cuda.get_device_name(0)
    peak = peak_flops(name, "bf16")
    assert status["tokens_per_second"] == pytest.approx(expected["tokens_per_second"], rel=0.05), status
    if peak is None:
        assert status["mfu"] is None
        pytest.skip(f"{name} has no data-sheet peak in the table")
    assert status["peak_flops"] == peak
    assert status["mfu"] == pytest.approx(expected["flops"] / expected["seconds"] / peak, rel=0.05)
    assert 0.05 < status["mfu"] < 1.0
