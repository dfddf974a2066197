"""A training whose evaluation keeps all logits, 3 MB a batch, until a file exists or 1 GB is kept."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 40_000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(torch.randn(100, 16), batch_size=20):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
kept: list[torch.Tensor] = []
with torch.no_grad():
    for batch in DataLoader(torch.randn(20 * 310, 16), batch_size=20):
        kept.append(model(batch))
        time.sleep(0.05)
        if Path(sys.argv[1]).exists():
            break
print("evaluated", flush=True)
