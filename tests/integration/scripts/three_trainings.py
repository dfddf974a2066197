"""Three trainings in one plain process, a model and an optimizer each; it knows nothing of ftmon.

The second replaces its optimizer after half of its steps, like a script that unfreezes layers or resets optimizer
states. The third consists of two short runs with a model each, as in federated learning.
"""

import gc
import time
import weakref

import torch
import torch._dynamo  # otherwise the first optimizer imports it, and a cycle keeps that one until garbage is collected


def train(steps, lr, seconds=0.0, again=False):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        if again and step == steps // 2:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr / 10)
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 4, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(seconds / steps)
    return loss.item(), [weakref.ref(each) for each in (model, optimizer, *model.parameters())]


kept = []
for arguments in ((4, 0.1, 6.0), (8, 0.01, 6.0, True), (2, 0.001), (1, 0.001)):
    last, references = train(*arguments)
    kept += references
    print("last loss", last, flush=True)
gc.disable()  # what is in a cycle is kept alive: it does not become free while this waits
end = time.monotonic() + 60
while (alive := sum(reference() is not None for reference in kept)) and time.monotonic() < end:
    time.sleep(0.01)  # the publisher thread may hold one for a moment
print("kept alive", alive, flush=True)
