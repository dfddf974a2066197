"""Which batch's mask a forward is given, in loops that fetch batches as needed and in those that fetch ahead."""

import torch
from ftmon.trainer.probe.phases.tracker import Notes
from ftmon.trainer.probe.values.batch import FetchedBatches


class Iterator:
    """A dataloader's iterator."""


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": torch.full((1, 4), number)}


class Loop:
    def __init__(self) -> None:
        self.batches = FetchedBatches()
        self.iterator = Iterator()
        self.notes = Notes()

    def fetch(self, *numbers: int) -> None:
        for number in numbers:
            self.batches.add(self.iterator, self.notes, batch(number))

    def forward(self) -> int | None:
        found = self.batches.take(self.notes)
        return None if found is None else int(found.mask[0, 0])

    def backward(self) -> None:
        self.notes.micro_steps += 1

    def update(self) -> None:
        self.notes = Notes()


def test_a_loop_that_fetches_one_batch_ahead_and_one_that_does_not() -> None:
    for ahead in (0, 1):
        loop = Loop()
        loop.fetch(*range(ahead))
        for number in range(6):
            loop.fetch(number + ahead)
            assert loop.forward() == number
            loop.backward()
            if number % 2:
                loop.update()


def test_a_loop_that_fetches_all_micro_batches_of_a_step_and_one_more() -> None:
    loop = Loop()
    loop.fetch(0)
    for step in range(4):
        loop.fetch(*range(3 * step + 1, 3 * step + 4))
        for number in range(3 * step, 3 * step + 3):
            assert loop.forward() == number
            loop.backward()
        loop.update()


def test_batches_that_the_script_leaves_out_are_given_to_no_forward() -> None:
    loop = Loop()
    for number in range(8):
        loop.fetch(number)
        if number in (3, 4):
            continue
        # The first batch after those left out may still be taken for one of them.
        assert loop.forward() == {5: 3}.get(number, number)
        loop.backward()
        loop.update()


def test_a_second_forward_of_a_batch_takes_no_other_one() -> None:
    loop = Loop()
    loop.fetch(0, 1)
    assert [loop.forward(), loop.forward()] == [0, None]
    loop.backward()
    assert loop.forward() == 1


def test_batches_of_another_loader_are_not_mixed_in() -> None:
    loop = Loop()
    loop.fetch(0, 1)
    training, loop.iterator = loop.iterator, Iterator()
    loop.fetch(70, 71)
    loop.iterator = training
    loop.fetch(2)
    assert loop.forward() == 0
