from typing import Any

import pytest
from ftmon.protocol.analysis.memory import spike
from ftmon.protocol.analysis.memory.spike import usual_of
from ftmon.protocol.messages.memory import Composition
from ftmon.protocol.messages.telemetry import AllocatorEvents, AllocatorPhase, PhaseRecord, Span
from hypothesis import given, settings
from hypothesis import strategies as st

MIB = 2**20
GIB = 2**30


def optimizer_steps(sim: Any, sizes: dict[int, int], usual: int = 20 * MIB, last: int = 30, phase: str = "optimizer"):
    sim.begin()
    sim.train(1, last, lambda rank, step: [sim.phase(phase, sizes.get(step, usual), ms=4.0)])


def test_a_transient_far_above_the_usual_is_one_spike_with_its_figures(make_sim: Any):
    sim = make_sim(2)
    sim.begin()

    def phases(rank: int, step: int) -> list[PhaseRecord]:
        extra = 911 * MIB if (rank, step) == (1, 20) else 0
        return [sim.phase("forward", 300 * MIB), sim.phase("optimizer", 20 * MIB + extra, ms=4.0)]

    sim.train(1, 25, phases)
    (alert,) = sim.alerts("spike")
    assert (alert.rank, alert.step, alert.phase, alert.severity) == (1, 20, "optimizer", "warning")
    assert alert.evidence["transient_bytes"] == 931 * MIB
    assert alert.evidence["usual_bytes"] == 20 * MIB
    assert alert.evidence["phase_ms"] == 4.0
    assert alert.evidence["sets_step_peak"] is True
    assert alert.evidence["sets_run_peak"] is True
    assert alert.count == 1


def test_a_repeating_spike_is_one_alert_with_a_count_and_ends_when_it_stays_away(make_sim: Any):
    sim = make_sim()
    optimizer_steps(sim, dict.fromkeys(range(20, 60, 4), 2 * GIB), last=60)
    (alert,) = sim.alerts("spike")
    assert alert.count == 10
    assert sim.sends("spike") < 8, "repeats are sent at most every few seconds"
    assert alert.resolved is None
    sim.train(61, 80, lambda rank, step: [sim.phase("optimizer", 20 * MIB)])
    assert sim.alerts("spike")[0].resolved is not None


def test_a_spike_that_does_not_make_the_steps_peak_says_so(make_sim: Any):
    sim = make_sim()
    sim.begin()
    sim.train(
        1,
        20,
        lambda rank, step: [
            sim.phase("backward", 9 * GIB),
            sim.phase("optimizer", GIB if step == 15 else 0, base=5 * GIB),
        ],
    )
    (alert,) = sim.alerts("spike")
    assert alert.evidence["sets_step_peak"] is False
    assert alert.severity == "warning", "an optimizer spike is always worth a warning"


@pytest.mark.parametrize("step", [3, 4, 6, 12])
def test_a_spike_is_found_from_the_third_step_of_history_on(make_sim: Any, step: int):
    sim = make_sim()
    optimizer_steps(sim, {step + 1: 2 * GIB}, last=step + 2)
    assert [alert.step for alert in sim.alerts("spike")] == [step + 1]


def test_the_first_step_is_no_spike_whatever_it_takes(make_sim: Any):
    sim = make_sim()
    optimizer_steps(sim, {1: 30 * GIB}, last=12)
    assert sim.alerts("spike") == []


def test_first_step_growth_is_growth_with_its_size_not_a_spike(make_sim: Any):
    # qwen1.5-0.5b, ZeRO-2 on one H200: the optimizer's first step leaves fp32 moments behind.
    sim = make_sim(2)
    sim.begin()

    def phases(rank: int, step: int) -> list[PhaseRecord]:
        start = 2720 * MIB if step == 1 else 6261 * MIB
        end = 6261 * MIB
        span = Span(start, end, end)
        return [PhaseRecord("optimizer", 0, 9000, span, span, device_us=9000)]

    sim.train(1, 12, phases)
    (alert,) = sim.alerts("growth")
    assert (alert.severity, alert.step, alert.ranks) == ("info", 1, [0, 1])
    assert alert.evidence["growth_bytes"] == 3541 * MIB
    assert sim.alerts("spike") == []


def test_growth_is_the_optimizer_s_states_and_gradients_do_not_count(make_sim: Any):
    sim = make_sim()
    sim.begin()
    # An update that creates 800 MiB of states and frees 400 MiB of gradients grows by 400.
    span = Span(1000 * MIB, 1400 * MIB, 1800 * MIB)
    sim.feed(sim.step(0, 1, [PhaseRecord("optimizer", 0, 9000, span, span)]))
    sim.feed(Composition(0, 1, sim.now, "cuda", [], known={"optimizer_states": 800 * MIB, "parameters": 400 * MIB}))
    sim.tick()
    alert = sim.alerts("growth")[-1]
    assert (alert.evidence["growth_bytes"], alert.evidence["net_bytes"]) == (800 * MIB, 400 * MIB)


def test_gradients_of_a_closure_are_no_growth_of_the_optimizer(make_sim: Any):
    for states, alerts in ((0, 0), (800, 1)):
        sim = make_sim()
        sim.begin()
        forward = Span(1000 * MIB, 1100 * MIB, 1100 * MIB)
        backward = Span(1100 * MIB, 1400 * MIB, 1500 * MIB)
        update = Span(1000 * MIB, (1400 + states) * MIB, 2300 * MIB)
        sim.feed(
            sim.step(
                0,
                1,
                [
                    PhaseRecord("optimizer", 0, 9000, update, update, count=2),
                    PhaseRecord("forward", 100, 900, forward, forward),
                    PhaseRecord("backward", 1000, 900, backward, backward),
                ],
            )
        )
        assert [alert.evidence["growth_bytes"] for alert in sim.alerts("growth")] == [states * MIB] * alerts


def test_growth_after_skipped_first_updates_is_still_growth(make_sim: Any):
    sim = make_sim()
    sim.begin()
    for step in range(1, 9):
        skipped = step < 6
        end = 3 * GIB if skipped else 5 * GIB
        span = Span(3 * GIB if step <= 6 else end, end, end)
        sim.feed(sim.step(0, step, [PhaseRecord("optimizer", 0, 9000, span, span)], overflow=skipped))
    assert [alert.step for alert in sim.alerts("growth")] == [6]


@pytest.mark.parametrize(
    ("start_mib", "end_mib", "peak_mib", "severity"),
    [
        (7146, 6261, 9801, "info"),  # qwen1.5-0.5b ZeRO-2
        (18923, 16565, 25995, "info"),  # llama-3.2-1b ZeRO-2: 4.9 % of the device
        (42269, 38355, 53757, "warning"),  # llama-3-8b ZeRO-2 on four: 8 %
        (31651, 31651, 37394, "info"),  # llama-3-8b ZeRO-3 on four
    ],
)
def test_a_large_transient_of_every_step_is_told_once_for_all_ranks(
    make_sim: Any, start_mib: int, end_mib: int, peak_mib: int, severity: str
):
    sim = make_sim(4)
    sim.begin()
    span = Span(start_mib * MIB, end_mib * MIB, peak_mib * MIB)
    sim.train(1, 60, lambda rank, step: [PhaseRecord("optimizer", 0, 15_000, span, span, device_us=15_000)])
    (alert,) = sim.alerts("spike")
    assert alert.evidence["transient_bytes"] == (peak_mib - max(start_mib, end_mib)) * MIB
    assert alert.evidence["phase_ms"] == 15.0
    assert (alert.severity, alert.ranks, alert.rank) == (severity, [0, 1, 2, 3], None)
    assert sim.sends("spike") <= 4


def test_optimizer_offload_without_a_transient_is_quiet(make_sim: Any):
    sim = make_sim()
    sim.begin()
    span = Span(16383 * MIB, 16383 * MIB, 16383 * MIB)
    sim.train(1, 60, lambda rank, step: [PhaseRecord("optimizer", 0, 900_000, span, span, device_us=900_000)])
    assert sim.alerts("spike") == []


def test_batches_of_different_length_are_no_spikes_of_forward_and_backward(make_sim: Any):
    # Forward and backward transients of qwen1.5-0.5b follow the sequence length.
    lengths = [128, 512, 1024, 256, 768, 900, 300, 640, 1024, 128, 400]
    sim = make_sim()
    sim.begin()
    sim.train(
        1,
        120,
        lambda rank, step: [
            sim.phase("forward", lengths[step % 11] * MIB),
            sim.phase("backward", 2 * lengths[(step * 7) % 11] * MIB),
        ],
    )
    assert sim.alerts("spike") == []


@settings(max_examples=60, deadline=None)
@given(noise=st.lists(st.integers(0, 40), min_size=60, max_size=60), usual=st.integers(0, 400))
def test_noise_of_the_resident_set_is_never_a_spike(make_sim: Any, noise: list[int], usual: int):
    sim = make_sim(cuda=False)
    optimizer_steps(sim, {step: (usual + extra) * MIB for step, extra in enumerate(noise, 1)}, last=60)
    assert sim.alerts("spike") == []


@settings(max_examples=60, deadline=None)
@given(
    noise=st.lists(st.integers(-5, 5), min_size=50, max_size=50),
    usual=st.integers(10, 3000),
    at=st.integers(10, 50),
)
def test_a_spike_twice_the_usual_plus_half_a_gibibyte_is_always_found(
    make_sim: Any, noise: list[int], usual: int, at: int
):
    sim = make_sim()
    sizes = {step: (usual + extra) * MIB for step, extra in enumerate(noise, 1)}
    sizes[at] = (2 * usual + 512) * MIB
    optimizer_steps(sim, sizes, last=50)
    found = [alert for alert in sim.alerts("spike") if alert.evidence["rule"] == "recent"]
    assert [alert.step for alert in found] == [at]


def test_a_new_steady_level_stops_being_news(make_sim: Any):
    sim = make_sim()
    optimizer_steps(sim, dict.fromkeys(range(40, 200), 600 * MIB), last=120)
    (alert,) = [alert for alert in sim.alerts("spike") if alert.evidence["rule"] == "recent"]
    assert alert.count <= spike.WINDOW
    assert alert.resolved is not None


def test_all_of_many_ranks_spiking_at_once_is_a_handful_of_alerts(make_sim: Any):
    sim = make_sim(64)
    sim.begin()
    sim.train(1, 14, lambda rank, step: [sim.phase("optimizer", 3 * GIB if step == 12 else 0)])
    alerts = sim.alerts("spike")
    assert len(alerts) == spike.RANKS_APART + 1
    sim.wait(6)
    pooled = next(alert for alert in sim.alerts("spike") if alert.rank is None)
    assert pooled.count == 64 - spike.RANKS_APART


def test_the_allocators_own_trace_adds_the_largest_allocations(make_sim: Any):
    sim = make_sim()
    optimizer_steps(sim, {12: 2 * GIB}, last=12)
    events = AllocatorEvents(0, 12, sim.now, [AllocatorPhase("optimizer", largest=[593 * MIB, 100 * MIB])])
    sim.feed(events)
    sim.wait(6)
    (alert,) = sim.alerts("spike")
    assert alert.evidence["largest_bytes"] == [593 * MIB, 100 * MIB]


@given(values=st.lists(st.integers(0, 10**12), min_size=8, max_size=64), outlier=st.integers(0, 10**14))
def test_one_outlier_moves_what_is_usual_by_no_more_than_one_place(values: list[int], outlier: int):
    ordered = sorted(values)
    half = len(ordered) // 2
    moved = usual_of([*values, outlier]).typical
    assert ordered[max(0, half - 1)] <= moved <= ordered[min(len(ordered) - 1, half + 1)]
