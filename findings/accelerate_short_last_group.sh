#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0: `Accelerator.backward` divides each loss by `gradient_accumulation_steps`. The last update
# of a pass over the data comes early, with the micro-batches that are left (`sync_with_dataloader`, the default), but their
# losses are divided by the full number too. So the last update of each epoch is made with a gradient that is too small, and
# the micro-batches in it weigh less than all others, without a word.
#
# Seen: four equal micro-batches in groups of 3: the gradient of the first update is their mean, that of the second a third.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0
"$folder/venv/bin/python" - <<'PY'
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = torch.nn.Linear(1, 1, bias=False)
rows = torch.utils.data.TensorDataset(torch.full((4, 1), 6.0))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.0), torch.utils.data.DataLoader(rows, batch_size=1)
)
gradients = []
for (row,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(row).sum())  # its gradient is 6
        if accelerator.sync_gradients:
            gradients.append(model.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
print(f"gradients of the updates: {gradients}")
assert gradients == [6.0, 2.0], "the last group is divided otherwise now"
PY
