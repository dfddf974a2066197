"""A generator and a discriminator with an optimizer each, in the loops that such scripts have; prints both losses."""

import json
import sys

import torch

ROUNDS = 12


def main(kind):
    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    opt_g = torch.optim.SGD(generator.parameters(), lr=0.01)
    opt_d = torch.optim.SGD(discriminator.parameters(), lr=0.02)
    told = []

    def critic(real):
        opt_d.zero_grad()
        on_real = torch.nn.functional.softplus(-discriminator(real)).mean()
        on_real.backward()
        on_fake = torch.nn.functional.softplus(discriminator(generator(torch.randn(len(real), 4)).detach())).mean()
        on_fake.backward()
        opt_d.step()
        return (on_real + on_fake).item()

    def generate():
        opt_g.zero_grad()
        loss = -discriminator(generator(torch.randn(4, 4))).mean()
        loss.backward()
        opt_g.step()
        return loss.item()

    loader = torch.utils.data.DataLoader(torch.randn(4 * ROUNDS, 8), batch_size=4)
    if kind == "alternating":
        for real in loader:
            told.append([critic(real), generate()])
    elif kind == "every-third":
        for number, real in enumerate(loader):
            told.append([critic(real), generate() if number % 3 == 0 else None])
    elif kind == "by-turns":
        for number, real in enumerate(loader):
            if number % 2:
                told.append([None, generate()])
            else:
                told.append([critic(real), None])
    else:
        batches = iter(loader)
        for _ in range(ROUNDS // 4):
            losses = [critic(next(batches)) for _ in range(4)]
            told.append([sum(losses) / 4, generate()])
    print("losses", json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
