"""A few small steps, then a final evaluation that needs far more memory, and a save; or a way out that is asked for."""

import multiprocessing
import os
import sys

import torch

BIG = 400 * 2**20


def main(evaluates=True):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for rows in torch.utils.data.DataLoader(torch.randn(80, 64), batch_size=8):
        model(rows.to(device)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if evaluates:
        model.eval()
        with torch.no_grad():
            for rows in torch.utils.data.DataLoader(torch.randn(80, 64), batch_size=40):
                big = torch.ones(BIG // 4, device=device)
                model(rows.to(device))
                del big
        torch.save(model.state_dict(), os.path.join(os.environ["FTMON_RUN"], "model.pt"))
    print("trained", flush=True)


def fail():
    main(evaluates=False)
    raise KeyError("labels")


if __name__ == "__main__":
    if "in-a-process" in sys.argv:
        print("nothing to train here", flush=True)
        process = multiprocessing.get_context("spawn").Process(target=fail)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    elif "caught" in sys.argv:
        try:
            fail()
        except KeyError:
            os._exit(4)
    else:
        main()
