"""Optimizers that call a closure, in loops of their own making; it knows nothing of ftmon.

One after the other: ``lbfgs`` (several evaluations a step), ``sam`` (work of its own before
and after the closure), ``accumulate`` (the last of three micro-batches runs inside ``AdamW.step``). Prints its own
times and losses as one line of JSON a step.
"""

import gc
import json
import time

import torch

STEPS = 6


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: a step uphill, the closure there, and the base optimizer's step from below."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=1e-3)

    @torch.no_grad()
    def step(self, closure):
        before = time.perf_counter()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moved"] = moved = parameter.grad * group["rho"]
                parameter.add_(moved)
        time.sleep(0.02)
        spent["optimizer"] += time.perf_counter() - before
        torch.enable_grad()(closure)()
        before = time.perf_counter()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter]["moved"])
        self.base.step()
        spent["optimizer"] += time.perf_counter() - before


def train(mode):
    global spent, losses, evaluations
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))
    batches = iter(torch.utils.data.DataLoader(torch.randn(STEPS * 3 * 64, 2, 512), batch_size=64))
    optimizer = {
        "lbfgs": lambda: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4),
        "sam": lambda: Sam(model.parameters()),
        "accumulate": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
    }[mode]()

    def micro_step(rows, scale=1.0):
        global evaluations
        evaluations += 1
        before = time.perf_counter()
        loss = (model(rows[:, 0]) - rows[:, 1]).pow(2).mean()
        time.sleep(0.004)
        scaled = loss / scale if scale != 1 else loss
        middle = time.perf_counter()
        scaled.backward()
        spent["forward"] += middle - before
        spent["backward"] += time.perf_counter() - middle
        losses.append(loss.item())
        return loss

    for _ in range(STEPS):
        spent, losses, evaluations = dict.fromkeys(("forward", "backward", "optimizer"), 0.0), [], 0
        if mode == "accumulate":
            for _ in range(2):
                micro_step(next(batches), 3.0)
            rows = next(batches)
            optimizer.step(lambda rows=rows: micro_step(rows, 3.0))
            optimizer.zero_grad()
        else:
            rows = next(batches)
            if mode == "sam":
                micro_step(rows)

            def closure(rows=rows):
                optimizer.zero_grad()
                return micro_step(rows)

            optimizer.step(closure)
            if mode == "sam":
                optimizer.zero_grad()
        print(json.dumps({"mode": mode, "losses": losses, "evaluations": evaluations} | spent))


def main():
    torch.manual_seed(0)
    for mode in ("lbfgs", "sam", "accumulate"):
        train(mode)
        gc.collect()  # its optimizer
