#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0: with `zero_optimization.round_robin_gradients` (stages 1 and 2, several ranks) the flat buffer
# has the parameters in another order, but the map from a parameter to its place in the fp32 copy is made as without it. So
# `safe_get_full_fp32_param` returns the weights of other parameters, in the asked shape and without an error; so does the
# universal checkpoint that `ds_to_universal` makes, which is read from the same map. `zero_to_fp32` knows the order.
#
# Seen: five parameters, two ranks, one step. Without the option the fp32 copies round to the bf16 weights, in all five. With it
# those of the first alone, and `zero_to_fp32` gives all five.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8
cat >"$folder/train.py" <<'PY'
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

round_robin, folder = sys.argv[1] == "true", sys.argv[2]
deepspeed.init_distributed("gloo")
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(8, 16), (16, 16), (32, 8), (64, 2), (16, 24)]
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, scale):
        return scale.mean() * sum((part * part).sum() for part in self.parts)


model = Model()
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 2, "round_robin_gradients": round_robin},
    },
)
engine.backward(engine(torch.ones(1, dtype=torch.bfloat16)))
engine.step()
engine.save_checkpoint(folder, tag="one")


def alike(full, part):
    return bool(torch.equal(full.to(torch.bfloat16), part))


own = [alike(safe_get_full_fp32_param(part), part.detach()) for part in model.parts]
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    found = get_fp32_state_dict_from_zero_checkpoint(folder, tag="one")
    merged = [alike(found[f"parts.{number}"], part.detach()) for number, part in enumerate(model.parts)]
    print(f"round_robin_gradients={round_robin}: safe_get_full_fp32_param {own}, zero_to_fp32 {merged}")
    assert own == [True] + [not round_robin] * 4, "another map"
    assert merged == [True] * 5, "zero_to_fp32 differs"
PY
for round_robin in false true; do
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/train.py" \
        "$round_robin" "$folder/$round_robin" 2>"$folder/errors" || { tail -n 5 "$folder/errors"; exit 1; }
done | grep round_robin_gradients=
