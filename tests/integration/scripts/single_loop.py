"""A single-process PyTorch loop; reads its own peak memory, and can end badly or wait to be looked at."""

import os
import resource
import subprocess
import sys
import time

import torch

MODES = sys.argv[1].split(",") if len(sys.argv) > 1 else []


class OwnScaler(torch.amp.GradScaler):
    """Scales by itself, as FSDP's scaler does."""

    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return (outputs * self._scale).type(outputs.dtype)


def main():
    if "no-training" in MODES:
        print("nothing to train")
        return
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(40, 64), batch_size=8, num_workers=1 if "workers" in MODES else 0)
    scaler = (OwnScaler if "own_scaler" in MODES else torch.amp.GradScaler)("cpu", init_scale=1024.0)
    peaks = []
    for step, rows in enumerate(loader):
        loss = model(rows).pow(2).mean()
        if step == 1 and "peak" in MODES:
            big = torch.ones(64 * 2**20 // 4)
            del big
        if step == 3 and "oom" in MODES:
            torch.empty(2**60, dtype=torch.uint8)
        if step == 3 and "nested" in MODES:
            command = [os.environ["TORCHRUN"], "--nproc_per_node", "2", __file__]
            print("nested ended with", subprocess.run(command).returncode)
        if {"scaler", "own_scaler"} & {*MODES}:
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
    if "exit" in MODES:
        sys.exit(3)
    while "wait" in MODES:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
