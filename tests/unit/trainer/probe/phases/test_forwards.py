"""Which phase a forward is: real modules and a real tracker, the loops spelled out as their hooks see them."""

import copy

import pytest
import torch
from ftmon.trainer.probe.phases import tracker


class Wrapper(torch.nn.Module):
    """As DDP does, it has a ``training`` flag of its own."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, rows):
        return self.module(rows)


Wrapper.__name__ = "DistributedDataParallel"


@pytest.fixture
def loop(training):
    class Loop:
        loading, steps, updates = training.loading, training.micro_steps, training.updates
        policy = Wrapper(torch.nn.Linear(2, 2))
        reference = Wrapper(copy.deepcopy(policy.module)).eval()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

        def fetch(self, loader=None):
            self.loading.fetching(loader or Loader())
            self.loading.fetched(None)

        def forward(self, module=policy, grad=True):
            with torch.set_grad_enabled(grad):
                self.steps.forwarding(module, (), {})
            return training.tracker.phase

        def backward(self):
            self.steps.going_backward(())
            self.steps.went_backward()

        def train(self):
            """Finish a step whose batch was fetched; return its phases."""
            self.forward()
            self.backward()
            return self.update()

        def update(self):
            marks = training.tracker.marks
            self.updates.updating(None, self.optimizer)
            self.updates.updated()
            names = [mark.phase for mark in marks[:-1]]
            return [name for at, name in enumerate(names) if name != "init" and (not at or names[at - 1] != name)]

    loop = Loop()
    loop.training = training
    training.state.forward_by = "parallel"
    loop.updates.found_optimizer(loop.optimizer)
    return loop


class Loader:
    """A dataloader's iterator, weakly referable."""


STEP = ["data", "forward", "backward", "idle", "optimizer"]


@pytest.mark.parametrize("watched", [False, True])
def test_an_update_right_after_its_backward_has_no_idle_before_it_unless_phases_are_watched(loop, monkeypatch, watched):
    monkeypatch.setattr(tracker, "SLIVER_NS", 10**12)
    seen = []
    if watched:
        loop.training.tracker.watchers = (lambda ended, begun: seen.append((ended, begun)),)
    loop.fetch()
    assert loop.train() == (STEP if watched else ["data", "forward", "backward", "optimizer"])
    assert not watched or ("idle", "optimizer") in seen


def test_a_reference_before_or_after_the_policy_is_part_of_the_forward(loop):
    train = Loader()
    for order in ((loop.reference, loop.policy), (loop.policy, loop.reference)):
        loop.fetch(train)
        assert [loop.forward(module, grad=module is loop.policy) for module in order][-1] == "forward"
        loop.backward()
        assert loop.update() == STEP if order[0] is loop.reference else ["idle", *STEP]
        loop.training.tracker.marks[0] = loop.training.tracker.marks[0]._replace(phase="init")


def test_the_wrapped_module_s_flag_decides_not_the_wrapper_s(loop):
    loop.policy.eval()
    loop.policy.module.train()
    loop.fetch()
    assert loop.train() == STEP


def test_an_evaluation_with_its_reference_is_an_evaluation(loop):
    held_out = Loader()
    loop.policy.eval()
    for _ in range(3):
        loop.fetch(held_out)
        loop.forward(loop.reference, grad=False)
        assert loop.forward(grad=False) == "eval"
    loop.loading.fetching(held_out)
    loop.policy.train()
    loop.fetch()
    assert loop.train() == ["eval", *STEP]


def test_a_policy_that_is_its_own_reference_trains(loop):
    loop.fetch()
    assert loop.forward(grad=False) == "forward"  # in training mode: adapters off
    loop.policy.eval()
    loop.forward(grad=False)  # old log-probabilities without dropout
    loop.policy.train()
    assert loop.train() == STEP


def test_an_evaluation_that_leaves_the_model_in_training_mode_is_found_out_with_its_second_batch(loop):
    held_out = Loader()
    for _ in range(3):
        loop.fetch(held_out)
        loop.forward(grad=False)
    loop.loading.fetching(held_out)
    loop.fetch()
    assert loop.train() == ["eval", *STEP]


def test_training_in_evaluation_mode_is_training_once_a_backward_came(loop):
    train = Loader()
    loop.policy.eval()  # frozen batch norms
    for _ in range(2):
        loop.fetch(train)
        names = loop.train()
        assert names[-5:] == STEP
        assert "eval" not in names


def test_a_failed_closure_leaves_no_update_open(loop):
    loop.updates.begin_update(loop.optimizer)
    loop.updates.open_closure()
    loop.steps.going_backward(())
    loop.updates.close_closure(failed=True)
    assert loop.training.tracker.phase == "backward", "what the report of the failure names"
    assert not loop.training.state.in_update
    assert loop.updates.begin_update(loop.optimizer)


def test_torch_compile_does_not_trace_the_hooks(compiling):
    from ftmon.trainer.probe.phases import forwards
    from ftmon.trainer.probe.start import activate
    from torch._dynamo import trace_rules

    activate._on_dynamo(trace_rules)
    assert trace_rules.check_file(forwards.__file__).skipped


def test_a_fetch_inside_a_data_phase_of_the_script_s_own_takes_no_longer_than_its_step(loop):
    before = loop.training.phases.open("data")
    loop.fetch()
    loop.training.phases.close(before)
    notes, marks = loop.training.tracker.notes, loop.training.tracker.marks
    loop.update()
    assert sum(notes.fetches.values()) == 1
    assert 0 < notes.fetch_ns < marks[-1].ns - marks[0].ns
