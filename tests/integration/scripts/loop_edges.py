"""Small loops of kinds that public scripts use (arguments: the modes); prints what each has optimised, by step."""

import gc
import json
import pickle
import sys
import tempfile
import threading
import time

import torch

PAUSE = 0.3
"""Seconds of work after an epoch, and between a batch and its forward."""


def alone():
    return {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}


def model_of(size=8):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(size, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def update(model, optimizer, batch, told):
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    told.append(loss.item())


def after_epochs(told):
    """Work after each epoch, when the loader is exhausted."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for batch in torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=4):
            update(model, optimizer, batch, told)
        time.sleep(PAUSE)


def validated(told):
    """A validation whose loader is asked outside of ``no_grad`` (accelerate), one before the first step (Lightning)."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.no_grad():
        for batch in torch.utils.data.DataLoader(torch.randint(0, 9, (8, 8)), batch_size=4):
            model(batch.float())
    for epoch in range(3):
        for batch in torch.utils.data.DataLoader(torch.randint(0, 9, (12, 8)), batch_size=4):
            update(model, optimizer, batch.float(), told)
        model.eval()
        for number, batch in enumerate(torch.utils.data.DataLoader(torch.randint(0, 9, (40, 8)), batch_size=4)):
            with torch.no_grad():
                model(batch.float())
                time.sleep(PAUSE / 10)
            if epoch and number == 5:
                break
        model.train()


validated_last = validated


def validated_within(told):
    """A validation between a batch and its backward."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randint(0, 9, (24, 8)), batch_size=4)):
        if number % 2:
            with torch.no_grad():
                for other in torch.utils.data.DataLoader(torch.randint(0, 9, (12, 8)), batch_size=4):
                    model(other.float())
        update(model, optimizer, batch.float(), told)


def alike(told):
    """Two losses of the same kind from one batch, no loader: PyTorch's DCGAN example."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        real = torch.nn.functional.binary_cross_entropy_with_logits(model(torch.randn(4, 8)), torch.ones(4, 1))
        fake = torch.nn.functional.binary_cross_entropy_with_logits(model(torch.randn(4, 8)), torch.zeros(4, 1))
        if step % 2:
            torch.autograd.backward([real, fake])
        else:
            real.backward()
            fake.backward()
        total = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)
        optimizer.step()
        told.append([(real + fake).item(), total.item()])


def shared(told):
    """Two optimizers of one model, and as many micro-batches: Muon for matrices, AdamW for the rest."""
    model = model_of()
    optimizers = [
        torch.optim.SGD([each for each in model.parameters() if each.ndim == 2], lr=0.01),
        torch.optim.AdamW([each for each in model.parameters() if each.ndim != 2], lr=0.01),
    ]
    for _ in range(8):
        total = 0.0
        for _ in range(2):
            loss = model(torch.randn(4, 8)).pow(2).mean() / 2
            loss.backward()
            total += loss.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        told.append(total)


def stages(told):
    """Two optimizers that train one after the other, in the same lines; then another model, after an evaluation."""
    model = model_of()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(6):
            update(model, optimizer, torch.randn(4, 8), told)
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    other = model_of()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    for batch in torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4):
        update(other, optimizer, batch, told)


def dropped(told):
    """Every third batch is dropped after its backward, by the model's own ``zero_grad``."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(36, 8), batch_size=4)):
        loss = model(batch).pow(2).mean()
        loss.backward()
        if number % 3 == 2:
            model.zero_grad()
            continue
        optimizer.step()
        model.zero_grad()
        told.append(loss.item())


def repeated(told):
    """Every batch is used twice (sharpness-aware, SAM)."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        batch = torch.randn(4, 8)
        loss = model(batch).pow(2).mean()
        loss.backward()
        told.append(loss.item())
        with torch.no_grad():
            moved = [each.grad * 0.1 for each in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moved)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moved)
        optimizer.step()
        optimizer.zero_grad()


def failed_and_evaluated(told):
    """Batches whose backward fails are left out; then evaluations between steps whose batches no loader delivers.

    Next, no loader delivers those of the evaluations either, as in nanoGPT; at last, the model trains in that mode.
    """
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)):
        output = model(batch)
        loss = (Broken.apply(output) if number % 3 == 1 else output).pow(2).mean()
        try:
            loss.backward()
        except RuntimeError:
            for each in model.parameters():
                each.grad = None
            continue
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    for _ in range(3):
        with torch.no_grad():
            for batch in torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4):
                model(batch)
        for _ in range(2):
            time.sleep(PAUSE / 10)
            update(model, optimizer, torch.randn(4, 8), told)
    for _ in range(3):
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))
            time.sleep(PAUSE / 10)
        model.train()
        model[1].eval()  # a layer alone, as batch norms are kept from learning
        time.sleep(PAUSE / 10)
        update(model, optimizer, torch.randn(4, 8), told)
    model.eval()
    for _ in range(2):
        time.sleep(PAUSE / 10)
        update(model, optimizer, torch.randn(4, 8), told)


def left_out(told):
    """Every third batch has no backward: its loss is not finite."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(36, 8), batch_size=4)):
        if not torch.isfinite(model(batch / 0 if number % 3 == 1 else batch).pow(2).mean()):
            continue
        update(model, optimizer, batch, told)


def left_out_of_ddp(told):
    """Every third forward fails; then every third batch has no backward."""
    torch.distributed.init_process_group("gloo", **alone())
    model = torch.nn.parallel.DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(36, 8), batch_size=4)):
        try:
            update(model, optimizer, batch[:, :7] if number % 3 == 1 else batch, told)
        except RuntimeError:
            continue
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(36, 8), batch_size=4)):
        loss = model(batch / 0 if number % 3 == 1 else batch).pow(2).mean()
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
    torch.distributed.destroy_process_group()


def looked_at(told):
    """Single batches that are not trained on: looked at, beyond a limit, or evaluated, in three ways."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = torch.utils.data.DataLoader(torch.randint(0, 9, (40, 8)), batch_size=4)
    validation = torch.utils.data.DataLoader(torch.randint(0, 9, (64, 8)), batch_size=32)

    def evaluate(batch):
        with torch.no_grad():
            model(batch.float())
            time.sleep(PAUSE / 10)

    for _ in range(2):
        next(iter(train))
        time.sleep(PAUSE)  # recorded from 5 % of its step on, however long that stands still
        for number, batch in enumerate(train):
            if number == 4:
                break
            update(model, optimizer, batch.float(), told)
    for way in range(3):
        for number, batch in enumerate(train):
            update(model, optimizer, batch.float(), told)
            if number == 3:
                break
            if number == 1:
                if way:
                    model.eval()
                for held_out in validation:
                    evaluate(held_out)
                    if way < 2:
                        break
                if way:
                    model.train()
                    time.sleep(PAUSE)


def ahead_and_saved(told):
    """The next batch is asked for before the update, and a tensor pickled; then a distributed checkpoint is written in
    the background."""
    import torch.distributed.checkpoint as checkpoint

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4))
    batch = next(batches)
    while batch is not None:
        loss = model(batch).pow(2).mean()
        loss.backward()
        batch = next(batches, None)
        time.sleep(PAUSE)
        pickle.dumps(torch.ones(100_000))
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    torch.distributed.init_process_group("gloo", **alone())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.async_save(model.state_dict(), checkpoint_id=folder).result()
    update(model, optimizer, torch.randn(4, 8), told)
    torch.distributed.destroy_process_group()


def ahead(told):
    """A batch is fetched ahead; then accelerate does so, also in a validation after each epoch."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        batches = iter(torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=4))
        batch, following = next(batches), next(batches)
        while batch is not None:
            update(model, optimizer, batch, told)
            batch, following = following, next(batches, None)
    from accelerate import Accelerator

    loaders = [torch.utils.data.DataLoader(torch.randn(rows, 8), batch_size=4) for rows in (20, 4)]
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, batches, others = accelerator.prepare(model, optimizer, *loaders)
    for _ in range(3):
        for batch in batches:
            update(model, optimizer, batch, told)
        model.eval()
        for batch in others:
            with torch.no_grad():
                model(batch)
        model.train()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(PAUSE / 10)
        return gradient


def in_backward(told):
    """An optimizer for each parameter, which steps in the backward."""
    model = model_of()
    optimizers = {each: torch.optim.SGD([each], lr=0.01) for each in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)
    for _ in range(5):
        loss = model[2](Slow.apply(model[1](model[0](torch.randn(4, 8))))).pow(2).mean()
        loss.backward()
        told.append(loss.item())


def adversarial(told):
    """A generator and a discriminator, an optimizer each; told are the losses since the step before, by optimizer."""
    since = {}
    for loop, every in (("alternating", 1), ("every third", 3), ("by turns", 2), ("inner loop", 4)):
        generator, discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        opt_g = torch.optim.Adam(generator.parameters(), lr=0.01)
        opt_d = torch.optim.SGD(discriminator.parameters(), lr=0.02)
        softplus = torch.nn.functional.softplus
        for number, real in enumerate(torch.utils.data.DataLoader(torch.randn(52, 8), batch_size=4)):
            if loop != "by turns" or number % 2 == 0:
                opt_d.zero_grad()
                on_real = softplus(-discriminator(real)).mean()
                on_real.backward()
                on_fake = softplus(discriminator(generator(torch.randn(len(real), 4)).detach())).mean()
                on_fake.backward()
                opt_d.step()
                told.append(since | {"SGD": (on_real + on_fake).item()})
                since = {}
            if number % every == every - 1 and number < 12:
                opt_g.zero_grad()
                loss = -discriminator(generator(torch.randn(4, 4))).mean()
                loss.backward()
                opt_g.step()
                since = {"Adam": loss.item()}


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("broken backward")


def broken(told):
    """An exception in the third backward."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        output = model(torch.randn(4, 8))
        loss = (Broken.apply(output) if step == 2 else output).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def threads(told):
    """Two trainings, each in a thread of its own, one after the other."""

    def train():
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            update(model, optimizer, torch.randn(4, 8), told)

    for _ in range(2):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()


def under_ddp(told):
    """Work on a batch before its forward; an evaluation past the wrapper."""
    torch.distributed.init_process_group(**alone())
    model = torch.nn.parallel.DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4):
        time.sleep(PAUSE / 10)
        update(model, optimizer, batch, told)
    model.eval()
    for batch in torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4):
        with torch.no_grad():
            model.module(batch)
        time.sleep(PAUSE / 10)
    model.train()
    time.sleep(PAUSE * 4)
    for batch in torch.utils.data.DataLoader(torch.randint(0, 9, (32, 8)), batch_size=8):
        update(model, optimizer, batch.float(), told)
    torch.distributed.destroy_process_group()


def leave(told):
    sys.exit(3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    for mode in sys.argv[1:]:
        told: list = []
        globals()[mode](told)
        print("optimised", json.dumps([mode, told]), flush=True)
        gc.collect()  # the optimizers: an updater that lives owns the steps
