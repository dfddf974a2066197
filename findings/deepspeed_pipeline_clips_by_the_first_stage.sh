#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0: in a pipeline (`PipelineModule`, fp32, without ZeRO) `gradient_clipping` bounds the norm of
# the first stage's gradients alone. The parameters of a rank count in the norm if it is the first of its model-parallel group,
# and that group has all stages. The other stages' gradients are multiplied by the factor that follows from it. So the whole
# gradient stays above the limit, and one that is not finite in a later stage is not seen.
#
# Seen: two stages of one layer. Unclipped, their norms are 0.835 and 0.799, 1.155 together. With a limit of 0.5 they are 0.500
# and 0.479 at the update, 0.692 together.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8
cat >"$folder/train.py" <<'PY'
import sys

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

limit = float(sys.argv[1])
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = PipelineModule(
    [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(2)],
    num_stages=2,
    loss_fn=torch.nn.functional.mse_loss,
    partition_method="uniform",
)
engine, *_ = deepspeed.initialize(
    model=net,
    model_parameters=net.parameters(),
    training_data=[(torch.randn(8), torch.randn(8)) for _ in range(64)],
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": limit,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    },
)
seen = []
engine.basic_optimizer.register_step_pre_hook(
    lambda *_: seen.append(torch.stack([part.grad.norm() for part in net.parameters()]).norm().reshape(1))
)
engine.train_batch()
stages = [torch.zeros(1) for _ in range(2)]
torch.distributed.all_gather(stages, seen[0])
whole = torch.cat(stages).norm().item()
if torch.distributed.get_rank() == 0:
    print(f"limit {limit:g}: norms at the update {stages[0].item():.3f} and {stages[1].item():.3f}, together {whole:.3f}")
    first_alone = abs(stages[0].item() - limit) < 1e-3 and whole > 1.2 * limit
    assert limit > 1 or first_alone, "the norm is another one now"
PY
for limit in 1e9 0.5; do
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/train.py" "$limit" \
        2>"$folder/errors" || { tail -n 5 "$folder/errors"; exit 1; }
done | grep "^limit"
