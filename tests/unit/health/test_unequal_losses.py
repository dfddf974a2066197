"""Ranks with different losses for the same batch: what is found, and what a probe takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.analysis.findings import Finding
from ftmon.protocol.analysis.health.unequal_losses import UnequalLosses
from ftmon.protocol.messages.health import BatchLoss
from ftmon.trainer.probe.rank.trained import Trained
from ftmon.trainer.probe.values import batch_losses
from ftmon.trainer.probe.values.batch_losses import BatchLosses

SAME = {0: ("a", 2.0), 1: ("a", 2.0), 2: ("a", 2.0), 3: ("b", 5.0)}


def fed(*steps: dict[int, tuple[str, float]]) -> list[Finding]:
    judge = UnequalLosses()
    for rank in SAME:
        judge.batch_loss(BatchLoss(rank, 1, 1.0, str(rank), 1.0, 1e-3))
    found: list[Finding] = []
    for number, losses in enumerate(steps, 1):
        for rank, (inputs, loss) in losses.items():
            found += judge.batch_loss(BatchLoss(rank, 10 * number + 1, 1.0, inputs, loss, 1e-3))
    return found


def with_rank_2(loss: float) -> dict[int, tuple[str, float]]:
    return {**SAME, 2: ("a", loss)}


def test_a_rank_with_another_loss_for_the_same_inputs_is_named_at_the_second_such_step():
    assert fed(with_rank_2(2.2)) == []
    (found,) = fed(with_rank_2(2.2), with_rank_2(2.2))
    facts = found.facts
    assert (found.kind, found.ranks, facts.ranks, facts.first_step, facts.step) == (
        "unequal_losses",
        (2,),
        (0, 1, 2),
        11,
        21,
    )
    assert (found.severity, found.step, facts.odd_ranks) == ("warning", 21, (2,))
    assert facts.losses == ((2, 2.2), (0, 2.0), (1, 2.0))
    assert facts.difference == pytest.approx(0.2 / 2.2)


def test_different_inputs_rounding_and_losses_that_are_not_finite_are_nothing():
    other = {rank: (str(rank), float(rank)) for rank in SAME}
    assert fed(other, other, other) == []
    assert fed(with_rank_2(2.001), with_rank_2(2.001)) == []
    assert fed(with_rank_2(float("nan")), with_rank_2(float("nan"))) == []
    near_zero = {0: ("a", 1e-5), 1: ("a", -1e-5)}
    losses = [{0: ("a", 3.0), 1: ("a", 3.0), 2: ("c", 1.0), 3: ("b", 1.0)}]
    assert fed(*losses, *[{**SAME, **near_zero, 2: ("c", 1.0)}] * 3) == [], "a sum that cancels"


def test_it_takes_two_in_a_row_and_resolves_after_three_equal_ones():
    assert fed(with_rank_2(2.2), SAME, with_rank_2(2.2)) == []
    found = fed(with_rank_2(2.2), with_rank_2(2.2), SAME, SAME, SAME)
    assert [one.state for one in found] == ["raised", "resolved"]


def test_of_two_ranks_both_are_named():
    pair = {0: ("a", 2.0), 1: ("a", 2.4), 2: ("c", 1.0), 3: ("b", 1.0)}
    (found,) = fed(pair, pair)
    assert found.ranks == (0, 1)
    assert found.facts.odd_ranks == ()


class Loop:
    """What a probe's hooks see of one micro-step."""

    def __init__(self, model: Any = None, world_size: int = 2, is_comparable: bool = True) -> None:
        rank: Any = SimpleNamespace(
            world_size=world_size, rank=1, device=SimpleNamespace(events=None, mark_event=lambda: None)
        )
        tracker: Any = SimpleNamespace(watchers=(), cost_ns=0)
        trained = Trained()
        trained.model = lambda: model
        self.is_comparable = is_comparable
        self.taker = BatchLosses(rank, tracker, trained)

    def step(self, number: int, batch: Any, args: Any, loss: Any, draw: bool = False) -> list[BatchLoss]:
        self.taker.arm(number, self.is_comparable)
        if self.taker.current is not None:
            self.taker.add(batch, False)
            self.taker.add((args, {}), True)
            if draw:
                torch.rand(1)
            self.taker.end(loss)
        assert self.taker.current is None
        return self.taker.ready()


ROWS, LABELS, LOSS = torch.arange(12.0).view(3, 4), torch.tensor([1, 0, 1]), torch.tensor(0.5)


def inputs(batch: Any, args: Any = (ROWS,)) -> str:
    (found,) = Loop().step(10, batch, args, LOSS)
    assert (found.rank, found.step, found.loss, found.precision) == (1, 11, 0.5, batch_losses.PRECISION)
    return found.inputs


def test_the_fingerprint_is_of_all_that_the_loader_gave_and_the_model_was_called_with():
    same = inputs([ROWS, LABELS])
    assert inputs([ROWS.clone(), LABELS.clone()]) == same
    others = [
        inputs([ROWS, 1 - LABELS]),
        inputs([ROWS, LABELS], (ROWS + 1,)),
        inputs([ROWS.flip(0), LABELS]),
        inputs([ROWS.double(), LABELS]),
        inputs([ROWS.view(4, 3), LABELS]),
        inputs({"rows": {"deep": [ROWS.bfloat16(), LABELS]}}),
        inputs([ROWS.t(), LABELS]),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_steps_that_are_not_due_and_lone_ranks_are_left_alone():
    assert Loop().step(11, [ROWS], (ROWS,), LOSS) == []
    assert Loop(world_size=1).step(10, [ROWS], (ROWS,), LOSS) == []
    assert Loop(is_comparable=False).step(10, [ROWS], (ROWS,), LOSS) == [], "no forward is seen"


def test_nothing_is_taken_where_ranks_may_honestly_differ():
    assert Loop().step(10, [ROWS], (ROWS,), LOSS, draw=True) == [], "a random number was drawn"
    dropout = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
    assert Loop(dropout).step(10, [ROWS], (ROWS,), LOSS) == []
    assert len(Loop(dropout.eval()).step(10, [ROWS], (ROWS,), LOSS)) == 1


def test_half_precision_allows_more():
    (found,) = Loop(torch.nn.Linear(2, 2).bfloat16()).step(10, [ROWS], (ROWS,), LOSS)
    assert found.precision == batch_losses.HALF_PRECISION
    with torch.autocast("cpu"):
        (found,) = Loop().step(10, [ROWS], (ROWS,), LOSS)
    assert found.precision == batch_losses.HALF_PRECISION


def test_an_error_ends_comparisons_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_losses.guard, "log_error", lambda *_: None)
    loop = Loop()
    loop.taker.arm(10, is_comparable=True)
    monkeypatch.setattr(batch_losses, "_tensors", lambda *_: 1 / 0)
    assert loop.taker.current is not None
    loop.taker.add([ROWS], False)
    assert loop.taker.current is None
    loop.taker.arm(20, is_comparable=True)
    assert loop.taker.current is None


LARGE = torch.arange(4.0 * 3 * 40 * 50).view(4, 3, 40, 50)


@pytest.mark.parametrize(
    "tensor",
    [LARGE, LARGE.to(memory_format=torch.channels_last), LARGE[..., :-1], LARGE[:, :, 0, 0], LARGE.mT, LARGE[0, 0, 0]],
    ids=["contiguous", "channels last", "cut", "small", "transposed", "one dimension"],
)
@pytest.mark.parametrize("most", [1, 7, 1000, 6001, 10**6])
def test_the_first_elements_of_any_layout_are_taken_without_copying_all(tensor: torch.Tensor, most: int) -> None:
    found = batch_losses.first_elements(tensor, most)
    assert torch.equal(found, tensor.reshape(-1)[:most])
    copied = found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert not copied or found.untyped_storage().nbytes() <= 2 * most * found.itemsize
