#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0: the estimates of ZeRO's memory for a live model (those of stage 2 and 3 that end in
# `_all_live`) count parameters by their data pointers. All parameters of a model on the `meta` device have the pointer 0,
# so the last one alone is counted, without a warning: the usual way to ask for a model that is too large to make answers
# "0 GB".
#
# Seen: of 111,110 parameters on the CPU all are counted, of the same model on meta 10.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 setuptools wheel
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
DS_ACCELERATOR=cpu "$folder/venv/bin/python" - <<'PY'
import torch
from deepspeed.runtime.zero.stage3 import model_to_params as of_stage_3
from deepspeed.runtime.zero.stage_1_and_2 import model_to_params as of_stage_2


def made(device):
    with torch.device(device):
        layers = torch.nn.Linear(10, 1000), torch.nn.Linear(1000, 100, bias=False), torch.nn.Linear(10, 10)
        return torch.nn.Sequential(*layers)


true = sum(one.numel() for one in made("cpu").parameters())
for name, count in (("ZeRO-2", of_stage_2), ("ZeRO-3", of_stage_3)):
    found = {}
    for device in ("cpu", "meta"):
        counted = count(made(device))
        found[device] = counted[0] if isinstance(counted, tuple) else counted
    print(f"{name}: {true} parameters, counted on the CPU {found['cpu']}, on meta {found['meta']}")
    assert found["cpu"] == true
    assert found["meta"] == 10, "a model on meta is counted otherwise now"
PY
