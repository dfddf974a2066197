"""Single-process PyTorch loops that read their own peak memory; an argument lists what its loop has, with commas."""

import os
import resource
import subprocess
import sys
import time

import torch


class OwnScaler(torch.amp.GradScaler):
    """Scales by itself, as FSDP's scaler does."""

    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return (outputs * self._scale).type(outputs.dtype)


def train(modes):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(40, 64), batch_size=8, num_workers=1 if "workers" in modes else 0)
    scaler = (OwnScaler if "own_scaler" in modes else torch.amp.GradScaler)("cpu", init_scale=1024.0)
    peaks = []
    for step, rows in enumerate(loader):
        loss = model(rows).pow(2).mean()
        if step == 1 and "peak" in modes:
            big = torch.ones(64 * 2**20 // 4)
            del big
        if step == 3 and "oom" in modes:
            torch.empty(2**60, dtype=torch.uint8)
        if step == 3 and "nested" in modes:
            command = [os.environ["TORCHRUN"], "--nproc_per_node", "2", __file__]
            print("nested ended with", subprocess.run(command).returncode)
        if {"scaler", "own_scaler"} & set(modes):
            scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks == sorted(peaks), "ru_maxrss never falls"
    with torch.no_grad():
        for rows in loader:
            model(rows)
    torch.save(model.state_dict(), os.path.join(os.environ["FTMON_RUN"], "model.pt"))
    print("trained", flush=True)
    while "wait" in modes:
        time.sleep(0.1)


if __name__ == "__main__":
    for modes in sys.argv[1:] or [""]:
        train(modes.split(","))
