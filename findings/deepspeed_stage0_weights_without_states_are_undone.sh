#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, ZeRO stage 0 in bf16 on the CPU: after load_checkpoint(load_optimizer_states=False) the
# engine has the checkpoint's weights, and the next step puts back those from before it: they are made of the optimizer's
# fp32 copy, which was not refreshed. With load_module_only=True it is, and so it is at stages 1 to 3.
#
# Seen: 0.0000 from the saved weights after loading; after a step with a learning rate of 1e-4 0.0001 from the weights
# before loading and above 0.1 from the saved ones; no error and no warning. At stage 1: 0.0001 from the saved ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 setuptools wheel ninja
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29613
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an extension that is not needed here
deepspeed.init_distributed("gloo")


def engine(seed, stage):
    torch.manual_seed(seed)
    model = torch.nn.Linear(16, 16)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {**settings, "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weight(engine):
    return engine.module.weight.detach().float().clone()


def apart(one, other):
    return float((one - other).abs().max())


def loaded_and_stepped(stage):
    first = engine(1, stage)
    first.save_checkpoint(f"{sys.argv[1]}/{stage}", tag="saved")
    saved = weight(first)
    again = engine(2, stage)
    before = weight(again)
    again.load_checkpoint(f"{sys.argv[1]}/{stage}", tag="saved", load_optimizer_states=False)
    after_load = apart(weight(again), saved)
    again.backward(again(torch.ones(1, 16, dtype=torch.bfloat16)).float().pow(2).mean())
    again.step()
    found = after_load, apart(weight(again), saved), apart(weight(again), before)
    print(f"stage {stage}: {found[0]:.4f} from the saved ones; after a step {found[1]:.4f}, {found[2]:.4f} from those before")
    return found


after_load, from_saved, from_before = loaded_and_stepped(0)
assert after_load == 0.0, "the weights are not loaded"
assert from_saved > 0.1 and from_before < 0.01, "the loaded weights survive a step now"
after_load, from_saved, _ = loaded_and_stepped(1)
assert after_load == 0.0 and from_saved < 0.01, "stage 1 loses the loaded weights now"
PY
