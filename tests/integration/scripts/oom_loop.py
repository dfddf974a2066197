"""A training in one process on the CPU that asks, in its fourth step, for more memory than any machine has."""

import torch

TOO_MUCH = 1 << 55


def allocate(count: int, keep: torch.Tensor) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8) + keep.sum()


def main() -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(64, 256), batch_size=8)
    for step, batch in enumerate(data, 1):
        loss = model(batch).square().mean()
        if step == 4:
            allocate(TOO_MUCH, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
