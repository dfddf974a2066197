#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, ZeRO-3 on the CPU, in bf16: load_checkpoint(load_module_only=True), which its docstring
# offers for a warm start, returns the checkpoint's path and loads no weight: those that the engine began with are trained.
# The weights of a ZeRO-3 checkpoint are in its optimizer's files, which are not read. With load_optimizer_states=False,
# alone or beside it, weights are loaded: those of the tag that the file `latest` names, whatever tag was asked for.
#
# Seen: 0.0000 between the weights before and after load_module_only=True, 0.0000 between saved and loaded ones with
# load_optimizer_states=False, which loads the later of two tags where the earlier one is asked for; no error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 setuptools wheel ninja
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29612
"$folder/venv/bin/python" - "$folder/checkpoint" <<'PY'
import sys

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an extension that is not needed here
deepspeed.init_distributed("gloo")


def engine(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(16, 16)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {**settings, "zero_optimization": {"stage": 3}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weight(engine):
    with GatheredParameters([engine.module.weight]):
        return engine.module.weight.detach().float().clone()


def apart(one, other):
    return float((one - other).abs().max())


first = engine(1)
first.save_checkpoint(sys.argv[1], tag="saved")
saved = weight(first)

warm = engine(2)
before = weight(warm)
path, _ = warm.load_checkpoint(sys.argv[1], tag="saved", load_module_only=True)
changed = apart(weight(warm), before)
print(f"load_module_only=True returned {path is not None}: weights changed by {changed:.4f}")

other = engine(3)
other.load_checkpoint(sys.argv[1], tag="saved", load_module_only=True, load_optimizer_states=False)
left = apart(weight(other), saved)
print(f"with load_optimizer_states=False: {left:.4f} from the saved ones")

later = engine(4)
later.save_checkpoint(sys.argv[1], tag="later")
path, _ = other.load_checkpoint(sys.argv[1], tag="saved", load_optimizer_states=False)
from_saved, from_later = apart(weight(other), saved), apart(weight(other), weight(later))
print(f"beside a later tag: {from_saved:.4f} from the saved ones, {from_later:.4f} from the later ones")

assert apart(before, saved) > 0.1
assert path is not None
assert changed == 0.0, "load_module_only loads weights now"
assert left == 0.0, "load_optimizer_states=False loads other weights now"
assert "/saved/" in path
assert from_saved > 0.1 and from_later == 0.0, "the tag counts now"
PY
