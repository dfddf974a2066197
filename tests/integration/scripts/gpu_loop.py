"""A single-GPU PyTorch loop with a mask, an optimizer that needs temporaries, and its own figures printed as JSON.

Modes: ``hand`` measures every phase's peak by itself, as one would without ftmon; ``plain`` reads its own peaks only
at the end; ``reset`` resets them in the middle; ``oom`` asks for too much once and goes on; ``wait`` stays; ``shared``
stays, and in each step frees a block that another stream still uses, as ZeRO-3 does with gathered parameters; ``many``
takes short steps, stands still after some, and ends with a loss that is NaN; ``overwritten`` also changes each loss
after its backward.
"""

import contextlib
import json
import sys
import time

import torch

MODE = sys.argv[1]
SHORT = MODE in ("many", "overwritten")
STEPS = 300 if SHORT else 6
WIDTH = 64 if SHORT else 2048
STANDS_STILL = 150


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        mask = torch.ones(512, dtype=torch.long)
        mask[500 - index % 4 :] = 0
        return {"input_ids": (torch.arange(512) + index) % 1000, "attention_mask": mask}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, WIDTH)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(12)])

    def forward(self, input_ids, attention_mask):
        hidden = self.layers(self.embed(input_ids)) * attention_mask[..., None]
        return hidden.float().pow(2).mean()


def main():
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = iter(torch.utils.data.DataLoader(Rows(STEPS * 4), batch_size=4))
    peaks, losses = [], []

    def boundary(name):
        if MODE == "hand" and name is not None:
            peaks[-1][name] = torch.cuda.max_memory_allocated()
        if MODE == "hand":
            torch.cuda.reset_peak_memory_stats()

    for step in range(STEPS):
        peaks.append({})
        boundary(None)
        batch = next(loader)
        boundary("data")
        loss = model(**{key: value.cuda() for key, value in batch.items()})
        if MODE == "reset" and step == 3:
            held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
            del held
            torch.cuda.reset_peak_memory_stats()
        if MODE == "oom" and step == 3:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(2**50, dtype=torch.uint8, device="cuda")
        if SHORT and step == STEPS - 1:
            loss = loss * float("nan")
        boundary("forward")
        loss.backward()
        boundary("backward")
        optimizer.step()
        boundary("optimizer")
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        if MODE == "overwritten":
            loss /= 2
        if SHORT and step == STANDS_STILL:
            time.sleep(3)
    stats = torch.cuda.memory_stats()
    found = {
        "phases": peaks,
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "peaks": {key: value for key, value in stats.items() if key.endswith(".peak")},
        "losses": [float(loss) for loss in losses],
    }
    print("RESULT", json.dumps(found), flush=True)
    side = torch.cuda.Stream()
    if MODE == "shared":
        # The block's memory comes back within the update, long after the request to free it.
        optimizer.register_step_pre_hook(lambda *_: side.synchronize())
    while MODE in ("wait", "shared"):
        loss = model(**{key: value.cuda() for key, value in batch.items()})
        loss.backward()
        if MODE == "shared":
            shared = torch.empty(2**30, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                shared.record_stream(side)
            del shared
        optimizer.step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
