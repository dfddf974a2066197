import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from ftmon.protocol.messages import control, telemetry
from ftmon.protocol.messages.hosts import HostState
from ftmon.protocol.messages.telemetry import Closing, PhaseRecord, Span, Step, Update
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.cli.narrate import Narrator, figure_words
from ftmon.tui.model.alerts import CAPACITY, AlertHistory
from ftmon.tui.model.run import RunModel, early_stop_words, status
from ftmon.tui.model.timeline import EMPTY
from ftmon.tui.source.base import Connection
from ftmon.tui.widgets.state import summary_of
from models import folded, model_of
from streams import GIB, STARTED, Stream

SPAN = Span(10, 10, 10)


def step(rank: int, number: int, loss: float, **more: Any) -> Step:
    phases = [PhaseRecord("forward", 0, 10, SPAN, SPAN)]
    return Step(rank, number, 1000.0 + number, 1000, phases, loss=loss, **more)


def test_the_loss_is_the_mean_of_the_last_common_step_weighted_by_label_tokens_but_for_ranks_far_behind():
    model = model_of(step(0, 1, 8.0), step(1, 1, 4.0), step(0, 2, 1.0))
    assert model.loss == 6.0
    model.apply(Frame(4, 1010.0, step(1, 2, 2.0)))
    assert model.loss == 1.5
    model = model_of(step(1, 1, 4.0), *(step(0, number, float(number)) for number in range(1, 101)))
    assert model.loss == 100.0
    weighted = model_of(step(0, 1, 8.0, label_tokens=300), step(1, 1, 4.0, label_tokens=100))
    assert (weighted.loss, weighted.losses_of(0)) == (pytest.approx(7.0), [pytest.approx(7.0)])
    means = model_of(step(0, 1, 1.0), step(1, 1, 3.0), step(0, 2, 5.0), step(1, 2, math.nan))
    assert means.losses_of(0) == [2.0, 5.0]
    assert model_of(step(0, 1, 8.0, label_tokens=300), step(1, 1, 4.0)).loss == 6.0


def test_both_losses_are_shown_where_two_engines_train_also_of_one_that_updates_now_and_then():
    def both(rank: int, number: int, critic: float, actor: float | None) -> Step:
        updates = [Update("Critic", loss=critic)] + ([Update("Actor", loss=actor)] if actor is not None else [])
        return step(rank, number, critic, updates=updates)

    model = model_of(both(0, 1, 1.0, 5.0), both(1, 1, 3.0, 7.0), both(0, 2, 4.0, None), both(1, 2, 6.0, None))
    assert (model.losses_by_name, model.loss) == ({"Critic": 5.0, "Actor": 6.0}, 5.0)
    assert figure_words(model)[0] == "loss Critic 5.0000, Actor 6.0000"


def test_a_final_evaluation_counts_as_the_peak_and_a_long_phase_shows_in_each_of_its_columns():
    record = PhaseRecord("eval", 0, 10, SPAN, SPAN, resident=Span(10, 10, 900))
    model = model_of(step(0, 1, 8.0), Closing(0, 1, 1002.0, 1000, [record]))
    assert (model.step, model.ranks[0].last.step, len(model.ranks[0].steps)) == (1, 1, 1)
    assert (model.peak.bytes, model.peak.place) == (900, "eval after step 1")
    rank = model_of(run_model_step(0, 1, phase("forward", 70, 0, 3_200_000), started=STARTED)).ranks[0]
    assert rank.timeline.window(5, STARTED + 4).allocated[:4] == [70] * 4


BEGAN = 1_780_000_000.0
NONE = Span(0, 0, 0)


def stepped(lengths: Sequence[float], total: int = 0, pauses: dict[int, float] | None = None) -> RunModel:
    """Give a model of one rank with steps of these seconds, 100 tokens each; some begin with an evaluation."""
    model = RunModel()
    model.apply(Frame(1, BEGAN, telemetry.Plan(0, total_steps=total)))
    t = BEGAN
    for number, length in enumerate(lengths, 1):
        pause = (pauses or {}).get(number, 0.0)
        records = [PhaseRecord("eval", 0, int(pause * 1e6), NONE, NONE)] if pause else []
        whole = length + pause
        step = Step(0, number, t, int(whole * 1e6), [*records, PhaseRecord("data", 0, 1, NONE, NONE)], tokens=100)
        t += whole
        model.apply(Frame(number + 1, t, step))
    return model


def test_three_slower_steps_are_the_new_speed_and_an_ended_run_s_is_the_mean_without_the_first():
    model = stepped([3.8] * 30 + [11.6] * 3, total=43)
    assert model.rates.seconds_per_step == pytest.approx(11.6)
    assert model.rates.tokens_per_second == pytest.approx(100 / 11.6)
    assert model.seconds_left == pytest.approx(10 * 11.6)
    text = "\n".join(Narrator().new_lines(model))
    assert "11.600 s/step" in text
    assert "1 m 56 s left" in text
    model = stepped([60.0, *[1.0] * 50, *[3.0] * 50], pauses={70: 500.0})
    assert model.rates.seconds_per_step == pytest.approx(3.0)
    model.apply(Frame(1000, BEGAN + 1000, control.RunState("finished", BEGAN + 1000)))
    assert model.rates.seconds_per_step == pytest.approx(2.0)
    assert model.rates.tokens_per_second == pytest.approx(50.0)
    assert model.seconds_left is None


@pytest.mark.parametrize(
    "lengths",
    [
        *([4.0] * 30 + [1.0] * since for since in (3, 4, 5, 6, 7, 8, 20)),  # an earlier speed never returns
        *([1.0] * 20 + [30.0] + [1.0] * after for after in range(4)),  # one slow step is no change
        [60.0, 1.0],  # the slow first step counts only while it is the only one
    ],
)
def test_the_speed_is_that_of_the_latest_usual_steps(lengths):
    assert stepped(lengths).rates.seconds_per_step == pytest.approx(1.0)
    assert stepped([60.0]).rates.seconds_per_step == pytest.approx(60.0)


def test_evaluations_are_part_of_time_left_and_steps_that_were_not_recorded_share_the_time_in_between():
    model = stepped([1.0] * 40, total=80, pauses={11: 20.0, 21: 20.0, 31: 20.0})
    assert model.rates.seconds_per_step == pytest.approx(1.0)
    assert model.seconds_left == pytest.approx(40 * (1.0 + 60.0 / 40))
    model = stepped([1.0] * 10)
    model.apply(Frame(100, BEGAN + 15, Step(0, 15, BEGAN + 14, 1_000_000, [], tokens=100)))
    assert model.rates.seconds_per_step == pytest.approx(1.0)


EARLY_STOP = telemetry.EarlyStop(0, 14, STARTED + 2, 3, 1.234, 8)


def phase(name: str, peak: int, start_us: int = 0, host_us: int = 100_000, **more: object) -> PhaseRecord:
    return PhaseRecord(name, start_us, host_us, Span(1, 2, peak), Span(5, 5, peak + 5), **more)  # type: ignore[arg-type]


def run_model_step(rank: int, number: int, *phases: PhaseRecord, started: float = STARTED, **more: object) -> Step:
    length = max([500_000, *(each.start_us + each.host_us for each in phases)])
    return Step(rank, number, started, length, list(phases), **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def streamed() -> tuple[list[Frame], RunModel]:
    frames = list(Stream(ranks=4, steps=120).frames())
    return frames, folded(frames)


def test_a_frame_folded_already_changes_nothing_and_the_runs_peak_is_the_highest_of_any_phase(streamed):
    frames, model = streamed
    before = status(model)
    assert not any(model.apply(frame) for frame in frames[-50:])
    assert status(model) == before
    steps = [frame.message for frame in frames if isinstance(frame.message, Step)]
    expected = max((record.peak_span.peak, each.rank) for each in steps for record in each.phases)
    assert (model.peak.bytes, model.peak.rank) == expected
    for rank in model.ranks.values():
        whole = rank.timeline.whole(100)
        assert max(whole.allocated) == max(
            record.allocated.peak for each in steps if each.rank == rank.rank for record in each.phases
        )
        assert rank.reserved_peak == max(whole.reserved)


def test_the_runs_step_is_the_slowest_rank_s_with_its_figures_and_begins_where_it_resumed():
    model = model_of(run_model_step(0, 1), run_model_step(1, 1), run_model_step(0, 2))
    assert (model.step, model.leading_step) == (1, 2)
    model = model_of(run_model_step(0, 1), telemetry.Heartbeat(0, 3, "data", STARTED, 1, STARTED))
    assert (model.step, model.reported_step) == (2, 1)
    model = model_of(telemetry.Plan(0, total_steps=6, first_step=6))
    assert (model.step, model.leading_step, model.reported_step) == (6, 6, 0)
    assert model.seconds_left is None


def test_speed_counts_the_tokens_of_all_ranks_and_the_pauses_between_steps():
    model = RunModel()
    for seq in range(60):
        begun = STARTED + seq // 2 * 2.0
        step = run_model_step(seq % 2, 1 + seq // 2, started=begun, tokens=1000)
        model.apply(Frame(1 + seq, begun + 0.5, step))
    rates = model.rates
    found = rates.seconds_per_step, rates.steps_per_second, rates.tokens_per_second
    assert found == pytest.approx((2.0, 0.5, 1000.0))


def fast_steps(model: RunModel) -> float:
    """Fold 30 steps of 0.1 s and 1,000 tokens; return when the last one ended."""
    for number in range(1, 31):
        begun = STARTED + number * 0.1
        done = Step(0, number, begun, 100_000, [phase("data", 1)], tokens=1000)
        model.apply(Frame(model.last_seq + 1, begun + 0.1, done))
    return model.now


@pytest.mark.parametrize(
    ("later", "seconds", "speed"),
    [
        ((), 1.5, 10_000),  # messages are on their way
        ((), 3600, 30_000 / 3600),
        ((telemetry.Plan(0, total_steps=30),), 60, 10_000),
        ((telemetry.Activity(0, STARTED + 4, "export"),), 60, 10_000),
        ((control.RunState("finished", STARTED + 4),), 60, 10_000),
        ((telemetry.Activity(0, STARTED, "export"), control.RankState(0, "hung", STARTED + 63)), 60, 30_000 / 60),
        ((HostState("node-2", "reachable", STARTED, ranks=[0], clock_offset=3600.0),), 3600, 10_000),
    ],
    ids=["on the way", "silence", "planned end", "export", "finished", "hung in an export", "a clock behind"],
)
def test_a_run_keeps_its_speed_only_where_no_step_is_due(later, seconds, speed):
    model = RunModel()
    end = fast_steps(model)
    for number, message in enumerate(later, 1):
        model.apply(Frame(model.last_seq + 1, end + number, message))
    model.tick(end + seconds)
    kept = speed == 10_000
    found = model.rates.tokens_per_second
    assert found == pytest.approx(speed) if kept else found < 2 * speed
    assert model.rates.seconds_per_step == pytest.approx(0.1)


def test_no_time_is_left_after_an_early_stop():
    plan = telemetry.Plan(0, total_steps=300, evaluate_every=10)
    model = model_of(plan, run_model_step(0, 1, started=STARTED + 1), every=1.0)
    assert model.seconds_left is not None
    model.apply(Frame(3, STARTED + 2, EARLY_STOP))
    assert model.seconds_left is None
    told = status(model)
    assert (told["evaluations_left"], told["early_stop"]["best_step"]) == (0, 8)
    expected = "stopped early at step 14: no lower loss in 3 evaluations; best 1.2340 at step 8"
    assert early_stop_words(EARLY_STOP) == expected
    connection = Connection("live", "")
    assert summary_of(model, connection).ended == "stopped early"
    model.apply(Frame(4, STARTED + 3, control.RunState("failed", STARTED + 3, "exit code 1")))
    assert summary_of(model, connection).ended == "exit code 1", "what failed was after it"


@pytest.mark.parametrize("state", ["hung", "stopped", "gone", "unreachable"])
def test_no_time_is_left_to_tell_while_a_rank_stands(state):
    model = RunModel()
    model.apply(Frame(1, STARTED, telemetry.Plan(0, total_steps=110)))
    for number in range(1, 11):
        model.apply(Frame(number + 1, STARTED + number, run_model_step(0, number, started=STARTED + number)))
    model.apply(Frame(20, STARTED + 60, control.RankState(0, state, STARTED + 60)))
    assert model.seconds_left is None
    model.apply(Frame(21, STARTED + 61, control.RankState(0, "training", STARTED + 61)))
    assert model.seconds_left is not None


def test_an_alert_sent_again_replaces_itself_and_of_too_many_the_one_updated_least_recently_goes():
    first = control.Alert(7, "spike", "warning", STARTED, "rank 1 optimizer +0.9 GiB", rank=1, step=3)
    again = control.Alert(7, "spike", "warning", STARTED, "rank 1 optimizer +0.9 GiB", rank=1, step=4, count=2)
    error = control.Alert(8, "hang", "error", STARTED - 5, "rank 0 hangs", rank=0)
    model = model_of(first, error, again)
    assert [alert.id for alert in model.alerts.unresolved()] == [8, 7]
    assert (list(model.alerts), len(model.ranks[1].timeline.marks)) == ([error, again], 1)
    model = model_of(error, control.Alert(8, "hang", "error", STARTED, "rank 0 hangs", rank=0, resolved=STARTED + 9))
    assert (model.alerts.unresolved(), len(model.alerts)) == ([], 1)
    assert model.alerts.counts() == {"info": 0, "warning": 0, "error": 0}
    history = AlertHistory()
    for number in (*range(CAPACITY), 0, CAPACITY):
        history.put(control.Alert(number, "spike", "info", STARTED, "a spike"))
    assert len(history) == CAPACITY
    assert {0, 1} & {alert.id for alert in history} == {0}


def test_shares_are_of_device_time_or_count_waiting_and_start_up_is_in_no_step():
    waits = phase("backward", 9, 100_000, 300_000, collective_us=200_000)
    shares = model_of(run_model_step(0, 1, phase("forward", 9), waits)).ranks[0].shares
    assert (shares.clock, shares.step_ms) == ("host", pytest.approx(500.0))
    expected = {"data": 0, "generate": 0, "forward": 0.2, "backward": 0.2, "optimizer": 0, "wait": 0.4, "other": 0.2}
    assert shares.parts == pytest.approx(expected)
    timed = phase("forward", 9, device_us=30_000), phase("backward", 9, device_us=60_000)
    shares = model_of(run_model_step(0, 1, *timed, device_us=100_000)).ranks[0].shares
    assert (shares.clock, shares.parts["backward"]) == ("device", pytest.approx(0.6))
    assert shares.parts["other"] == pytest.approx(0.1)
    first = run_model_step(
        0, 1, phase("init", 1, -3_000_000, 3_000_000), phase("generate", 9, 0, 300_000), phase("forward", 9)
    )
    shares = model_of(first).ranks[0].shares
    assert shares.step_ms == pytest.approx(first.host_us / 1000)
    assert shares.parts["generate"] == pytest.approx(300_000 / first.host_us)
    assert sum(shares.parts.values()) == pytest.approx(1)


def test_a_device_is_matched_by_uuid_before_index_and_a_cpu_rank_to_its_host():
    hello = Stream(ranks=1, steps=1).hello(0, STARTED)
    wrong = telemetry.DeviceSample(hello.host, "gpu", 0, "H200", STARTED, 1, 2, uuid="GPU-other")
    right = telemetry.DeviceSample(hello.host, "gpu", 5, "H200", STARTED, 3, 4, uuid=hello.device.uuid)
    model = model_of(hello, wrong, right)
    assert model.device_of(model.ranks[0]) == right
    hello = Stream(ranks=1, steps=1, cuda=False).hello(0, STARTED)
    host = telemetry.DeviceSample(hello.host, "host", 0, "AMD", STARTED, 1, 2)
    model = model_of(hello, host)
    assert model.device_of(model.ranks[0]) == host


def test_a_rank_that_begins_anew_forgets_its_end_and_memory_of_one_that_is_gone_ends():
    first = Stream(ranks=1, steps=1).hello(0, STARTED)
    second = telemetry.Hello(**{**{name: getattr(first, name) for name in first.__struct_fields__}, "pid": 99})
    model = model_of(
        first, run_model_step(0, 1, phase("forward", 50)), control.RankState(0, "gone", STARTED, signal=9), second
    )
    rank = model.ranks[0]
    assert (rank.state, rank.signal, rank.step) == ("starting", None, 1)
    assert rank.peak is not None
    hello = Stream(ranks=1, steps=1).hello(0, STARTED)
    model = model_of(
        hello,
        run_model_step(0, 1, phase("forward", 50)),
        control.RankState(0, "gone", STARTED + 1, "SIGKILL", signal=9),
    )
    assert model.ranks[0].timeline.window(3, STARTED + 5).allocated == [EMPTY] * 3
    assert not model.ranks[0].alive


def test_whether_it_fits_is_unknown_until_adam_has_its_states():
    hello = Stream(ranks=1, steps=1).hello(0, STARTED)
    capacity = hello.device.capacity_bytes
    assert model_of(hello, run_model_step(0, 1, phase("forward", GIB))).fit.verdict == "unknown"
    assert model_of(hello, run_model_step(0, 1), run_model_step(0, 2, phase("forward", GIB))).fit.verdict == "fits"
    tight = model_of(hello, run_model_step(0, 1), run_model_step(0, 2, phase("backward", int(capacity * 0.95)))).fit
    assert tight == ("tight", 0, capacity)
    oom = telemetry.Oom(0, 3, "backward", STARTED, GIB, 0, capacity, 2, 3)
    seen = model_of(hello, run_model_step(0, 1), run_model_step(0, 2, phase("forward", GIB)), oom).fit.verdict
    assert seen == "failed"


def test_a_status_is_plain_json_with_every_rank_and_log_lines_filter_by_rank_and_text():
    told = json.loads(json.dumps(status(folded(Stream(ranks=3, steps=50, finished=False).frames()))))
    assert (told["step"], told["total_steps"]) == (50, 50)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
    assert told["rank_states"] == {"training": 3}
    assert told["peak"]["bytes"] == max(rank["peak"]["bytes"] for rank in told["ranks"])
    assert told["ranks"][0]["device"]["kind"] == "gpu"
    assert abs(sum(told["ranks"][0]["shares"].values()) - 1) < 1e-6
    told = json.loads(json.dumps(status(RunModel())))
    assert (told["state"], told["peak"], told["ranks"]) == ("starting", None, []), "nothing is known of the run"
    lines = [telemetry.LogLine(rank, STARTED, "out", text) for rank, text in ((0, "Loss 1"), (1, "loss 2"), (1, "x"))]
    model = model_of(*lines)
    assert [entry.text for entry in model.logs.select(text="LOSS")] == ["Loss 1", "loss 2"]
    assert [entry.text for entry in model.logs.select(rank=1, limit=1)] == ["x"]
