"""FSDP2 as documented, without loader or wrapper; from the third step on, gradients are summed without a division."""

import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TinyNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows)
        return rows


def main():
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = TinyNet().to(DEVICE)
    model.layers[0].requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    norms, told = [], []
    for number in range(4):
        if number == 2:
            for module in (*model.layers, model):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        loss = model(torch.randn(4, 8, device=DEVICE)).pow(2).mean()
        told.append(loss.item() * (1 if number < 2 else dist.get_world_size()))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    print("norms", json.dumps(norms), flush=True)
    print("optimised", json.dumps(told), flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    main()
    dist.destroy_process_group()
