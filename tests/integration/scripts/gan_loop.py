"""A generator and a discriminator with an optimizer each, in the loops that such scripts have; prints all updates."""

import json
import sys

import torch

ROUNDS = 12
EVERY = {"alternating": 1, "every-third": 3, "by-turns": 2, "inner-loop": 4}
"""Number of batches to an update of the generator."""


def main(kind):
    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=0.01)
    opt_d = torch.optim.SGD(discriminator.parameters(), lr=0.02)
    told = []

    def critic(real):
        opt_d.zero_grad()
        on_real = torch.nn.functional.softplus(-discriminator(real)).mean()
        on_real.backward()
        on_fake = torch.nn.functional.softplus(discriminator(generator(torch.randn(len(real), 4)).detach())).mean()
        on_fake.backward()
        opt_d.step()
        told.append(["SGD", (on_real + on_fake).item()])

    def generate():
        opt_g.zero_grad()
        loss = -discriminator(generator(torch.randn(4, 4))).mean()
        loss.backward()
        opt_g.step()
        told.append(["Adam", loss.item()])

    loader = torch.utils.data.DataLoader(torch.randn(4 * ROUNDS, 8), batch_size=4)
    for number, real in enumerate(loader):
        if kind != "by-turns" or number % 2 == 0:
            critic(real)
        if number % EVERY[kind] == EVERY[kind] - 1:
            generate()
    print("losses", json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
