"""A loop under DDP that clips by itself: the gradients of one bias are NaN in one step, whose loss is finite."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

LOST = 61
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(64, 16), *(torch.nn.Linear(16, 16) for _ in range(6)), torch.nn.Linear(16, 1)
)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, rows in enumerate(DataLoader(torch.randint(0, 64, (280, 16)), batch_size=4), 1):
    loss = parallel(rows).square().mean()
    if step == LOST:
        loss = loss + (0 * model[-1].bias.sum()).sqrt()
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    for each in model.parameters():
        each.grad *= (1.0 / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
