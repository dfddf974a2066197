"""Gloo ranks that train a small model on rows of a length, for a sweep, started without torchrun's own imports.

argv: the length, what happens in step 6 of the last rank (``ok``, ``oom``, ``hang``, or the path of a file that it
waits for), and the number of ranks.
"""

import os
import subprocess
import sys
import tempfile
import time


def main():
    import torch
    import torch.distributed as dist

    length, what, world = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank = int(os.environ["RANK"])
    last = rank == world - 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}/store", rank=rank, world_size=world)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, 9):
        rows = torch.randn(length * 64, 64)
        if step == 6 and last and what == "oom":
            torch.empty(1 << 55, dtype=torch.uint8)
        model(rows).square().mean().backward()
        if step == 6 and last and what == "hang":
            time.sleep(3600)
        while step == 6 and last and what.startswith("/") and not os.path.exists(what):
            time.sleep(0.05)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def launch():
    """Start the ranks; the first that fails ends the others."""
    store = tempfile.mkdtemp()
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), sys.argv[3])
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], store],
            env={**os.environ, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(int(sys.argv[3]))
    ]
    while (left := [rank for rank in ranks if rank.poll() is None]) and not any(rank.returncode for rank in ranks):
        time.sleep(0.05)
    for rank in left:
        rank.terminate()
    return max(abs(rank.wait()) for rank in ranks)


if "RANK" in os.environ:
    main()
else:
    sys.exit(launch())
