"""One training that runs out of GPU memory, by name; started by ``oom.py``.

A layer's forward saves two tensors of the batch's size for its backward; a limit makes 12 GiB of any device.
"""

import sys
from collections.abc import Iterator
from typing import Any

import ftmon
import torch
from torch.utils.checkpoint import checkpoint

LIMIT = 12 * 2**30
WIDTH = 2048
LAYERS = 8
WORDS = 150_016


def model_of(layers: int = LAYERS, width: int = WIDTH) -> torch.nn.Sequential:
    with torch.device("cuda"):
        return torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers))
        )


def batches(lengths: list[int], width: int = WIDTH) -> Iterator[torch.Tensor]:
    data: Any = torch.utils.data.DataLoader([torch.randn(4, length, width) for length in lengths], batch_size=None)
    return (batch.cuda() for batch in data)


def train(model: torch.nn.Module, lengths: list[int], ballast: Any = None, recompute: bool = False) -> None:
    """Train on batches of these lengths; ``ballast`` is memory that somebody could free."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ftmon.watch(optimizer, model=model)
    for batch in batches(lengths):
        batch.requires_grad_(recompute)
        found = checkpoint(model, batch, use_reentrant=True) if recompute else model(batch)
        found.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def backward() -> None:
    # The forward's peak is 18 tensors of the batch's size and the backward's 20: of a length in between, it fails.
    train(model_of(), [2000, 3000, 1000, 3000, 20_150])


def recompute() -> None:
    # Three tensors in the forward, but all of them at once when the backward computes it anew.
    train(model_of(), [2000, 3000, 1000, 3000, 40_000], recompute=True)


def hold() -> None:
    train(model_of(), [2000, 1000, 2000, 30_000], torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda"))


def optimizer() -> None:
    width = 3 * WIDTH
    model = model_of(40, width)  # 5.6 GiB of parameters, and as much of gradients: states do not fit
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ftmon.watch(adam, model=model)
    for batch in batches([2], width):
        model(batch).square().mean().backward()
        adam.step()


def fragmentation() -> None:
    train(model_of(2), [64] * 4)
    pieces: list[Any] = []
    while torch.cuda.memory_reserved() < LIMIT - 2**30:
        # A cached segment of 512 MiB takes two blocks; the half of a freed one can be neither used nor given back.
        torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
        pieces += [torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pieces[::2] = [None] * len(pieces[::2])
    torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")


class Words(torch.nn.Module):
    """A model with a large vocabulary, as its configuration says."""

    class Config:
        vocab_size = WORDS

    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 256)
        self.head = torch.nn.Linear(256, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


def logits() -> None:
    model = Words().cuda()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ftmon.watch(adam, model=model)
    data: Any = [torch.randint(0, WORDS, (4, length)) for length in (256, 256, 2048)]
    for ids in torch.utils.data.DataLoader(data, batch_size=None):
        model(ids.cuda()).backward()
        adam.step()
        adam.zero_grad()


def large() -> None:
    train(model_of(1), [64])
    torch.empty(400 * 2**30, dtype=torch.uint8, device="cuda")


SCENES = {
    "backward": backward,
    "recompute": recompute,
    "hold": hold,
    "optimizer": optimizer,
    "fragmentation": fragmentation,
    "logits": logits,
    "large": large,
}


def main() -> None:
    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory, 0)
    SCENES[sys.argv[1]]()


if __name__ == "__main__":
    main()
