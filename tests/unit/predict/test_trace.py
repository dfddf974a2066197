"""The trace of a dry run, and what a capacity does to it."""

from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.trainer.predict.record import Trace, failing_phase, needed_bytes

MIB = 1 << 20


def test_a_phases_peak_holds_memory_that_is_freed_before_its_end() -> None:
    trace = Trace(Settings())
    kept = trace.allocate(100 * MIB, "cuda")
    trace.begin("forward")
    trace.moment(40 * MIB, 30 * MIB)
    assert trace.peaks().allocated_bytes == 170 * MIB
    trace.begin("backward")
    assert trace.peaks().allocated_bytes == 100 * MIB
    trace.free(kept)
    assert trace.current["cuda"] == 0


def test_host_memory_is_no_memory_of_the_gpu() -> None:
    trace = Trace(Settings())
    trace.begin("init")
    states = trace.allocate(64 * MIB, "cpu")
    trace.move(states, "pinned")
    assert trace.peaks().allocated_bytes == 0
    assert trace.current == {"cpu": 0, "pinned": 64 * MIB}
    trace.free(states)
    assert trace.host_peak == 64 * MIB


def test_the_phase_that_does_not_fit_is_named() -> None:
    trace = Trace(Settings())
    trace.begin("init")
    trace.allocate(100 * MIB, "cuda")
    trace.begin("forward")
    trace.moment(50 * MIB)
    trace.begin("backward")
    trace.moment(200 * MIB)
    assert failing_phase(trace.events, Settings(), 400 * MIB) == ""
    assert failing_phase(trace.events, Settings(), 250 * MIB) == "backward"
    assert failing_phase(trace.events, Settings(), 120 * MIB) == "forward"
    assert failing_phase(trace.events, Settings(), 50 * MIB) == "init"


def test_a_cache_that_is_emptied_makes_room() -> None:
    trace = Trace(Settings())
    trace.begin("forward")
    trace.moment(100 * MIB)
    trace.empty_cache()
    trace.begin("backward")
    trace.moment(120 * MIB)
    assert trace.peaks().reserved_bytes == 120 * MIB


def test_memory_used_on_another_stream_is_free_once_that_stream_is_done() -> None:
    trace = Trace(Settings())
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


def test_a_repeated_step_has_the_peaks_of_one_that_is_taken() -> None:
    taken, repeated = Trace(Settings()), Trace(Settings())
    gradients = [trace.allocate(30 * MIB, "cuda") for trace in (taken, repeated)]
    for size in (50 * MIB, 90 * MIB, 20 * MIB):
        gradients = [_step(trace, one, size) for trace, one in zip((taken, repeated), gradients, strict=True)]
        start = len(repeated.events)
        gradients = [_step(trace, one, size) for trace, one in zip((taken, repeated), gradients, strict=True)]
        first = taken.peaks()
        again = repeated.repeat(start)
        gradients[0] = _step(taken, gradients[0], size)
        assert again is not None
        assert [name for name, _ in again] == ["forward", "backward"]
        assert again[-1][1] == taken.peaks()
        assert first.allocated_bytes == taken.peaks().allocated_bytes
        assert len(repeated.events) == len(taken.events)
    # What the repeated steps replaced can still be freed, in the trace and in its replay.
    repeated.free(gradients[1])
    repeated.begin("after")
    assert repeated.peaks().allocated_bytes == 0
    assert failing_phase(repeated.events, Settings(), 10_000 * MIB) == ""


def test_a_step_that_leaves_more_behind_is_not_repeated() -> None:
    trace = Trace(Settings())
    start = len(trace.events)
    trace.begin("forward")
    trace.allocate(10 * MIB, "cuda")
    trace.end("forward")
    events = list(trace.events)
    assert trace.repeat(start) is None
    assert trace.events == events


def test_less_than_was_reserved_suffices_where_the_cache_can_be_given_back() -> None:
    trace = Trace(Settings())
    trace.begin("forward")
    kept = trace.allocate(100 * MIB, "cuda")
    # The second does not fit into what the first left, so both are reserved; neither is needed beside the other.
    trace.moment(300 * MIB)
    trace.moment(400 * MIB)
    peaks = trace.peaks()
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (500 * MIB, 800 * MIB)
    needed = needed_bytes(trace.events, Settings(), peaks.allocated_bytes, peaks.reserved_bytes)
    assert 500 * MIB <= needed < 505 * MIB
    assert failing_phase(trace.events, Settings(), needed) == ""
    trace.free(kept)


def test_what_an_allocation_holds_goes_with_it_into_the_repeated_step() -> None:
    trace = Trace(Settings())
    gradient = trace.allocate(30 * MIB, "cuda")
    start = len(trace.events)
    gradient = _step(trace, gradient, 50 * MIB)
    trace.see(gradient, "gradients")
    trace.see(gradient, "activations")  # the first to say what it is counts,
    trace.see(gradient, "buckets")  # but for the bucket that it lies in
    assert trace.repeat(start) is not None
    assert sorted(trace.parts.values()) == ["buckets", "buckets"]
    assert sum(trace.block_bytes[handle] for handle in trace.parts) == 60 * MIB
