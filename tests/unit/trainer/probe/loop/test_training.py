"""Hooks called as their frameworks call them, with a real ``Training`` behind them."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.trainer.probe import active
from ftmon.trainer.probe.hooks import distributed
from ftmon.trainer.probe.hooks import torch as hooks
from ftmon.trainer.probe.hooks.frameworks import callback_class
from ftmon.trainer.probe.loop.training import Training
from ftmon.trainer.probe.loop.updates import IDLE
from ftmon.trainer.probe.phases.tracker import Notes
from torch.amp.grad_scaler import OptState


class Unsized:
    """A dataloader whose length is its data set's, which has none."""

    def __len__(self) -> int:
        raise AttributeError("no length")

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False


def test_a_plan_is_reported_without_epochs_where_the_data_have_no_length(training: Training) -> None:
    pytest.importorskip("transformers")
    arguments: dict[str, Any] = {"max_steps": 8, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}
    args = SimpleNamespace(**arguments, bf16=False, fp16=False, output_dir="out")
    state = SimpleNamespace(max_steps=8, global_step=0)
    callback_class()().on_train_begin(args, state, None, train_dataloader=Unsized())
    plan = training.introduction.plan
    assert (plan.total_steps, plan.epochs) == (8, None)


def trained(events: Any, model: torch.nn.Module, *optimizers: Any) -> None:
    """Report a step of these optimizers, whose hooks are not installed."""
    loss = model(torch.ones(2, 4)).sum()
    with events.backward([loss]):
        loss.backward()
    for optimizer in optimizers:
        events.stepping(optimizer)
        optimizer.step()
        events.stepped(optimizer)


def test_an_optimizer_that_has_not_stepped_after_many_steps_is_told_with_its_parameters(training: Training) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    training.trained.model = lambda: model
    first, idle = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    again = torch.optim.SGD(model[0].parameters(), lr=0.1)  # of parameters that another one updates
    for each in (first, idle, again):
        active.events.made_optimizer(each, sys._getframe())
    noted = {}
    for _ in range(IDLE + 5):
        number = training.tracker.step + 1
        before = training.tracker.notes
        trained(active.events, model, first)
        noted[number] = before.left_out
    assert {number: each for number, each in noted.items() if each[0]} == {IDLE + 1: (2, "1.weight")}


def test_steps_go_on_where_a_loaded_optimizer_has_stopped(training: Training) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(7):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    trained(active.events, model, optimizer)
    assert training.tracker.step == 8
    trained(active.events, model, optimizer)
    assert training.tracker.step == 9


def test_clipping_to_nothing_and_clipping_of_scaled_gradients_is_noted(training: Training) -> None:
    norm, scaler = torch.tensor(2.0), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    def clipped(limit: Any, *, unscaled: bool) -> str:
        notes = training.tracker.notes = Notes()
        active.events.clipped(norm, limit)
        if unscaled:
            scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
        hooks._scaler_step(active.events, scaler, optimizer)
        scaler._per_optimizer_states.clear()
        return notes.clipped

    assert [clipped(1.0, unscaled=True), clipped(1.0, unscaled=False)] == ["", "scaled"]
    assert clipped(float("inf"), unscaled=False) == "", "the norm is only read"
    assert [clipped(0, unscaled=True), clipped(torch.zeros(()), unscaled=True)] == ["zero", ""]
    training.tracker.notes = Notes()
    hooks._scaler_step(active.events, scaler, optimizer)
    assert training.tracker.notes.clipped == "", "nothing was clipped"


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_evaluate", "on_save"])
def test_no_event_of_the_callback_ends_the_training(training: Training, event: str) -> None:
    pytest.importorskip("transformers")
    active.probe._stop = None
    broken = SimpleNamespace(is_world_process_zero=True, global_step="none")
    assert getattr(callback_class()(), event)(None, broken, None, metrics={"eval_loss": 1.0}) is None


def test_a_rank_s_pipeline_stage_is_its_first_one_also_after_an_engine_that_has_none(training: Training) -> None:
    class Stage:
        def __init__(self, index: int) -> None:
            self.stage_index, self.submod = index, torch.nn.Linear(1, 1)

    distributed._on_pipeline(SimpleNamespace(_PipelineStageBase=Stage))
    facts = training.introduction.facts
    facts["pipeline_stage"] = None
    for index in (4, 0, 2):
        Stage(index)
    assert facts["pipeline_stage"] == 0


@pytest.mark.parametrize(
    ("old", "same", "forward_by"),
    [("freed", False, ""), ("freed", True, "parallel"), ("kept", False, "parallel"), ("no step", False, "parallel")],
)
def test_what_was_learned_of_a_training_holds_until_other_parameters_are_trained(training, old, same, forward_by):
    def made(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        active.events.made_optimizer(optimizer, sys._getframe())
        return optimizer

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    first = made(model)
    training.state.forward_by, training.state.added_ranks = "parallel", 2.0
    training.introduction.facts["framework"] = "ddp"
    active.events.stepping(first)
    if old != "no step":
        active.events.stepped(first)
    if old == "freed":
        training.updates.updater = None
        del first
    second = made(model if same else other)
    assert training.state.forward_by == forward_by
    assert training.state.added_ranks == (2.0 if forward_by else 1.0)
    assert training.introduction.facts["framework"] == ("ddp" if forward_by else "pytorch")
    assert training.forwards.is_sole(second) == (old == "freed")


def test_an_optimizer_for_each_task_says_once_what_they_train(training: Training) -> None:
    class Task(torch.nn.Linear):
        pass

    def sent(model: torch.nn.Module) -> int:
        before = len(training.outbox.items)
        active.events.made_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), sys._getframe())
        training.tracker.step += 1
        return len(training.outbox.items) - before

    task, other = Task(2, 2), torch.nn.Linear(3, 3)
    assert [sent(task) for _ in range(4)] == [1, 0, 0, 0]
    assert training.introduction.facts["model"] == "Task"
    assert [sent(other), sent(task)] == [1, 1]
