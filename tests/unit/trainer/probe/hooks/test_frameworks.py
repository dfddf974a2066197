"""Batches of accelerate's loaders, and around an evaluation in loops that fetch before they change the model's mode."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.trainer.probe import active
from ftmon.trainer.probe.guard import replace
from ftmon.trainer.probe.hooks import frameworks
from ftmon.trainer.probe.hooks.frameworks import install_modeling

data_loader = pytest.importorskip("accelerate.data_loader")


class Loading:
    """Receives the reports of the hook; the loader's collate function fetches into its queue."""

    def __init__(self) -> None:
        self.fetched: Any = None
        self.pairs: list[tuple[int, int]] = []
        self.ends = 0

    def prefetching(self, prefetched: Any) -> None:
        self.fetched = prefetched

    def delivered(self, batch: Any) -> None:
        self.pairs.append((int(batch[0]), self.fetched.popleft()))

    def prefetched_all(self) -> None:
        self.ends += 1


@pytest.mark.parametrize(("count", "skipped"), [(5, 0), (1, 0), (5, 2), (0, 0)])
def test_each_batch_is_returned_with_what_was_counted_of_it(monkeypatch: Any, count: int, skipped: int) -> None:
    class Loader(data_loader.DataLoaderShard):
        pass

    replace(Loader, "__iter__", frameworks._iterating)
    loading = Loading()
    monkeypatch.setattr(frameworks, "mine", lambda: loading)

    def collate(rows: list[int]) -> torch.Tensor:
        loading.fetched.append(rows[0])
        return torch.tensor(rows)

    loader = Loader(list(range(count)), batch_size=1, collate_fn=collate, skip_batches=skipped)
    assert [int(batch[0]) for batch in loader] == list(range(skipped, count))
    assert loading.pairs == [(number, number) for number in range(skipped, count)]
    assert loading.ends == 1


class Batches:
    """A dataloader's iterator, weakly referable."""

    def __init__(self, dataset):
        self._dataset = dataset


class Loop:
    """A plain loop, whose forwards no hook sees."""

    def __init__(self, training):
        self.training, self.loading, self.steps = training, training.loading, training.micro_steps
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.training.updates.found_optimizer(self.optimizer)
        self.train, self.held_out = object(), object()

    def fetch(self, batches, rows=4):
        self.loading.fetching(batches)
        self.loading.fetched(torch.ones(rows, 2))

    def play(self, moves):
        """Change the model's mode (``eval`` and ``train``), fetch a batch of some data, or exhaust the last ones."""
        held_out, evaluated, self.batches = Batches(self.held_out), Batches(self.train), Batches(self.train)
        do = {
            "eval": lambda: self.loading.evaluating(self.model),
            "train": lambda: self.loading.evaluated(trains=True),
            "held": lambda: self.fetch(held_out, rows=9),
            "same": lambda: self.fetch(evaluated, rows=9),
            "one": lambda: self.fetch(Batches(self.train), rows=9),  # of an iterator that is gone
            "end": lambda: self.loading.exhausted(self.loading.last_iterator()),
            "batch": lambda: self.fetch(self.batches),
        }
        for move in moves.split():
            do[move]()

    def update(self):
        """Train on the batch fetched last; return the step's samples and phases, those of the updating left out."""
        self.steps.going_backward(())
        self.steps.went_backward()
        notes, marks = self.training.tracker.notes, self.training.tracker.marks
        self.training.updates.updating(None)
        self.training.updates.updated()
        names = [mark.phase for mark in marks[:-1]]
        names = [name for at, name in enumerate(names) if name not in ("idle", "init") and name != names[at - 1]]
        return notes.samples, names[: names.index("backward")]

    def epoch(self):
        batches = Batches(self.train)
        for _ in range(3):
            self.fetch(batches)
            assert self.update() == (4, ["data", "forward"])


@pytest.fixture
def loop(training):
    loop = Loop(training)
    loop.epoch()
    return loop


@pytest.mark.parametrize(
    ("moves", "phases"),
    [
        ("held eval batch train", ["eval", "data", "forward"]),
        ("held eval held eval held eval batch train", ["eval", "data", "forward"]),
        ("eval held held held end batch train", ["eval", "data", "forward"]),
        ("eval same same same end batch train", ["eval", "data", "forward"]),
        ("eval one train batch", ["eval", "data", "forward"]),
        ("batch eval held held held train", ["data", "forward", "eval", "forward"]),
    ],
    ids=[
        *("fetched before the mode changes", "and before each batch", "fetched before it changes back"),
        *("of the training data", "a batch that is only evaluated", "a batch before an evaluation of others"),
    ],
)
def test_a_step_has_its_own_batch_alone_whatever_was_evaluated_around_its_fetch(loop, moves, phases):
    loop.play(moves)
    assert loop.update() == (4, phases)


def test_a_single_batch_evaluated_last_is_no_forward(loop):
    loop.play("held eval")
    loop.training.hand_over_closing()
    marks = loop.training.outbox.items[-1].raw.marks
    assert {mark.phase for mark in marks} - {"", "idle"} == {"eval"}


class PreTrained(torch.nn.Linear):
    """As the models of transformers 5, it has its own ``eval``."""

    def eval(self):
        return self.train(False)

    def save_pretrained(self):
        pass


def test_a_model_that_has_its_own_eval_is_evaluated_from_it_to_train(loop):
    install_modeling(SimpleNamespace(PreTrainedModel=PreTrained))
    model = PreTrained(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.training.updates.found_optimizer(optimizer)
    model.eval()
    assert (loop.training.tracker.phase, model.training) == ("eval", False)
    model.train()
    assert (loop.training.tracker.phase, model.training) == ("idle", True)


def test_a_function_that_an_older_version_lacks_leaves_the_other_hooks_in_place() -> None:
    class Engine:
        """As DeepSpeed 0.18's, without the method ``scale`` of later ones."""

        def step(self) -> str:
            return "stepped"

    for name in ("scale", "step"):
        replace(Engine, name, lambda original: lambda self: f"seen and {original(self)}")
    assert Engine().step() == "seen and stepped"
    assert not hasattr(Engine, "scale")


@pytest.mark.parametrize(("ranks", "step"), [(1, 2), (8, 5)])
def test_a_further_training_of_a_trainer_counts_its_own_steps(loop, ranks: int, step: int) -> None:
    loop.epoch()
    loop.training.tracker.step = 5
    object.__setattr__(loop.training.rank, "world_size", ranks)
    active.events.trainer(loop.model, 2, {})
    assert loop.training.tracker.step == step
