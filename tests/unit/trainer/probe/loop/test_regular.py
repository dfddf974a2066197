"""Loops that are followed by the order of earlier steps: each step is told as if every event had been judged."""

import json
import math
from collections import OrderedDict
from contextlib import nullcontext
from itertools import chain, pairwise
from threading import Thread
from time import sleep
from types import SimpleNamespace

import msgspec
import pytest
import torch
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.probe import active
from ftmon.trainer.probe.device import cuda
from ftmon.trainer.probe.events import TorchEvents
from ftmon.trainer.probe.hooks import torch as hooks_torch
from ftmon.trainer.probe.link.publisher import step_message
from ftmon.trainer.probe.loop import regular, updates
from ftmon.trainer.probe.loop.training import Training
from ftmon.trainer.probe.phases.tracker import Counts
from ftmon.trainer.probe.rank.context import RankContext
from ftmon.trainer.probe.values import batch as batches
from ftmon.trainer.probe.values.signs import SignReader

BATCHES = 14


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 9, (2 * BATCHES, 5))]
        self.loader = torch.utils.data.DataLoader(rows, batch_size=2)

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self.model(batch["input_ids"]).mT, batch["labels"])

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(loop):
    for _ in range(2):
        for batch in loop.loader:
            loop.loss(batch).backward()
            loop.update()


def accumulating(loop):
    for number, batch in enumerate(loop.loader):
        (loop.loss(batch) / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            loop.update()


def more_micro_batches_later(loop):
    every = 1
    for number, batch in enumerate(chain(loop.loader, loop.loader)):
        every = 3 if number == BATCHES else every
        loop.loss(batch).backward()
        if number % every == 0:
            loop.update()


def evaluating(loop):
    for number, batch in enumerate(loop.loader):
        loop.loss(batch).backward()
        loop.update()
        if number % 5 == 4:
            loop.model.eval()
            with torch.no_grad():
                for other in loop.loader:
                    loop.loss(other)
            loop.model.train()


def leaving_a_batch_out(loop):
    for number, batch in enumerate(loop.loader):
        loss = loop.loss(batch)
        if number == 9:
            continue
        loss.backward()
        loop.update()


def gradients_zeroed_after_a_backward(loop):
    for number, batch in enumerate(loop.loader):
        loop.loss(batch).backward()
        if number == 9:
            loop.optimizer.zero_grad()
            continue
        loop.update()


def a_backward_that_fails(loop):
    for number, batch in enumerate(loop.loader):
        loss = loop.loss(batch)
        if number == 9:
            loss.register_hook(lambda _: 1 / 0)
        try:
            loss.backward()
        except ZeroDivisionError:
            continue
        loop.update()


def saving(loop):
    for number, batch in enumerate(loop.loader):
        loop.loss(batch).backward()
        if number == 8:
            with open("/dev/null", "wb") as file:
                torch.save(loop.model.state_dict(), file)
        loop.update()


def scaling(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for number, batch in enumerate(loop.loader):
        scaler.scale(loop.loss(batch) * (float("inf") if number == 9 else 1.0)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()


def updates_that_the_script_skips(loop):
    for number, batch in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        (loop.loss(batch) * (float("nan") if 7 < number < 11 else 1.0)).backward()
        if torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0).isfinite():
            loop.optimizer.step()


def another_optimizer_later(loop):
    for number, batch in enumerate(loop.loader):
        if number == 8:
            loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.2)
        loop.loss(batch).backward()
        loop.update()


def two_losses(loop):
    for batch in loop.loader:
        loss = loop.loss(batch)
        torch.autograd.backward([loss, 2 * loss])
        loop.update()


class TinyForCausalLM(torch.nn.Sequential):
    """Named as transformers' models that shift the labels themselves."""


def a_causal_model(loop):
    loop.model = TinyForCausalLM(*loop.model)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    plain(loop)


def an_engine(loop):
    """As a hook into a framework tells its loop, with an evaluation in the middle."""
    active.events._micro_steps.expect_forward("engine")
    for number, batch in enumerate(loop.loader):
        events = active.events
        with events.forward(loop.model, (), batch, "tiny", always=True):
            loss = loop.loss(batch)
        with events.backward((loss,)):
            loss.backward()
        with events.update(loop.model, lambda: 0.5) as update:
            loop.optimizer.step()
            update.done(lambda number=number: {"number": number + 1, "grad_norm": 1.5, "accumulation": 1})
        loop.optimizer.zero_grad()
        if number == 9:
            with events.phase("eval"):
                loop.loss(batch)


LOOPS = [plain, accumulating, more_micro_batches_later, evaluating, leaving_a_batch_out]
LOOPS += [gradients_zeroed_after_a_backward, a_backward_that_fails, saving, scaling]
LOOPS += [updates_that_the_script_skips, another_optimizer_later, two_losses, a_causal_model, an_engine]


def probed(monkeypatch, *, coarse=True):
    """Return a rank's training that the hooks report to; with ``coarse``, no step's phases are read one by one."""
    training = Training(RankContext(0, 0, 1, RunDir("run")), Counts())
    training.device.settled = True
    if coarse:
        training.tracker.budget.end_step = training.tracker.budget.passed = lambda *_: None
        training.tracker.budget.full = False
    monkeypatch.setattr(active, "events", TorchEvents(training))
    hooks_torch.install(torch)
    return training


def on_a_device(training, monkeypatch):
    """Handle batches and times as on a GPU, where a followed step keeps its batch for the publisher."""
    training.device.events = SimpleNamespace(stream=lambda: None)
    monkeypatch.setattr(cuda.torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(cuda.torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True))
    monkeypatch.setattr(training.device, "mark_event", lambda: None)
    monkeypatch.setattr(training.tracker, "mark_event", lambda: None)

    def fetched(value, scalar=None):
        if not isinstance(value, torch.Tensor):
            return value
        return float(value.detach()) if scalar is None else scalar(value)

    monkeypatch.setattr(cuda, "is_idle", bool)
    monkeypatch.setattr(cuda, "fetch_values", fetched)
    monkeypatch.setattr(cuda, "fetch_scalar", float)


def in_blocks(training, steps):
    training.tracker.budget.block, training.tracker.budget.every = steps, 200


def blocks_on_a_device(monkeypatch):
    training = probed(monkeypatch)
    in_blocks(training, 8)
    on_a_device(training, monkeypatch)
    return training


def published(training):
    """Return the messages of the steps that were not sent, and the steps, after the publisher's part of the work."""
    for item in training.outbox.items:
        assert not isinstance(item, regular.Followed) or training.regular.fetch(item)
    raws = training.outbox.unsent_steps()
    return [step_message(raw, 0, training.device.memory.read, 0) for raw in raws], raws


def told(script, monkeypatch, like, block=1, *, device=False):
    """Run a script; return its published steps without times and sizes, and the number of followed steps."""
    training = probed(monkeypatch)
    in_blocks(training, block)
    if device:
        on_a_device(training, monkeypatch)
    monkeypatch.setattr(regular, "LIKE", like)
    try:
        script(Loop())
        training.hand_over_closing()
    finally:
        monkeypatch.setattr(active, "events", None)
    assert training.guard.enabled, "the probe has switched itself off"
    steps, raws = published(training)
    kept = ("step", "micro_steps", "loss", "lr", "grad_norm", "loss_scale", "overflow", "batch_shape", "samples")
    kept += ("tokens", "padded_tokens", "label_tokens")
    figures = [{name: getattr(step, name) for name in kept} for step in steps]
    phases = [[(each.name, each.count, each.coarse) for each in step.phases if each.name != "idle"] for step in steps]
    return msgspec.json.encode([figures, phases]).decode(), sum(raw.followed for raw in raws)


@pytest.mark.parametrize("script", LOOPS, ids=lambda each: each.__name__)
def test_a_followed_step_is_told_as_a_judged_one(script, monkeypatch):
    judged, none = told(script, monkeypatch, 10**9)
    followed, count = told(script, monkeypatch, 1)
    assert none == 0
    assert followed == judged
    assert count >= 2


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("script", LOOPS, ids=lambda each: each.__name__)
def test_a_step_of_a_block_is_told_as_a_judged_one(script, device, monkeypatch):
    judged, _ = told(script, monkeypatch, 10**9, device=device)
    followed, count = told(script, monkeypatch, 1, 4, device=device)
    assert followed == judged
    assert count >= 2


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_steps_of_blocks_go_on_from_each_other(device, monkeypatch):
    training = probed(monkeypatch)
    in_blocks(training, 8)
    if device:
        on_a_device(training, monkeypatch)
    plain(Loop())
    steps, raws = published(training)
    assert [step.step for step in steps] == list(range(1, 2 * BATCHES + 1))
    followed = [step for step, raw in zip(steps, raws, strict=True) if raw.followed]
    assert len(followed) > BATCHES
    for step in followed:
        assert (step.tokens, step.label_tokens, step.micro_steps) == (10, 10, 1)
        assert step.phase("optimizer").coarse is False
    assert all(raw.cost_ns > 0 for raw in raws)
    assert all(one.marks[-1].ns == after.marks[0].ns for one, after in pairwise(raws))


def test_a_thread_that_waits_for_the_backward_of_a_followed_step_goes_on_in_it(monkeypatch):
    follows, loop, found = probed(monkeypatch).regular, Loop(), []
    assert not follows.await_backward(60), "the first step is judged"
    for batch in loop.loader:
        loss = loop.loss(batch)
        if follows.place is not None:
            found.append(follows.await_backward(0))
            waiting = Thread(target=lambda: found.append(follows.await_backward(60)))
            waiting.start()
            while follows._awaited is None:
                sleep(0.001)
            loss.register_hook(lambda _, waiting=waiting: waiting.join(60) or found.append(follows.await_backward(0)))
        loss.backward()
        loop.update()
    assert len(found) > BATCHES
    assert found == [False, True, True] * (len(found) // 3)


def test_losses_stay_on_the_device_until_the_end_of_a_block_unless_a_script_overwrites_one(monkeypatch):
    training = blocks_on_a_device(monkeypatch)
    loop, losses, followed = Loop(), [], set()
    for number, batch in enumerate(chain(loop.loader, loop.loader), 1):
        loss = loop.loss(batch)
        loss.backward()
        losses.append(float(loss))
        if number == 12:
            loss.detach().zero_()
        loop.update()
        raw = published(training)[1][-1]
        if raw.followed:
            # That of step 12 is overwritten, in a block that ends with the first pass: later ones are copied at once.
            assert (type(raw.notes.losses[0]) is cuda.Kept) == (number <= BATCHES)
            followed.add(number)
    assert {9, 12, BATCHES, BATCHES + 10} <= followed
    steps, _ = published(training)
    losses[11] = None
    assert [step.loss for step in steps] == losses


def test_a_device_in_an_error_state_raises_nothing_in_the_script_and_leaves_the_probe_on(monkeypatch):
    training = blocks_on_a_device(monkeypatch)

    def failing(_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(cuda, "fetch_scalar", failing)
    saving(Loop())
    assert training.guard.enabled
    assert sum(raw.followed for raw in training.outbox.unsent_steps()) >= 2


def test_what_a_script_reports_belongs_to_its_step_and_a_block_under_way_is_counted(monkeypatch):
    training = blocks_on_a_device(monkeypatch)
    loop = Loop()
    for number, batch in enumerate(loop.loader, 1):
        loop.loss(batch).backward()
        if number in (11, 13):
            training.tracker.own_notes().reported_loss = float(number)
        loop.update()
        assert training.outbox.steps_done == training.tracker.step == number
    steps, raws = published(training)
    assert [raw.number for raw in raws] == list(range(1, BATCHES + 1))
    assert [step.loss for step in steps if step.step in (11, 13)] == [11.0, 13.0]
    assert len({id(raw.notes) for raw in raws}) == BATCHES


def test_a_batch_of_another_kind_in_a_block_is_noted_at_once(monkeypatch):
    training = blocks_on_a_device(monkeypatch)
    loop = Loop()
    rows = [{"input_ids": ids} for ids in torch.randint(0, 9, (40, 5))]

    def collate(found):
        batch = {"input_ids": torch.stack([row["input_ids"] for row in found])}
        batch |= {"labels": batch["input_ids"]}
        return OrderedDict(batch) if torch.equal(found[0]["input_ids"], rows[20]["input_ids"]) else batch

    for batch in torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate):
        loop.loss(batch).backward()
        loop.update()
    steps, raws = published(training)
    assert raws[10].followed
    assert [(step.step, step.samples, step.tokens) for step in steps] == [(n, 2, 10) for n in range(1, 21)]


@pytest.mark.parametrize("like", [10**9, 1], ids=["judged", "followed"])
@pytest.mark.parametrize(("script", "labels"), [(plain, 10), (a_causal_model, 8)])
def test_a_causal_model_learns_no_label_of_a_row_s_first_token(script, labels, like, monkeypatch):
    figures, _ = json.loads(told(script, monkeypatch, like)[0])
    assert [step["label_tokens"] for step in figures] == [labels] * 2 * BATCHES


@pytest.mark.parametrize(("script", "steps"), [(updates_that_the_script_skips, [9, 10, 11]), (scaling, [10])])
@pytest.mark.parametrize("block", [1, 8])
def test_an_update_skipped_as_its_gradients_are_not_finite_is_a_step_without_one(script, steps, block, monkeypatch):
    figures, _ = msgspec.json.decode(told(script, monkeypatch, 1, block)[0])
    assert [(each["step"], each["lr"]) for each in figures if each["overflow"]] == [(step, 0.1) for step in steps]
    assert [each["step"] for each in figures] == list(range(1, BATCHES + 1))


@pytest.mark.parametrize("zeroes", [False, True])
def test_micro_batches_at_the_end_of_a_pass_join_the_next_one_or_are_dropped_whatever_its_data_set(zeroes, monkeypatch):
    training = probed(monkeypatch, coarse=False)
    loop, done = Loop(), 0
    for _ in range(3):
        if zeroes:
            loop.optimizer.zero_grad()
            done = 0
        for batch in torch.utils.data.DataLoader(list(loop.loader.dataset[:12]), batch_size=2):
            loop.loss(batch).backward()
            done += 1
            if done % 4 == 0:
                loop.update()
    ends = [(raw.notes.pending, raw.notes.dropped) for raw in training.outbox.unsent_steps()]
    assert ends == ([(0, 0), (0, 2), (0, 2)] if zeroes else [(0, 0), (2, 0), (0, 0), (0, 0)])


def pending(training):
    return [(raw.notes.pending, raw.notes.micro_steps) for raw in training.outbox.unsent_steps()]


def test_no_micro_batch_is_pending_after_whole_accumulations_if_the_model_stays_in_evaluation_mode(monkeypatch):
    training, loop = probed(monkeypatch, coarse=False), Loop()
    for _ in range(3):
        for number, batch in enumerate(torch.utils.data.DataLoader(list(loop.loader.dataset[:8]), batch_size=2)):
            loop.loss(batch).backward()
            if number % 2:
                loop.update()
        loop.model.eval()
    assert pending(training) == [(0, 2)] * 6


def test_micro_batches_that_another_optimizer_has_applied_are_not_pending_at_the_end_of_a_pass(monkeypatch):
    training, loop = probed(monkeypatch, coarse=False), Loop()
    generator = torch.nn.Linear(2, 1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _ in range(3):
        for batch in torch.utils.data.DataLoader(list(loop.loader.dataset[:6]), batch_size=2):
            loop.loss(batch).backward()
            loop.update()
            generator(torch.ones(1, 2)).sum().backward()
            second.step()
            second.zero_grad()
    assert pending(training) == [(0, 1)] + [(0, 2)] * 8


class Samples:
    measure, device_index, taken = "cuda", 0, 0
    tidy = read = None

    def sample(self):
        self.taken += 1
        return self.taken


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_the_optimizer_s_memory_is_read_in_each_followed_step(device, block, monkeypatch):
    training = probed(monkeypatch)
    in_blocks(training, block)
    training.tracker.memory = Samples()
    if device:
        on_a_device(training, monkeypatch)
    plain(Loop())
    for raw in training.outbox.unsent_steps()[-5:]:
        read = [mark.phase for mark in raw.marks if mark.memory is not None]
        assert raw.coarse
        assert read == ["idle", "optimizer", "idle"], "at the step's two ends and where the optimizer begins"


def test_a_mode_that_is_set_by_hand_is_seen_in_the_same_step_although_that_is_followed(monkeypatch):
    training = probed(monkeypatch)
    loop = Loop()
    loop.model.append(torch.nn.Dropout(0.5))
    training.trained.model = lambda: loop.model
    for number, batch in enumerate(loop.loader, 1):
        if number == 10:
            loop.model.training = False
            for child in loop.model:
                child.training = False
        loop.loss(batch).backward()
        loop.update()
    raws = training.outbox.unsent_steps()
    assert raws[9].followed
    assert [raw.notes.evaluating for raw in raws] == [raw.number >= 10 for raw in raws]


@pytest.mark.parametrize("watched", [True, False])
def test_weights_are_sampled_where_each_phase_is_read_as_in_a_captured_step(watched, monkeypatch):
    training = probed(monkeypatch)
    training.tracker.watchers = (lambda *_: None,) if watched else ()
    plain(Loop())
    steps, raws = published(training)
    for raw, step in zip(raws[1:], steps[1:], strict=True):
        assert (raw.notes.weights is not None) is watched
        assert step.phase("forward").coarse is not watched


def test_on_a_device_each_forward_has_the_batch_that_was_fetched_for_it_judged_followed_or_replayed(monkeypatch):
    training = probed(monkeypatch)
    on_a_device(training, monkeypatch)
    given, note = [], batches.note

    def noted(notes, found, is_forward, *more):
        if is_forward:
            given.append((found[1]["input_ids"], more[1]))
        note(notes, found, is_forward, *more)

    monkeypatch.setattr(regular, "LIKE", 1)
    monkeypatch.setattr(batches, "note", noted)
    active.events._micro_steps.expect_forward("engine")
    loop = Loop()
    for number, rows in enumerate(chain(*[loop.loader] * 8)):
        with active.events.forward(loop.model, (), rows, "tiny", always=True):
            loss = loop.loss(rows)
        with active.events.backward((loss,)):
            loss.backward()
        if number == 3 * BATCHES + 10:
            training.regular.leave()
        if number % 2:
            with active.events.update(loop.model, lambda: 0.5) as update:
                loop.optimizer.step()
                update.done(lambda number=number: {"number": number // 2 + 1, "accumulation": 2})
            loop.optimizer.zero_grad()
    training.hand_over_closing()
    assert training.guard.enabled, "the probe has switched itself off"
    assert sum(raw.followed for raw in training.outbox.unsent_steps()) > BATCHES
    assert len(given) >= 8 * BATCHES
    for ids, fetched in given:
        assert torch.equal(fetched.ids, ids)


class Two(torch.nn.Module):
    """A body and a head, in one data type or in two."""

    def __init__(self, head_dtype=torch.float32):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1, dtype=head_dtype)

    def forward(self):
        return self.head(self.body(torch.ones(2, 4)).to(self.head.weight.dtype)).float().mean()


def two_optimizers(model):
    model.other = torch.optim.SGD(model.head.parameters(), lr=0.1)
    return torch.optim.SGD(model.body.parameters(), lr=0.1)


def a_head_that_is_replaced(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head = torch.nn.Linear(4, 1)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        (lambda model: torch.optim.SGD(model.body.parameters(), lr=0.1), torch.float32, (2, "head.weight")),
        (a_head_that_is_replaced, torch.float32, (2, "head.weight")),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), torch.float32, (0, "")),
        (lambda model: torch.optim.SGD(model.head.requires_grad_(False).parameters(), lr=0.1), torch.float32, (0, "")),
        (lambda model: torch.optim.SGD(model.body.parameters(), lr=0.1), torch.bfloat16, (0, "")),
        (two_optimizers, torch.float32, (0, "")),
    ],
    ids=["forgotten", "replaced", "all", "frozen", "of another type", "another optimizer's"],
)
def test_parameters_with_gradients_that_no_optimizer_has_are_noted_at_the_first_update(
    optimizer, dtype, expected, training, monkeypatch
):
    hooks_torch.install(torch)
    model = Two(dtype)
    kept = optimizer(model)
    training.trained.find(lambda: model)
    for _ in range(2):
        model().backward()
        kept.step()
    assert [raw.notes.left_out for raw in training.outbox.unsent_steps()] == [expected, (0, "")]


class Engine:
    """What the probe reads of DeepSpeed's engine: its optimizer has a flat copy of the parameters of its groups."""

    def __init__(self, model, groups):
        self.module = model
        flat = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = SimpleNamespace(bit16_groups=groups, param_groups=[{"params": [flat]}])


@pytest.mark.parametrize(("parts", "expected"), [(["body"], (2, "head.weight")), (["body", "head"], (0, ""))])
def test_parameters_with_gradients_that_an_engine_s_optimizer_does_not_have_are_noted(parts, expected, training):
    model = Two(torch.float32)
    engine = Engine(model, [list(getattr(model, part).parameters()) for part in parts])
    training.trained.find(lambda: model)
    training.state.engine_steps = True
    for number in range(1, 3):
        model().backward()
        with active.events.update(engine) as update:
            update.done(lambda number=number: {"number": number})
    assert [raw.notes.left_out for raw in training.outbox.unsent_steps()] == [expected, (0, "")]


def test_the_first_batch_of_a_training_in_evaluation_mode_is_the_step_s_too(training):
    hooks_torch.install(torch)
    loop = Loop()
    training.micro_steps.expect_forward("engine")
    loop.model.eval()
    for batch in loop.loader:
        with active.events.forward(loop.model, (), batch, "tiny", always=True):
            loss = loop.loss(batch)
        loss.backward()
        loop.update()
    steps, _ = published(training)
    assert {(step.samples, step.tokens, step.label_tokens) for step in steps} == {(2, 10, 10)}


def zeroed_before_the_update(loop, batch):
    loop.loss(batch).backward()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.optimizer.step()


def zeroed_and_gone_backward_again(loop, batch):
    loop.loss(batch).backward()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.loss(batch).backward()
    loop.update()


def zeroed_before_and_after(loop, batch):
    loop.optimizer.zero_grad(set_to_none=False)
    loop.loss(batch).backward()
    loop.update()


def without_gradients(loop, batch):
    loop.loss(batch).backward()
    loop.optimizer.zero_grad()  # that no parameter has one is another finding
    loop.optimizer.step()


@pytest.mark.parametrize(
    ("script", "how"),
    [
        (zeroed_before_the_update, "discarded"),
        (zeroed_and_gone_backward_again, ""),
        (zeroed_before_and_after, ""),
        (without_gradients, ""),
    ],
)
def test_gradients_that_are_set_to_zero_before_an_update_are_noted(script, how, monkeypatch):
    training, loop = probed(monkeypatch, coarse=False), Loop()
    for batch in loop.loader:
        script(loop, batch)
    assert [raw.notes.clipped for raw in training.outbox.unsent_steps()] == [how] * BATCHES


def test_parameters_that_no_optimizer_has_are_noted_at_the_second_update_if_a_closure_goes_backward(training):
    hooks_torch.install(torch)
    model = Two()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    training.trained.find(lambda: model)

    def closure():
        model.zero_grad()
        loss = model()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    left_out = [raw.notes.left_out for raw in training.outbox.unsent_steps()]
    assert left_out == [(0, ""), (2, "head.weight"), (0, "")]


def test_what_an_earlier_stage_has_trained_is_not_missed_in_the_next_one_s_optimizer(training):
    hooks_torch.install(torch)
    encoder, decoder, head = torch.nn.Linear(4, 3), torch.nn.Linear(3, 4), torch.nn.Linear(3, 1)
    training.trained.find(lambda: head)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        decoder(encoder(torch.ones(2, 4))).mean().backward()
        optimizer.step()
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    for _ in range(110):
        optimizer.zero_grad()
        head(encoder(torch.ones(2, 4)).detach()).mean().backward()
        optimizer.step()
    assert {raw.notes.left_out for raw in training.outbox.unsent_steps()} == {(0, "")}


def test_labels_that_the_loop_changes_are_those_of_its_loss(monkeypatch):
    training, loop = probed(monkeypatch, coarse=False), Loop()
    for batch in loop.loader:
        batch["labels"] = torch.full_like(batch["labels"], -100)
        loop.loss(batch).backward()
        loop.update()
    reader = SignReader(training.trained)
    signs = [reader.of_step(1, raw.notes)[1] for raw in training.outbox.unsent_steps()]
    assert [each.unlabelled for each in signs] == [1] * BATCHES


class Adapters(torch.nn.Module):
    """Its many small parameters get no gradient, its large head does."""

    def __init__(self):
        super().__init__()
        self.small = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(20))
        self.head = torch.nn.Linear(4, 400)

    def forward(self):
        with torch.no_grad():
            found = sum(each(torch.ones(2, 4)) for each in self.small)
        return self.head(found).mean()


def zeroed_in_each_micro_batch(loop, number, batch):
    loop.optimizer.zero_grad()
    loop.loss(batch).backward()
    if number % 2:
        loop.optimizer.step()


def zeroed_after_each_micro_batch(loop, number, batch):
    loop.loss(batch).backward()
    if number % 2:
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def zeroed_before_each_accumulation(loop, number, batch):
    if not number % 2:
        loop.optimizer.zero_grad()
    loop.loss(batch).backward()
    if number % 2:
        loop.optimizer.step()


def added_up_by_the_script(loop, number, batch, zeroed_after=False):
    """As with gradients that are clipped for each micro-batch (DP-SGD)."""
    if not zeroed_after:
        loop.optimizer.zero_grad()
    loop.loss(batch).backward()
    sums = vars(loop).setdefault("sums", [torch.zeros_like(each) for each in loop.model.parameters()])
    for each, total in zip(loop.model.parameters(), sums, strict=True):
        total += each.grad
    if zeroed_after:
        loop.optimizer.zero_grad()
    if number % 2:
        for each, total in zip(loop.model.parameters(), sums, strict=True):
            each.grad = total.clone()
            total.zero_()
        loop.update()


def added_up_and_zeroed(loop, number, batch):
    added_up_by_the_script(loop, number, batch, zeroed_after=True)


def sharpness(loop, _, batch):
    loop.loss(batch).backward()
    loss = loop.loss(batch)
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def a_batch_left_out(loop, number, batch):
    loop.optimizer.zero_grad()
    loop.loss(batch).backward()
    if not number or number % 3:
        loop.optimizer.step()


@pytest.mark.parametrize(
    ("script", "how"),
    [
        (zeroed_in_each_micro_batch, {"replaced"}), (zeroed_after_each_micro_batch, {"replaced"}),
        (zeroed_before_each_accumulation, {""}), (added_up_by_the_script, {""}), (added_up_and_zeroed, {""}),
        (sharpness, {""}), (a_batch_left_out, {""}),
    ],
)  # fmt: skip
def test_micro_batches_whose_gradients_are_set_to_zero_before_each_update_are_noted(script, how, monkeypatch):
    training, loop = probed(monkeypatch, coarse=False), Loop()
    for number, batch in enumerate(loop.loader):
        script(loop, number, batch)
    first, *others = training.outbox.unsent_steps()  # in the first the optimizer is not known before its update
    assert first.notes.clipped == ""
    assert {raw.notes.clipped for raw in others} == how


def never_zeroed(loop, _):
    loop.optimizer.step()


def zeroed_after_two(loop, number):
    loop.optimizer.step()
    if number % 2:
        loop.optimizer.zero_grad()


def zeroed_in_place(loop, _):
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def zeroed_by_hand(loop, _):
    loop.optimizer.step()
    for each in loop.model.parameters():
        each.grad.data.zero_()


def decayed_by_hand(loop, _):
    loop.optimizer.step()
    for each in loop.model.parameters():
        each.grad *= 0.9


def in_a_closure(loop, _):
    loop.optimizer.zero_grad()

    def closure():
        loop.optimizer.zero_grad(set_to_none=False)
        loss = loop.model(torch.ones(2, 5, dtype=torch.long)).mean()
        loss.backward()
        return loss

    loop.optimizer.step(closure)


def the_last_of_an_accumulation_in_a_closure(loop, _):
    def closure():
        loss = loop.model(torch.ones(2, 5, dtype=torch.long)).square().mean()
        loss.backward()
        return loss

    loop.optimizer.step(closure)
    loop.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("end", "noted"),
    [
        (the_last_of_an_accumulation_in_a_closure, [""] * 5), (never_zeroed, ["", "kept", "kept", "kept", "kept"]),
        (zeroed_after_two, ["", "kept", "", "kept", ""]), (zeroed_in_place, [""] * 5), (zeroed_by_hand, [""] * 5),
        (decayed_by_hand, [""] * 5), (in_a_closure, [""] * 5),
    ],
)  # fmt: skip
def test_gradients_that_are_not_set_to_zero_between_the_first_updates_are_noted(end, noted, monkeypatch):
    training, loop = probed(monkeypatch, coarse=False), Loop()
    for number, batch in enumerate(loop.loader):
        loop.loss(batch).backward()
        end(loop, number)
    assert clipped(training)[:5] == noted


def clipped(training):
    reader = SignReader(training.trained)
    found = [reader.of_step(1, raw.notes)[1] for raw in training.outbox.unsent_steps()]
    return [each.clipped if each else "" for each in found]


def test_gradients_of_parameters_that_no_optimizer_has_are_not_kept(monkeypatch):
    training = probed(monkeypatch, coarse=False)
    loop, other = Loop(), torch.nn.Linear(4, 4).requires_grad_(False)  # as the base of adapters made later
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    training.trained.find(lambda: loop.model)
    for batch in loop.loader:
        loop.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(clipped(training)) == {""}


def test_a_generator_s_backward_through_a_discriminator_that_is_zeroed_before_its_own_keeps_nothing(monkeypatch):
    training = probed(monkeypatch, coarse=False)
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    first, second = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(6):
        first.zero_grad()
        other(one(torch.ones(2, 4)).detach()).mean().backward()
        first.step()
        second.zero_grad()
        other(one(torch.ones(2, 4))).mean().backward()
        second.step()
    assert set(clipped(training)) == {""}


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [(None, 1.0, "late"), (None, math.inf, ""), (1.0, 1.0, ""), (1.0, None, ""), (None, None, "")],
)
def test_gradients_that_are_clipped_after_the_update_are_noted(before, after, how, monkeypatch):
    training, loop = probed(monkeypatch, coarse=False), Loop()
    for batch in loop.loader:
        loop.loss(batch).backward()
        if before is not None:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), before)
        loop.optimizer.step()
        if after is not None:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), after)
        loop.optimizer.zero_grad()
    first, *others = [raw.notes.clipped for raw in training.outbox.unsent_steps()[:5]]
    assert first == ""
    assert set(others) == {how}


def test_gradients_that_are_clipped_for_the_second_of_two_updates_are_not_late(monkeypatch):
    training = probed(monkeypatch, coarse=False)
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other))
    for _ in range(6):
        other(one(torch.ones(2, 4))).mean().backward()
        first.step()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        second.step()
        first.zero_grad()
        second.zero_grad()
    assert {raw.notes.clipped for raw in training.outbox.unsent_steps()} == {""}


class Detached(Two):
    """The head's input is detached until a forward, or the body is frozen."""

    def __init__(self, until=10**9, frozen=False):
        super().__init__()
        self.until = until
        self.body.requires_grad_(not frozen)

    def forward(self):
        self.until -= 1
        found = self.body(torch.ones(2, 4))
        return self.head(found.detach() if self.until >= 0 else found).mean()


class Rare(torch.nn.Module):
    """Each forward uses one of its experts; the first five use the first."""

    def __init__(self):
        super().__init__()
        self.experts, self.calls = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(6)), 0

    def forward(self):
        self.calls += 1
        used = 0 if self.calls < 6 or self.calls > 95 else self.calls % 6
        return self.experts[used](torch.ones(2, 4)).mean()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Detached(), (2, "body.weight")), (Detached(until=2), (0, "")), (Detached(until=50), (0, "")),
        (Detached(frozen=True), (0, "")), (Two(), (0, "")), (Adapters(), (20, "small.0.weight")), (Rare(), (0, "")),
    ],
    ids=["always", "twice", "a stage of 50 steps", "frozen on purpose", "not", "small ones", "experts now and then"],
)  # fmt: skip
def test_a_body_that_gets_no_gradient_is_noted_after_100_steps(model, expected, training):
    hooks_torch.install(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training.trained.find(lambda: model)
    for _ in range(110):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    found = [raw.notes.detached for raw in training.outbox.unsent_steps()]
    assert [each for each in found if each[0]] == [expected] * bool(expected[0])


@pytest.mark.parametrize(
    ("of_critic", "passed", "expected"),
    [(True, torch.Tensor.clone, [(2, 0)]), (False, torch.Tensor.detach, [(0, 2)]), (False, torch.Tensor.clone, [])],
    ids=["of the other model", "of a detached loss", "as it should be"],
)
def test_parameters_of_a_second_optimizer_that_trains_another_model_are_noted(of_critic, passed, expected, training):
    hooks_torch.install(torch)
    generator, critic = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    training.trained.find(lambda: critic)
    models = (critic, critic if of_critic else generator)
    first, other = (torch.optim.Adam(each.parameters(), lr=0.01) for each in models)
    for _ in range(110):
        first.zero_grad()
        critic(generator(torch.ones(2, 3)).detach()).mean().backward()
        first.step()
        other.zero_grad()
        critic(passed(generator(torch.ones(2, 3)))).mean().backward()
        other.step()
    found = [(raw.notes.left_out, raw.notes.detached) for raw in training.outbox.unsent_steps()]
    assert {(left_out[0], detached[0]) for left_out, detached in found} == {(0, 0), *expected}
    assert all(name.startswith("a parameter [4") for notes in found for count, name in notes if count)


@pytest.mark.parametrize(
    ("unsynced", "elements", "apart"),
    [
        ((True, True), 1, True),
        ((True, False), 1, False),
        ((True, True), 70, False),
        ((None, None), 1, True),
        ((None, None), 70, False),
    ],
    ids=["never", "the last one is", "by the script", "without a wrapper", "without one by the script"],
)
def test_a_step_whose_gradients_are_never_reduced_is_noted(unsynced, elements, apart, monkeypatch):
    training = probed(monkeypatch, coarse=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    loop, counts = Loop(), training.tracker.counts
    for batch in loop.loader:
        for is_unsynced in unsynced:
            around = nullcontext()  # a forward that no wrapper makes is not seen
            if is_unsynced is not None:
                loop.model.require_backward_grad_sync = not is_unsynced
                around = active.events.forward(loop.model, (), batch, "ddp", always=True)
            with around:
                loss = loop.loss(batch)
            loss.backward()
        counts.entered += 2
        counts.recent.extend([("world", 1, "all_reduce", elements), ("world", 2, "all_reduce", 1)])
        loop.update()
    raws = training.outbox.unsent_steps()
    assert sum(each.numel() for each in loop.model.parameters()) == 81
    assert [raw.notes.never_reduced for raw in raws] == [apart] * BATCHES


def test_what_may_reduce_gradients_is_known_by_its_classes_and_parameters():
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    parameters = list(plain.parameters())
    assert not updates._may_reduce(plain, parameters)
    sharded = type("ColumnParallelLinear", (torch.nn.Linear,), {})(2, 2)
    assert updates._may_reduce(sharded, list(sharded.parameters()))
    assert updates._may_reduce(plain, [torch.zeros(2)])
    assert updates._may_reduce(None, parameters)
    parameters[0].ds_id = 3
    assert updates._may_reduce(plain, parameters)


def test_batches_left_out_in_a_row_are_counted_until_a_backward(monkeypatch):
    training = probed(monkeypatch)
    loop, counted = Loop(), []
    for number, batch in enumerate(chain(loop.loader, loop.loader)):
        if number < 2 or 9 < number < 13 or number == BATCHES + 5:
            counted.append(training.loading.left_out)
            continue
        loop.loss(batch).backward()
        loop.update()
        assert training.loading.left_out in (0, 1)
    assert counted == [0, 0, 0, 2, 3, 0], "of a followed step once another event comes"
