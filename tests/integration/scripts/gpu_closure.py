"""Closures on a GPU. ``hand`` measures every phase's peak by itself, as one would without ftmon; ``plain`` does not.

The second argument is the optimizer: ``adamw`` (foreach, with temporaries) or ``lbfgs`` (several evaluations a step).
"""

import json
import sys

import torch

MODE, KIND = sys.argv[1:3]
STEPS, WIDTH = 6, 2048

torch.manual_seed(0)
torch.cuda.set_device(0)
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]).cuda()
if KIND == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
else:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
loader = iter(torch.utils.data.DataLoader(torch.randn(STEPS * 64, WIDTH), batch_size=64))
peaks, losses = [], []


def boundary(name):
    if MODE == "hand":
        if name is not None:
            peaks[-1][name] = max(peaks[-1].get(name, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


for _step in range(STEPS):
    peaks.append({})
    rows = next(loader)
    boundary(None)
    calls = []

    def closure(rows=rows, calls=calls):
        # What came before the first call is the forward's: nothing is allocated between the batch and the closure.
        boundary("optimizer" if calls else "forward")
        optimizer.zero_grad()
        loss = model(rows.cuda()).pow(2).mean()
        boundary("forward")
        loss.backward()
        boundary("backward")
        calls.append(loss.item())
        return loss

    optimizer.step(closure)
    boundary("optimizer")
    losses.append(calls[0])
print("RESULT" + json.dumps({"phases": peaks, "losses": losses}))
