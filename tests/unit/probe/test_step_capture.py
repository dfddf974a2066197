"""A close look at one step: what it finds, and that nothing of it stays."""

import gc
import weakref

import pytest
import torch
from ftmon.trainer.probe.memory import composition
from ftmon.trainer.probe.memory.composition import Held, Roots, StepCapture, Storages, resident_bytes, tensors, walk
from ftmon.trainer.probe.phases.tracker import Counts, Tracker
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint


class Memory:
    def __init__(self, measure):
        self.measure, self.device_index = measure, 0

    def sample(self):
        return None


class Bucket:
    def __init__(self, buffer):
        self.buffer = buffer


class Zero:
    """Stands for DeepSpeed's optimizer: the attributes by which it is known."""

    def __init__(self, model, inner):
        self.optimizer = inner
        self.bit16_groups_flat = [parameter.data for parameter in model.parameters()]
        self.single_partition_of_fp32_groups = inner.param_groups[0]["params"]
        self.ipg_buckets = {torch.float32: Bucket([torch.zeros(1000)])}
        self.reduced = []

    def reduce_ready_partitions_and_remove_grads(self, parameter, group):
        self.reduced.append((parameter, group))


class Engine:
    def __init__(self, model):
        masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        self.module, self.optimizer = model, Zero(model, torch.optim.Adam(masters))


def tracker_of(measure):
    return Tracker(Memory(measure), lambda: None, Counts(), lambda _: None)


def looking(measure, roots, index=None):
    tracker = tracker_of(measure)
    capture = StepCapture(tracker, lambda: roots, index, "first")
    tracker.watchers = (capture,)
    return tracker, capture


def sizes(capture, place=-1):
    sums = {}
    for size, part in capture.walks[place].held.values():
        sums[part] = sums.get(part, 0) + size
    return sums


def test_a_plain_optimizer_s_storages_are_found_each_once():
    model = torch.nn.Linear(100, 50)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(3, 100)).sum().backward()
    optimizer.step()
    found = Storages(None)
    walk(Roots(None, model, optimizer), found)
    walk(Roots(None, None, optimizer), found)
    assert found.by_part() == {
        "parameters": 4 * 5050,
        "gradients": 4 * 5050,
        "optimizer_states": 2 * 4 * 5050 + 2 * 4,  # and a step counter each
    }


def test_a_zero_optimizer_s_parts_are_told_apart_and_a_gradient_in_a_bucket_is_bucket():
    engine = Engine(torch.nn.Linear(100, 50, bias=False))
    bucket = engine.optimizer.ipg_buckets[torch.float32].buffer[0]
    engine.module.weight.grad = torch.zeros(50, 100)
    engine.optimizer.averaged_gradients = {0: [bucket.narrow(0, 0, 10)], 1: None}
    found = Storages(None)
    walk(Roots(engine, None, None), found)
    assert found.by_part() == {"parameters": 20_000, "buckets": 4000, "gradients": 20_000, "master_copies": 20_000}


def test_a_tensor_that_is_none_or_nested_or_on_another_device_does_no_harm():
    assert list(tensors({"a": [None, (torch.zeros(1),)], "b": 3, "c": object()})) == [torch.zeros(1)]
    found = Storages(None)
    found.add("parameters", [torch.zeros(4, device="meta"), torch.zeros(0), None])
    assert found.held == {}


def test_memory_that_nobody_wrote_is_not_resident():
    written, empty = torch.ones(2**22), torch.empty(2**25)
    held = {
        tensor.untyped_storage().data_ptr(): Held(tensor.untyped_storage().nbytes(), part)
        for tensor, part in ((written, "parameters"), (empty, "buckets"))
    }
    found = resident_bytes(held)
    assert found["parameters"] == 2**24
    assert found["buckets"] < 2**20


def test_a_look_begins_with_a_step_walks_at_every_boundary_and_leaves():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters())
    tracker, capture = looking("glibc", Roots(None, model, optimizer))
    tracker.end_step()
    tracker.enter("forward")
    loss = model(torch.zeros(3, 10)).sum()
    tracker.enter("backward")
    loss.backward()
    tracker.enter("optimizer")
    tracker.end_step()
    assert capture.done
    assert tracker.watchers == ()
    assert (capture.step, capture.failed) == (2, "")
    assert [walked.mark for walked in capture.walks] == [0, 1, 2, 3, 4]
    assert len(capture.marks) == 5
    assert "gradients" not in sizes(capture, 2)
    assert sizes(capture)["gradients"] == sizes(capture)["parameters"] == 440
    assert capture.walk_ns > 0


def test_the_first_step_is_joined_where_its_first_phase_begins():
    tracker, capture = looking("glibc", Roots(None, torch.nn.Linear(2, 2), None))
    tracker.enter("optimizer")  # DeepSpeed's own, as it makes an engine
    assert capture.walks == []
    tracker.enter("forward")
    tracker.end_step()
    assert (capture.done, capture.step) == (True, 1)
    assert [mark.phase for mark in capture.marks] == ["init", "optimizer", "forward", "idle"]


def test_a_look_made_before_cuda_was_there_does_not_begin():
    tracker, capture = looking("glibc", Roots(None, None, None))
    tracker.memory = Memory("cuda")
    tracker.end_step()
    assert capture.walks == []


def test_what_is_laid_over_deepspeed_s_calls_is_gone_after_the_step():
    engine = Engine(torch.nn.Linear(10, 10))
    zero = engine.optimizer
    tracker, capture = looking("cuda", Roots(engine, None, None), 0)
    hooks = (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks))
    before = len(optimizers._global_optimizer_pre_hooks)
    tracker.end_step()
    assert "reduce_ready_partitions_and_remove_grads" in vars(zero)
    tracker.enter("backward")
    assert len(modules._global_forward_hooks) == hooks[0] + 1
    zero.reduce_ready_partitions_and_remove_grads(engine.module.weight, 4)
    tracker.enter("optimizer")
    assert (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)) == hooks
    assert len(optimizers._global_optimizer_pre_hooks) == before + 1
    zero.optimizer.step()
    tracker.end_step()
    assert capture.done
    assert capture.failed == ""
    assert zero.reduced[0][1] == 4
    assert "reduce_ready_partitions_and_remove_grads" not in vars(zero)
    assert len(optimizers._global_optimizer_pre_hooks) == before


def test_a_look_that_is_given_up_takes_itself_out_at_the_next_boundary():
    engine = Engine(torch.nn.Linear(10, 10))
    tracker, capture = looking("cuda", Roots(engine, None, None), 0)
    tracker.end_step()
    capture.withdraw()
    tracker.enter("forward")
    assert tracker.watchers == ()
    assert "reduce_ready_partitions_and_remove_grads" not in vars(engine.optimizer)


def test_an_optimizer_that_the_script_drops_in_the_step_is_freed():
    roots = [Roots(Engine(torch.nn.Linear(10, 10)), None, None)]
    tracker = tracker_of("cuda")
    capture = StepCapture(tracker, lambda: roots[0], 0, "first")
    tracker.watchers = (capture,)
    tracker.end_step()
    zero = weakref.ref(roots[0].wrapper)
    roots[0] = Roots(None, None, None)
    gc.collect()
    assert zero() is None
    tracker.end_step()
    assert (capture.done, capture.failed) == (True, "")


def test_a_look_at_a_step_with_too_many_storages_fails_and_keeps_no_more_of_them(monkeypatch):
    monkeypatch.setattr(composition, "MOST_SIGHTINGS", 5)
    tracker, capture = looking("glibc", Roots(None, None, None))
    tracker.end_step()
    kept = [torch.zeros(1) for _ in range(10)]
    for tensor in kept:
        capture._record_sighting("parameters", tensor)
    assert len(capture.sightings) == 5
    tracker.enter("forward")
    assert capture.done
    assert capture.failed
    assert tracker.watchers == ()


def test_an_error_in_a_look_stays_in_it():
    tracker, capture = looking("glibc", None)
    tracker.end_step()
    assert capture.done
    assert "NoneType" in capture.failed
    assert tracker.watchers == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_go_forward_again_in_the_backward_are_noted(reentrant):
    layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    tracker, capture = looking("cuda", Roots(None, layers, None), 0)
    tracker.end_step()
    tracker.enter("forward")
    hidden = torch.ones(2, 8, requires_grad=True)
    for layer in layers:
        hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
    tracker.enter("backward")
    hidden.sum().backward()
    tracker.enter("idle")
    assert len(capture.recomputed) == 3
    assert all(begin < end for begin, end in capture.recomputed)
    assert capture.recomputed == sorted(capture.recomputed)
