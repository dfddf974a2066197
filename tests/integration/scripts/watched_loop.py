"""A loop with one line for ftmon in it, started without ``ftmon run``: ``ftmon.watch(optimizer)``."""

import sys
import time

import ftmon
import torch


def main():
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = ftmon.watch(optimizer, name="one-line", model=model)
    assert probe is not None
    probe.plan(3, 1.0, "out")
    for _ in range(3):
        with probe.phase("data"):
            rows = torch.randn(4, 8)
        probe.report(tokens=32, padded_tokens=32)
        model(rows).sum().backward()
        torch.distributed.barrier()
        optimizer.step()
        # As long as those below: a stop is planned 3 steps and a second ahead, and a rank may hear of it late.
        time.sleep(1.0)
    print("a line of output")
    sys.stderr.write("progress 1\rprogress 2\n")
    sys.stdout.flush()
    deadline = time.monotonic() + 300
    while not probe.stop_requested() and time.monotonic() < deadline:
        optimizer.step()
        torch.distributed.barrier()
        time.sleep(1.0)
    print(f"stopped after {probe.step}", flush=True)  # in one write: two ranks share the output


if __name__ == "__main__":
    main()
