"""The hook in docs/frameworks.md, installed into the framework that it is for."""

import re
import sys
from types import ModuleType

import pytest
import torch
from ftmon.trainer.probe import active
from ftmon.trainer.probe.events import Events
from ftmon.trainer.probe.link.publisher import step_message
from ftmon.trainer.probe.start import activate
from places import DOCS

DOCUMENT = DOCS / "frameworks.md"
STEPS = 3


class Trainer:
    """A loop with gradients of its own, and two micro-batches to an update."""

    lr = 0.5

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 1)
        self.step = 0
        self.grad_norm = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).pow(2).mean() / 2

    def backward(self, loss: torch.Tensor) -> None:
        weight = self.model.weight
        (weight.grad,) = torch.autograd.grad(loss, [weight])

    def update(self) -> None:
        self.step += 1
        self.grad_norm = 1.5 * self.step

    def save(self) -> None:
        if self.step > STEPS:
            raise OSError("no space")

    def fit(self) -> list[float]:
        told = []
        for _ in range(STEPS):
            losses = [self.forward(torch.randn(6, 4)) for _ in range(2)]
            for loss in losses:
                self.backward(loss)
            self.update()
            self.save()
            told.append(sum(losses).item())
        return told


@pytest.fixture
def hooked(monkeypatch):
    """The framework with the documented hook in it."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), flags=re.M | re.S)
    assert len(code.splitlines()) <= 55
    hooks = ModuleType("ftmon.trainer.probe.hooks.tiny")
    exec(compile(code, str(DOCUMENT), "exec"), vars(hooks))
    monkeypatch.setitem(sys.modules, hooks.__name__, hooks)
    tiny = ModuleType("tiny")
    tiny.Trainer = type("Trainer", (Trainer,), dict(vars(Trainer)))
    activate._install("tiny.install", tiny)
    return tiny.Trainer


def test_a_framework_with_the_documented_hook_has_its_steps_and_phases(hooked, training):
    told = hooked().fit()
    raws = training.outbox.unsent_steps()
    steps = [step_message(raw, 0, training.device.memory.read, 0) for raw in raws]
    found = [(step.step, step.lr, step.grad_norm, step.micro_steps) for step in steps]
    assert found == [(number, 0.5, 1.5 * number, 2) for number in range(1, STEPS + 1)]
    assert [step.loss for step in steps] == pytest.approx(told)
    assert [step.samples for step in steps] == [12] * STEPS
    names = [{phase.name for phase in step.phases} - {"init", "idle"} for step in steps]
    loop = {"forward", "backward", "optimizer"}
    assert names == [loop, loop | {"checkpoint"}, loop | {"checkpoint"}]
    facts = training.introduction.facts
    assert (facts["framework"], facts["model"], facts["parameters"]) == ("tiny", "Linear", 5)
    assert training.guard.enabled


def test_that_an_update_was_skipped_may_be_known_on_the_device_alone(training):
    events, engine = Events(training), torch.nn.Linear(2, 2)
    flags = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    for number, flag in enumerate(flags, 1):
        with events.update(engine, lambda: 0.1) as update:
            update.done(lambda number=number, flag=flag: {"number": number, "overflow": torch.tensor(flag)})
    raws = training.outbox.unsent_steps()
    steps = [step_message(raw, 0, training.device.memory.read, 0) for raw in raws]
    assert [step.overflow for step in steps] == [bool(flag) for flag in flags]


def test_without_a_probe_it_does_nothing_and_an_error_of_the_framework_stays_its_own(hooked, training, monkeypatch):
    trainer = hooked()
    trainer.step = STEPS + 1
    with pytest.raises(OSError, match="no space"):
        trainer.save()
    assert training.guard.enabled
    monkeypatch.setattr(active, "events", None)
    trainer.update()
    assert trainer.step == STEPS + 2
    assert not training.outbox.unsent_steps()
