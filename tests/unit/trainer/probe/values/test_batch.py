"""What is counted of a batch, and which fetched batch's mask a forward is given."""

import pytest
import torch
from ftmon.trainer.probe.device import cuda
from ftmon.trainer.probe.phases.tracker import Notes
from ftmon.trainer.probe.values import batch
from ftmon.trainer.probe.values.batch import FetchedBatches


class Iterator:
    """A dataloader's iterator."""


def fetched_batch(number: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": torch.full((1, 4), number)}


class Loop:
    def __init__(self) -> None:
        self.batches = FetchedBatches()
        self.iterator = Iterator()
        self.notes = Notes()

    def fetch(self, *numbers: int) -> None:
        for number in numbers:
            self.batches.add(self.iterator, self.notes, fetched_batch(number))

    def forward(self) -> int | None:
        found = self.batches.take(self.notes)
        return None if found is None else int(found.mask[0, 0])

    def backward(self, update: bool = False) -> None:
        self.notes.micro_steps += 1
        self.notes = Notes() if update else self.notes


@pytest.mark.parametrize(("ahead", "at_once"), [(0, 1), (1, 1), (1, 3)], ids=["none ahead", "one", "a step and one"])
def test_forwards_have_the_batches_in_their_order_however_they_are_fetched(ahead: int, at_once: int) -> None:
    loop = Loop()
    loop.fetch(*range(ahead))
    for number in range(12):
        if number % at_once == 0:
            loop.fetch(*range(number + ahead, number + ahead + at_once))
        assert loop.forward() == number
        loop.backward(update=number % 3 == 2)


def test_a_second_forward_of_a_batch_takes_no_other_one_and_left_out_ones_are_given_to_none():
    loop = Loop()
    loop.fetch(0, 1)
    assert [loop.forward(), loop.forward()] == [0, None]
    loop.backward()
    assert loop.forward() == 1
    loop = Loop()
    for number in range(8):
        loop.fetch(number)
        if number in (3, 4):
            continue
        # The first batch after those left out may still be taken for one of them.
        assert loop.forward() == {5: 3}.get(number, number)
        loop.backward(update=True)


def test_another_pass_begins_with_its_own_first_batch_and_other_loaders_are_not_mixed_in():
    loop = Loop()
    for first in (0, 10):
        loop.iterator = Iterator()
        loop.fetch(first)  # accelerate's loader is a batch ahead
        for number in range(first, first + 4):
            if number < first + 3:
                loop.fetch(number + 1)
            assert loop.forward() == number
            loop.backward(update=True)
    loop = Loop()
    loop.fetch(0, 1)
    training, loop.iterator = loop.iterator, Iterator()
    loop.fetch(70, 71)
    loop.iterator = training
    loop.fetch(2)
    assert loop.forward() == 0


def test_a_replay_gives_each_forward_the_batch_it_had() -> None:
    loop = Loop()
    loop.fetch(0, 1, 2)
    for number in range(2):
        assert [loop.forward(), loop.forward()] == [number, None]
        loop.backward()
    loop.notes.micro_steps = 0
    with loop.batches.repeating():
        loop.fetch(0, 1, 2)
        for number in range(2):
            assert [loop.forward(), loop.forward()] == [number, None]
            loop.backward()
    assert loop.forward() == 2


def noted(*args, **kwargs):
    return noted_batches((args, kwargs), is_forward=True)


def noted_batches(*found, is_forward=False, **more):
    notes = Notes()
    for each in found:
        batch.note(notes, each, is_forward, **more)
    return notes


def tokens(notes):
    return sum(cuda.read_count(count) for count in notes.tokens)


def ids(*shape):
    return torch.zeros(*shape, dtype=torch.long)


LONG = ids(2, 8)
PADDED = torch.ones_like(LONG)
PADDED[1, 5:] = 0


@pytest.mark.parametrize(
    ("args", "kwargs", "shape", "samples", "counted", "padded"),
    [
        ((), {"input_ids": LONG, "attention_mask": PADDED}, [2, 8], 2, 13, 16),
        ((LONG,), {}, [2, 8], 2, 16, 16),
        (({"labels": LONG, "input_ids": LONG, "attention_mask": PADDED.bool()},), {}, [2, 8], 2, 13, 16),
        # A causal mask of four dimensions is no list of pads.
        ((), {"input_ids": LONG, "attention_mask": torch.zeros(2, 1, 8, 8)}, [2, 8], 2, 16, 16),
        ((torch.zeros(5, 3, 4, 4),), {}, [5, 3, 4, 4], 5, 0, 0),
        (("text", [], None), {"flag": True}, [], 0, 0, 0),
    ],
)
def test_a_forward_has_samples_and_tokens_without_pads_where_a_mask_says(args, kwargs, shape, samples, counted, padded):
    notes = noted(*args, **kwargs)
    assert (notes.shape, notes.samples, tokens(notes), notes.padded_tokens) == (shape, samples, counted, padded)


def test_scalars_are_read_as_they_were_when_fetched():
    fetched = cuda.fetch_values(torch.tensor(1.5, requires_grad=True) * 2)
    norm = torch.tensor([7.0])
    held = cuda.fetch_values(norm)
    norm.zero_()
    assert (cuda.read(fetched), cuda.read(held)) == (3.0, 7.0)
    assert cuda.fetch_values(torch.zeros(3)) is None
    assert cuda.read(cuda.fetch_values(None)) is None


def test_a_mask_may_be_counted_later_nested_ids_are_tokens_and_the_largest_micro_batch_is_the_shape():
    notes = noted_batches({"input_ids": LONG, "attention_mask": PADDED}, later=True)
    assert not isinstance(notes.tokens[0], int)
    assert tokens(notes) == 13
    notes = noted_batches(({"input_ids": LONG, "attention_mask": PADDED}, ["names"]))
    assert (tokens(notes), notes.padded_tokens) == (13, 16)
    notes = noted_batches(*(((ids(2, length),), {}) for length in (4, 9, 6)), is_forward=True)
    assert (notes.shape, notes.samples, notes.padded_tokens) == ([2, 9], 6, 38)


class Fields:
    def __init__(self, **fields):
        self.__dict__.update(fields)


def nested(layout, dtype=torch.float32):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout, dtype=dtype)


X, Y = torch.zeros(4, 8), torch.zeros(4)
PICTURES = [torch.zeros(3, 20, 30), torch.zeros(3, 25, 25)]
TARGETS = [{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(5, 4)}]
IDS = ids(2, 6)


@pytest.mark.parametrize(
    ("found", "samples", "shape"),
    [
        ({"input": {"x": X}, "names": ["a"]}, 4, [4, 8]),
        (Fields(name="a", x=X, y=Y), 4, [4, 8]),
        (Fields(input_ids=IDS, attention_mask=torch.ones_like(IDS)), 2, [2, 6]),
        ((PICTURES, TARGETS), 0, []),
        # These may be lists of samples, or of the parts of a batch.
        ([{"image": each} for each in PICTURES], 0, []),
        ([(each, 1) for each in PICTURES], 0, []),
    ],
)
def test_the_samples_of_a_mapping_in_a_batch_and_of_objects_are_counted(found, samples, shape):
    for notes in (noted_batches(found), noted(found)):
        assert (notes.samples, notes.shape) == (samples, shape)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_has_its_samples_and_no_shape(layout):
    notes = noted(nested(layout))
    assert (notes.samples, notes.shape, notes.padded_tokens) == (2, [], 0)
    rows = nested(layout, torch.long)
    notes = noted_batches(*[{"input_ids": rows, "attention_mask": rows, "labels": rows}] * 2)
    assert (notes.samples, notes.shape, notes.labels, notes.tokens) == (4, [], [], [])
    fetched = batch.on_host({"input_ids": IDS, "attention_mask": rows, "labels": rows})
    assert (fetched.mask, fetched.labels) == (None, None)


@pytest.mark.parametrize("later", [False, True])
def test_a_mask_of_a_type_that_numpy_lacks_is_counted(later):
    mask = torch.tensor([[1, 1, 0]], dtype=torch.bfloat16)
    assert tokens(noted_batches({"input_ids": ids(1, 3), "attention_mask": mask}, later=later)) == 2
