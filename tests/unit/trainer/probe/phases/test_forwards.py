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


@pytest.mark.parametrize(
    ("moves", "phases"),
    [
        ("fetch reference policy :forward", STEP),
        ("fetch policy reference :forward", STEP),
        ("eval inner-train fetch policy", STEP),  # not the wrapper's own flag
        ("fetch no-grad :forward eval no-grad train policy", STEP),  # adapters off, old log-probabilities
        (f"eval {'held reference no-grad :eval ' * 3} asked train fetch policy", ["eval", *STEP]),
        (f"{'held no-grad ' * 3} asked fetch policy", ["eval", *STEP]),
    ],
    ids=[
        *("a reference before the policy", "or after it", "the wrapped module's flag decides"),
        *("a policy that is its own reference", "an evaluation with its reference", "an evaluation in training mode"),
    ],
)
def test_forwards_are_of_the_step_or_of_an_evaluation(loop, moves, phases):
    held_out, reached = Loader(), ""
    do = {
        "fetch": loop.fetch,
        "held": lambda: loop.fetch(held_out),
        "asked": lambda: loop.loading.fetching(held_out),
        "policy": loop.forward,
        "no-grad": lambda: loop.forward(grad=False),
        "reference": lambda: loop.forward(loop.reference, grad=False),
        "eval": loop.policy.eval,
        "train": loop.policy.train,
        "inner-train": loop.policy.module.train,
    }
    for move in moves.split():
        if move.startswith(":"):
            assert reached == move[1:]
        else:
            reached = do[move]()
    loop.backward()
    assert loop.update() == phases


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
