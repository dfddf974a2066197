from typing import Any

import pytest
from ftmon.protocol.analysis.memory import spike
from ftmon.protocol.messages.memory import Composition
from ftmon.protocol.messages.telemetry import AllocatorEvents, AllocatorPhase, PhaseRecord, Span
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import Sim

MIB = 2**20
GIB = 2**30


def steps(last: int, make: Any, ranks: int = 1, *, cuda: bool = True) -> Sim:
    """Return a run of which ``make(sim, rank, step)`` gives the phases."""
    sim = Sim(ranks, cuda=cuda)
    sim.begin()
    sim.train(1, last, lambda rank, step: make(sim, rank, step))
    return sim


def optimizer_steps(sizes: dict[int, int], last: int, **fields: Any) -> Sim:
    """Return a run with transients of the optimizer, by step; 20 MiB in other steps."""
    return steps(last, lambda sim, _, step: [sim.phase("optimizer", sizes.get(step, 20 * MIB), ms=4.0)], **fields)


def update(span: Span, **fields: Any) -> PhaseRecord:
    return PhaseRecord("optimizer", 0, 9000, span, span, **fields)


def test_a_transient_far_above_the_usual_is_one_spike_that_counts_repeats_until_it_stays_away():
    def phases(sim: Sim, rank: int, step: int) -> list[PhaseRecord]:
        extra = 911 * MIB if (rank, step) == (1, 20) else 0
        return [sim.phase("forward", 300 * MIB), sim.phase("optimizer", 20 * MIB + extra, ms=4.0)]

    (alert,) = steps(25, phases, 2).alerts("spike")
    assert (alert.rank, alert.step, alert.phase, alert.severity) == (1, 20, "optimizer", "warning")
    figures = {"transient_bytes": 931 * MIB, "usual_bytes": 20 * MIB, "phase_ms": 4.0}
    assert alert.evidence.items() >= {**figures, "sets_step_peak": True, "sets_run_peak": True}.items()
    assert alert.count == 1
    sim = optimizer_steps(dict.fromkeys(range(20, 60, 4), 2 * GIB), last=60)
    (alert,) = sim.alerts("spike")
    assert (alert.count, alert.resolved) == (10, None)
    assert sim.sends("spike") < 8, "repeats are sent at most every few seconds"
    sim.train(61, 80, lambda rank, step: [sim.phase("optimizer", 20 * MIB)])
    assert sim.alerts("spike")[0].resolved is not None


def test_a_spike_below_the_step_s_peak_says_so_and_the_allocators_trace_adds_its_allocations():
    def phases(sim: Sim, rank: int, step: int) -> list[PhaseRecord]:
        spike = sim.phase("optimizer", GIB if step == 15 else 0, base=5 * GIB)
        return [sim.phase("backward", 9 * GIB), spike]

    (alert,) = steps(20, phases).alerts("spike")
    assert alert.evidence["sets_step_peak"] is False
    assert alert.severity == "warning", "an optimizer spike is always worth a warning"
    sim = optimizer_steps({12: 2 * GIB}, last=12)
    sim.feed(AllocatorEvents(0, 12, sim.now, [AllocatorPhase("optimizer", largest=[593 * MIB, 100 * MIB])]))
    sim.wait(6)
    (alert,) = sim.alerts("spike")
    assert alert.evidence["largest_bytes"] == [593 * MIB, 100 * MIB]


@pytest.mark.parametrize("step", [1, 4, 5, 7, 13])
def test_a_spike_is_found_from_the_third_step_of_history_on_and_the_first_step_is_none(step):
    sim = optimizer_steps({step: 30 * GIB}, last=step + 11)
    assert [alert.step for alert in sim.alerts("spike")] == [step] * (step > 1)


def test_first_step_growth_is_growth_with_its_size_not_a_spike():
    # qwen1.5-0.5b, ZeRO-2 on one H200: the optimizer's first step leaves fp32 moments behind.
    def phases(sim: Sim, rank: int, step: int) -> list[PhaseRecord]:
        return [update(Span(2720 * MIB if step == 1 else 6261 * MIB, 6261 * MIB, 6261 * MIB), device_us=9000)]

    sim = steps(12, phases, 2)
    (alert,) = sim.alerts("growth")
    assert (alert.severity, alert.step, alert.ranks) == ("info", 1, [0, 1])
    assert alert.evidence["growth_bytes"] == 3541 * MIB
    assert sim.alerts("spike") == []


def test_growth_is_the_optimizer_s_states_without_gradients_also_after_skipped_first_updates():
    # An update that creates 800 MiB of states and frees 400 MiB of gradients grows by 400.
    sim = steps(1, lambda *_: [update(Span(1000 * MIB, 1400 * MIB, 1800 * MIB))])
    sim.feed(Composition(0, 1, sim.now, "cuda", [], known={"optimizer_states": 800 * MIB, "parameters": 400 * MIB}))
    sim.tick()
    alert = sim.alerts("growth")[-1]
    assert (alert.evidence["growth_bytes"], alert.evidence["net_bytes"]) == (800 * MIB, 400 * MIB)
    sim = Sim()
    sim.begin()
    for step in range(1, 9):
        end = 3 * GIB if step < 6 else 5 * GIB
        sim.feed(sim.step(0, step, [update(Span(3 * GIB if step <= 6 else end, end, end))], overflow=step < 6))
    assert [alert.step for alert in sim.alerts("growth")] == [6]


@pytest.mark.parametrize(("states", "alerts"), [(0, 0), (800, 1)])
def test_gradients_of_a_closure_are_no_growth_of_the_optimizer(states, alerts):
    forward = Span(1000 * MIB, 1100 * MIB, 1100 * MIB)
    backward = Span(1100 * MIB, 1400 * MIB, 1500 * MIB)
    phases = [
        update(Span(1000 * MIB, (1400 + states) * MIB, 2300 * MIB), count=2),
        PhaseRecord("forward", 100, 900, forward, forward),
        PhaseRecord("backward", 1000, 900, backward, backward),
    ]
    sim = steps(1, lambda *_: phases)
    assert [alert.evidence["growth_bytes"] for alert in sim.alerts("growth")] == [states * MIB] * alerts


@pytest.mark.parametrize(
    ("start_mib", "end_mib", "peak_mib", "severity"),
    [
        (7146, 6261, 9801, "info"),  # qwen1.5-0.5b ZeRO-2
        (18923, 16565, 25995, "info"),  # llama-3.2-1b ZeRO-2: 4.9 % of the device
        (42269, 38355, 53757, "warning"),  # llama-3-8b ZeRO-2 on four: 8 %
        (31651, 31651, 37394, "info"),  # llama-3-8b ZeRO-3 on four
    ],
)
def test_a_large_transient_of_every_step_is_told_once_for_all_ranks(start_mib, end_mib, peak_mib, severity):
    span = Span(start_mib * MIB, end_mib * MIB, peak_mib * MIB)
    sim = steps(60, lambda *_: [update(span, device_us=15_000)], 4)
    (alert,) = sim.alerts("spike")
    assert alert.evidence["transient_bytes"] == (peak_mib - max(start_mib, end_mib)) * MIB
    assert alert.evidence["phase_ms"] == 15.0
    assert (alert.severity, alert.ranks, alert.rank) == (severity, [0, 1, 2, 3], None)
    assert sim.sends("spike") <= 4


LENGTHS = [128, 512, 1024, 256, 768, 900, 300, 640, 1024, 128, 400]
"""Forward and backward transients of qwen1.5-0.5b follow the sequence length."""


@pytest.mark.parametrize(
    "phases",
    [
        lambda *_: [update(Span(16383 * MIB, 16383 * MIB, 16383 * MIB), device_us=900_000)],
        lambda sim, _, step: [
            sim.phase("forward", LENGTHS[step % 11] * MIB),
            sim.phase("backward", 2 * LENGTHS[(step * 7) % 11] * MIB),
        ],
    ],
    ids=["optimizer offload without a transient", "batches of different length"],
)
def test_no_spike(phases):
    assert steps(120, phases).alerts("spike") == []


@settings(max_examples=60, deadline=None)
@given(noise=st.lists(st.integers(0, 40), min_size=60, max_size=60), usual=st.integers(0, 400))
def test_noise_of_the_resident_set_is_never_a_spike(noise, usual):
    sizes = {step: (usual + extra) * MIB for step, extra in enumerate(noise, 1)}
    assert optimizer_steps(sizes, last=60, cuda=False).alerts("spike") == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=50, max_size=50), st.integers(10, 3000), st.integers(10, 50))
def test_a_spike_twice_the_usual_plus_half_a_gibibyte_is_always_found(noise, usual, at):
    sizes = {step: (usual + extra) * MIB for step, extra in enumerate(noise, 1)}
    sizes[at] = (2 * usual + 512) * MIB
    found = [alert for alert in optimizer_steps(sizes, last=50).alerts("spike") if alert.evidence["rule"] == "recent"]
    assert [alert.step for alert in found] == [at]


def test_a_new_steady_level_stops_being_news_and_many_ranks_spiking_at_once_are_a_handful_of_alerts():
    sim = optimizer_steps(dict.fromkeys(range(40, 200), 600 * MIB), last=120)
    (alert,) = [alert for alert in sim.alerts("spike") if alert.evidence["rule"] == "recent"]
    assert alert.count <= spike.WINDOW
    assert alert.resolved is not None
    sim = optimizer_steps({12: 3 * GIB}, last=14, ranks=64)
    assert len(sim.alerts("spike")) == spike.RANKS_APART + 1
    sim.wait(6)
    pooled = next(alert for alert in sim.alerts("spike") if alert.rank is None)
    assert pooled.count == 64 - spike.RANKS_APART
