"""What is counted of a step's operations."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from ftmon.protocol.analysis.allocator.model import CachingAllocator, DeviceOutOfMemory
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.protocol.analysis.estimates.time import Work
from ftmon.trainer.predict.fake import hidden
from ftmon.trainer.predict.record import (
    ALLOCATE,
    FREE,
    MISSING,
    Counting,
    ResultCache,
    Trace,
    failing_phase,
    least_that_fits,
    limits,
    peaks,
)
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Operation = Callable[[Any], Any]
foreach_add: Any = vars(torch)["_foreach_add"]


class Cached(TorchDispatchMode):
    """Takes results from a cache, and counts those that it had to ask fake tensors for."""

    def __init__(self, cache: ResultCache) -> None:
        super().__init__()
        self.cache = cache
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = self.cache.key(func, args, kwargs)
        found = MISSING if key is None else self.cache.kept(key, args, kwargs)
        if found is MISSING:
            self.asked.append(str(func))
            found = func(*args, **kwargs)
            if key is not None:
                self.cache.keep(key, func, args, kwargs, found)
        return found


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    mode = FakeTensorMode()
    with mode:
        yield mode


OPERATIONS: dict[str, Operation] = {
    "product": lambda x: x @ x.t(),
    "slice and add": lambda x: x[2:6, 1:3] + 1,
    "stepped slice": lambda x: x[1:7:3, -2:],
    "joined into another": lambda x: torch.cat((x[:4], x[4:]), out=torch.empty(8, 8)),
    "transposed copy": lambda x: x.transpose(0, 1).contiguous(),
    "other type": lambda x: x.to(torch.bfloat16),
    "bytes": lambda x: x.view(torch.uint8),
    "in place": lambda x: x.mul_(2),
    "strided at a place": lambda x: x.as_strided((2, 2), (2, 1), 3),
    "two results": lambda x: x.max(dim=0).values,
    "several": lambda x: torch.cat(x.split(4)),
    "foreach": lambda x: foreach_add([x, x[1:]], 1.0)[1],
    "copied into": lambda x: x[:4].copy_(x[4:]),
    "norm": lambda x: torch.linalg.vector_norm(x.float()),
    "reshaped": lambda x: x.reshape(-1)[4:].unsqueeze(0).expand(3, -1),
}


def facts(tensor: Any) -> tuple[Any, ...]:
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kept_result_is_what_fake_tensors_compute_at_another_place_of_the_buffer(fake, name):
    operation = OPERATIONS[name]
    buffer = torch.empty(4096, device="cpu")
    cached = Cached(ResultCache(fake))
    for offset in (0, 64, 1024, 640):
        layer = buffer[offset : offset + 64].view(8, 8)
        expected = operation(layer)
        with cached:
            found = operation(layer)
        assert facts(found) == facts(expected)
        shares = expected.untyped_storage()._cdata == buffer.untyped_storage()._cdata
        assert (found.untyped_storage()._cdata == buffer.untyped_storage()._cdata) == shares


def test_parameters_and_equal_slices_at_different_places_of_one_buffer_are_computed_once(fake):
    buffer, x = torch.empty(4096), torch.empty(3, 8)
    cached = Cached(ResultCache(fake))
    asked: list[int] = []
    for layer in range(4):
        weight = buffer[layer * 64 : layer * 64 + 64].view(8, 8)
        with cached:
            torch.nn.functional.linear(x, weight).relu_()
        asked.append(sum(name.startswith("aten.") for name in cached.asked))
    assert asked[0] == asked[-1] > 0, cached.asked
    buffer = torch.empty(4096, dtype=torch.bfloat16)
    cached = Cached(ResultCache(fake))
    with cached:
        for start in (0, 64, 1024, -64):
            part = buffer[start : start + 64 or None]
            assert (part.shape, part.view(torch.uint8).storage_offset()) == ((64,), 2 * (start % 4096))
    assert (cached.asked.count("aten.slice.Tensor"), cached.asked.count("aten.view.dtype")) == (1, 1)


MIB = 1 << 20


@pytest.fixture
def trace() -> Trace:
    return Trace(Settings())


def test_a_phases_peak_holds_memory_that_is_freed_before_its_end(trace):
    kept = trace.allocate(100 * MIB, "cuda")
    trace.begin("forward")
    trace.moment(40 * MIB, 30 * MIB)
    assert trace.peaks().allocated_bytes == 170 * MIB
    trace.begin("backward")
    assert trace.peaks().allocated_bytes == 100 * MIB
    trace.free(kept)
    assert trace.current["cuda"] == 0


def test_host_memory_is_no_memory_of_the_gpu(trace):
    trace.begin("init")
    states = trace.allocate(64 * MIB, "cpu")
    trace.move(states, "pinned")
    assert (trace.peaks().allocated_bytes, trace.current) == (0, {"cpu": 0, "pinned": 64 * MIB})
    trace.free(states)
    assert trace.host_peak == 64 * MIB


def test_the_phase_that_does_not_fit_is_named(trace):
    trace.begin("init")
    trace.allocate(100 * MIB, "cuda")
    trace.begin("forward")
    trace.moment(50 * MIB)
    trace.begin("backward")
    trace.moment(200 * MIB)
    for capacity, phase in ((400, ""), (250, "backward"), (120, "forward"), (50, "init")):
        assert failing_phase(trace.events, Settings(), limits(trace.events, Settings()), capacity * MIB) == phase


def test_a_cache_that_is_emptied_makes_room(trace):
    trace.begin("forward")
    trace.moment(100 * MIB)
    trace.empty_cache()
    trace.begin("backward")
    trace.moment(120 * MIB)
    assert trace.peaks().reserved_bytes == 120 * MIB


def test_memory_used_on_another_stream_is_free_once_that_stream_is_done(trace):
    trace.begin("forward")
    gathered = trace.allocate(64 * MIB, "cuda", stream=1)
    trace.use(gathered, 0)
    trace.free(gathered)
    assert trace.current["cuda"] == 0
    trace.moment(64 * MIB, stream=1)
    assert trace.peaks().reserved_bytes == 64 * MIB


def _step(trace: Trace, gradient: int, size: int) -> int:
    """Take a step that replaces a gradient that is kept; return the new one's handle."""
    trace.begin("forward")
    activation = trace.allocate(3 * size, "cuda")
    trace.end("forward")
    trace.begin("backward")
    trace.free(gradient)
    new = trace.allocate(30 * MIB, "cuda")
    trace.moment(size)
    trace.free(activation)
    trace.end("backward")
    return new


def test_a_repeated_step_has_the_peaks_of_one_that_is_taken():
    taken, repeated = Trace(Settings()), Trace(Settings())
    gradients = [trace.allocate(30 * MIB, "cuda") for trace in (taken, repeated)]
    for size in (50 * MIB, 90 * MIB, 20 * MIB):
        for _ in range(2):
            start = len(repeated.events)
            gradients = [_step(trace, one, size) for trace, one in zip((taken, repeated), gradients, strict=True)]
        first = taken.peaks()
        again = repeated.repeat(start)
        gradients[0] = _step(taken, gradients[0], size)
        assert [name for name, _ in again] == ["forward", "backward"]
        assert again[-1][1] == taken.peaks()
        assert first.allocated_bytes == taken.peaks().allocated_bytes
        assert len(repeated.events) == len(taken.events)
    # What the repeated steps replaced can still be freed, in the trace and in its replay.
    repeated.free(gradients[1])
    repeated.begin("after")
    assert repeated.peaks().allocated_bytes == 0
    assert limits(repeated.events, Settings()).needed_bytes < 1000 * MIB


def test_garbage_that_a_step_frees_is_not_freed_again_by_its_repetition():
    taken, repeated = Trace(Settings()), Trace(Settings())
    for trace in (taken, repeated):
        gradient, garbage = trace.allocate(30 * MIB, "cuda"), trace.allocate(4 * MIB, "cuda")
        start = len(trace.events)
        trace.begin("forward")
        trace.free(garbage)
        trace.end("forward")
        gradient = _step(trace, gradient, 50 * MIB)
        if trace is taken:
            trace.begin("forward")
            trace.end("forward")
            _step(trace, gradient, 50 * MIB)
    again = repeated.repeat(start)
    assert again is not None
    assert len(repeated.events) == len(taken.events)
    assert again[-1][1] == taken.peaks()


def test_a_step_that_leaves_more_behind_is_not_repeated(trace):
    trace.begin("forward")
    trace.allocate(10 * MIB, "cuda")
    trace.end("forward")
    events = list(trace.events)
    assert trace.repeat(0) is None
    assert trace.events == events


def _passes(trace: Trace, workspace: bool) -> int:
    """Run the passes of a step; return the allocation that it holds until its end."""
    trace.begin("forward")
    held = trace.allocate(50 * MIB, "cuda")
    if workspace:
        trace.allocate(32 * MIB, "cuda")
    trace.moment(70 * MIB)
    trace.end("forward")
    return held


def _update(trace: Trace, states: bool) -> None:
    trace.begin("optimizer")
    trace.moment(20 * MIB)
    if states:
        trace.allocate(60 * MIB, "cuda")
    trace.end("optimizer")


def test_a_step_is_repeated_around_another_update():
    taken, repeated = Trace(Settings()), Trace(Settings())
    for trace in (taken, repeated):
        held, begin = _passes(trace, workspace=True), len(trace.events)
        trace.see(held, "activations")
        _update(trace, states=True)
        own, states = range(begin, len(trace.events)), len(trace.block_bytes) - 1
        trace.free(held)
    assert repeated.repeat_around(0, own, lambda: _update(repeated, states=False), {states})
    held = _passes(taken, workspace=False)
    _update(taken, states=False)
    taken.free(held)
    assert [event[2:] for event in repeated.events] == [event[2:] for event in taken.events]
    assert (repeated.peaks(), list(repeated.parts.values())) == (taken.peaks(), ["activations"] * 2)


@pytest.mark.parametrize("freed_in_update", [True, False])
def test_passes_that_leave_a_tensor_are_not_repeated(trace, freed_in_update):
    held, begin = _passes(trace, workspace=False), len(trace.events)
    if freed_in_update:
        trace.free(held)
    own = range(begin, len(trace.events))
    events = list(trace.events)
    assert not trace.repeat_around(0, own, trace.empty_cache, set() if freed_in_update else {held})
    assert trace.events == events


def test_less_than_was_reserved_suffices_where_the_cache_can_be_given_back(trace):
    trace.begin("forward")
    trace.allocate(100 * MIB, "cuda")
    # The second does not fit into what the first left, so both are reserved; neither is needed beside the other.
    trace.moment(300 * MIB)
    trace.moment(400 * MIB)
    peaks = trace.peaks()
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (500 * MIB, 800 * MIB)
    assert limits(trace.events, Settings()) == (500 * MIB, "forward")


def test_the_same_step_is_replayed_with_other_settings_of_the_allocator():
    expandable = Settings(expandable_segments=True)
    plain, other = Trace(Settings()), Trace(expandable)
    for trace in (plain, other):
        trace.begin("init")
        gradient = trace.allocate(30 * MIB, "cuda")
        trace.end("init")
        gradient = _step(trace, gradient, 90 * MIB)
    start = len(plain.events)
    for trace in (plain, other):
        trace.begin("forward")
        trace.moment(300 * MIB)
        trace.moment(400 * MIB)
    expected = other.end("forward")
    reserved = plain.end("forward").reserved_bytes
    found = peaks(plain.events, start, expandable)
    assert found["forward"] == (expected.allocated_bytes, expected.reserved_bytes)
    assert expected.reserved_bytes < reserved
    assert set(found) == {"init", "forward"}, "of the step before, nothing counts"


SIZES = st.sampled_from([1, 3, 7, 12, 25, 41, 60, 90, 130])
STEPS = st.lists(st.tuples(SIZES, st.integers(0, 2), st.integers(0, 30)), min_size=20, max_size=40)


@given(STEPS, st.booleans(), st.lists(st.integers(0, 1 << 31), min_size=4, max_size=4))
@example([(60, 2, 0), (90, 2, 0), (41, 0, 0), (130, 2, 0)] * 5, False, [0, 1, 2, 3])
@settings(max_examples=80, deadline=None)
def test_a_verdict_is_never_worse_with_more_memory_and_no_allocation_fails_where_it_says_fits(steps, expandable, sizes):
    own = Settings(expandable_segments=expandable)
    trace, held = Trace(own), []
    trace.begin("forward")
    for size, kind, which in steps:
        if kind == 0 and held:
            trace.free(held.pop(which % len(held)))
        else:
            held.append(trace.allocate(size * MIB, "cuda"))
    reserved, every = trace.peaks().reserved_bytes, 1000
    found = limits(trace.events, own, every)
    event(f"some less fits: {found.needed_bytes < reserved}")
    around = [found.needed_bytes - 1, found.needed_bytes, reserved, *(one % (2 * reserved) for one in sizes)]
    fits = [not failing_phase(trace.events, own, found, size) for size in sorted(around)]
    assert (fits, fits[0], fits[-1]) == (sorted(fits), False, True)
    succeed = [size for size in around if _succeeds(trace, CachingAllocator(own, size, 1 << 42))]
    assert {size for size in around if size >= found.needed_bytes} <= set(succeed)
    least = least_that_fits(trace.events, own, found, trace.peaks().allocated_bytes, every)
    assert least <= min(succeed)
    fewer = limits(trace.events, own, 2).needed_bytes
    assert all(_succeeds(trace, CachingAllocator(own, size, 1 << 42)) for size in (least, fewer))


def _succeeds(trace: Trace, allocator: CachingAllocator) -> bool:
    handles: dict[int, int] = {}
    try:
        for kind, handle, size, _, _ in trace.events:
            if kind == ALLOCATE:
                handles[handle] = allocator.allocate(size)
            elif kind == FREE:
                allocator.free(handles[handle])
    except DeviceOutOfMemory:
        return False
    return True


def test_what_an_allocation_holds_goes_with_it_into_the_repeated_step(trace):
    gradient = trace.allocate(30 * MIB, "cuda")
    start = len(trace.events)
    gradient = _step(trace, gradient, 50 * MIB)
    trace.see(gradient, "gradients")
    trace.see(gradient, "activations")  # the first to say what it is counts,
    trace.see(gradient, "buckets")  # but for the bucket that it lies in
    assert trace.repeat(start) is not None
    assert sorted(trace.parts.values()) == ["buckets", "buckets"]
    assert sum(trace.block_bytes[handle] for handle in trace.parts) == 60 * MIB


pytest.importorskip("torch.nn.attention.varlen")  # registers the operation
pytest.importorskip("ftmon.trainer.recipe.model.attention")  # registers ftmon's

HEADS, WIDTH = 4, 32


def attention_flops(tokens: int, documents: int, pairs_a_token: float | None = None, cudnn: bool = False) -> float:
    """Return the FLOPs that are counted of causal attention over packed documents, of the same length if not said."""
    with FakeTensorMode() as mode:

        def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
            return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda"))

        query, key, value, out = (on_gpu(tokens, HEADS, WIDTH) for _ in range(4))
        borders = on_gpu(documents + 1, dtype=torch.int32)
    counting = Counting(1)
    counting.pairs_a_token = pairs_a_token
    longest = tokens // documents
    if cudnn:
        counting.count(torch.ops.ftmon.attend.default, (query, key, value, borders, longest, 1.0, 0), {}, out, 0)
    else:
        call: Any = torch.ops.torch_attn._varlen_attn.default
        counting.count(call, (query, key, value, borders, borders, longest, longest, True), {}, out, 0)
    (operation,) = counting.work().operations
    assert operation.attention
    return operation.flops


def test_packed_documents_do_not_see_each_other_and_those_of_a_data_set_take_their_own_pairs():
    one = attention_flops(4096, 1)
    # Two products of 2 FLOPs for each pair, half of the pairs, and the keys that the kernel computes in vain.
    assert one == 2 * 2 * HEADS * WIDTH * 4096 * (4096 / 2 + 1100)
    assert attention_flops(8 * 4096, 8) == 8 * one
    assert attention_flops(4096, 3, pairs_a_token=100.5) == 2 * 2 * HEADS * WIDTH * 4096 * (100.5 + 1100)
    by_cudnn = 0.84 * 2 * 2 * HEADS * WIDTH * 4096 * (4096 / 2 + 500)
    assert attention_flops(4096, 1, cudnn=True) == pytest.approx(by_cudnn)


def test_the_loss_is_counted_for_the_share_of_the_tokens_that_carry_it():
    tokens, vocabulary = 64, 1000
    counting = Counting(1)
    counting.label_share = 0.75
    with FakeTensorMode() as mode:

        def on_gpu(*shape: int) -> Any:
            meta = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            return FakeTensor(mode, meta, torch.device("cuda"))

        given = (on_gpu(tokens, WIDTH), on_gpu(WIDTH, vocabulary)), {}, on_gpu(tokens, vocabulary), 0
        for of_loss in (False, True):
            with counting.over_labels() if of_loss else nullcontext():
                counting.count(torch.ops.aten.mm.default, *given)
    whole, loss = counting.work().operations
    flops, moved = 2 * tokens * WIDTH * vocabulary, 2 * (tokens * WIDTH + WIDTH * vocabulary + tokens * vocabulary)
    assert (whole.flops, whole.bytes_moved) == (flops, moved)
    assert (loss.flops, loss.bytes_moved) == (0.75 * flops, 0.75 * moved)


def test_the_work_of_a_micro_step_passes_a_pipe_however_its_fetches_divide():
    counting = Counting(2)
    for times in (1, 6, 1):
        counting.begin_micro_step(times)
        for _ in range(7):
            counting.fetches += (1 + 3 / 5) * times
    received = msgspec.json.decode(msgspec.json.encode(counting.micro_step()), type=Work)
    assert received.fetches == pytest.approx(7 * 1.6)


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "width", "documents", "asked"),
    [
        (16384, 32, 8, 64, 48, 404_772_992), (16384, 32, 32, 64, 48, 136_337_536),
        (8192, 16, 16, 128, 16, 67_641_472), (16384, 32, 8, 128, 448, 807_605_376),
        (16384, 8, 4, 80, 64, 126_383_232), (5000, 8, 8, 64, 16, 10_408_320),
    ],
)  # fmt: skip
def test_the_workspace_of_cudnns_gradients_is_that_asked_for_on_an_h200(tokens, heads, groups, width, documents, asked):
    found: list[int] = []
    recorder = SimpleNamespace(trace=SimpleNamespace(moment=lambda size, stream: found.append(size)), stream=0)
    with FakeTensorMode() as mode:
        query, key = (
            FakeTensor(mode, torch.empty(tokens, count, width, device="meta"), torch.device("cuda"))
            for count in (heads, groups)
        )
    call: Any = torch.ops.ftmon.attend_backward.default
    hidden((9, 0))[call](cast(Any, recorder), call, (query, query, key), {}, query)
    assert abs(found[0] - asked) <= 600 * documents
