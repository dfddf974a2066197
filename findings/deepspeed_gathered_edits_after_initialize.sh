#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, ZeRO-3 on the CPU, in fp32: a parameter that is changed inside
# GatheredParameters(modifier_rank=0) after deepspeed.initialize shows the new values afterwards, and has the old ones
# again after the next step: the update is made from the optimizer's own fp32 copy, also where parameters are fp32.
# modifier_rank is therefore no way to edit weights of an engine; safe_set_full_fp32_param is.
#
# Seen: 7.0 after the context, a value near the initial one after one step; no error and no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 setuptools wheel ninja
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29611
"$folder/venv/bin/python" - <<'PY'
import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an extension that is not needed here
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(16, 16)
settings = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=optimizer, config={**settings, "zero_optimization": {"stage": 3}}
)
weight = engine.module.weight


def value():
    with GatheredParameters([weight]):
        return weight.flatten()[0].item()


before = value()
with GatheredParameters([weight], modifier_rank=0):
    weight.data.fill_(7.0)
changed = value()
engine.backward(engine(torch.ones(4, 16)).sum())
engine.step()
after = value()
print(f"{before:.4f} before, {changed:.4f} after the context, {after:.4f} after the next step")
assert changed == 7.0, "the change is not visible after the context"
assert abs(after - before) < 0.01, "the change survives a step now"
PY
