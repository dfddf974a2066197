"""The probe in scripts of kinds that nobody here wrote: what it says against what the scripts print themselves."""

import json
from contextlib import ExitStack
from itertools import groupby

import pytest
from ftmon.protocol.messages.telemetry import Closing, Failure, Goodbye, Hello, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model import RunModel
from probe_collector import BIN, SCRIPTS, Collector

PLAIN = [
    *("validated", "after_epochs", "validated_within", "dropped", "looked_at", "left_out", "failed_and_evaluated"),
    *("stages", "validated_last", "leave"),
]
OTHERS = [
    *("threads", "alike", "shared", "repeated", "ahead", "adversarial", "ahead_and_saved", "under_ddp"),
    *("left_out_of_ddp", "in_backward", "broken"),
]
"""Threads are the first that train, and ``ahead`` has the first loader."""


def printed(collector, word, rank=0, place=0):
    """Return what a rank printed as JSON behind ``word``, the first time or at that place."""
    lines = collector.run.rank_log(rank, "out").read_text().splitlines()
    return json.loads([line for line in lines if line.startswith(f"{word} ")][place].split(" ", 1)[1])


@pytest.fixture(scope="module")
def edges(tmp_path_factory):
    """The steps of each mode of ``loop_edges.py`` and what it printed; for a process's last mode its collector."""
    with ExitStack() as stack:
        collectors = [stack.enter_context(Collector(tmp_path_factory.mktemp("home"))) for _ in range(2)]
        for modes, collector in zip((PLAIN, OTHERS), collectors, strict=True):
            collector.fork("loop_edges.py", *modes)
        for collector in collectors:
            collector.finish()
    found = {}
    for modes, collector in zip((PLAIN, OTHERS), collectors, strict=True):
        lines = collector.run.rank_log(0, "out").read_text().splitlines()
        told = [json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith("optimised ")]
        steps = collector.of(Step)
        assert [mode for mode, _ in told] == modes[:-1], collector.output()
        assert len(steps) == sum(len(losses) for _, losses in told)
        assert_disjoint(steps)
        for mode, losses in told:
            found[mode] = steps[: len(losses)], losses
            del steps[: len(losses)]
        found[modes[-1]] = collector
    return found


def assert_disjoint(steps):
    """No time is in two phases: a pause that is in one of them is in no other, however long others last."""
    for step in steps:
        within = [phase.host_us for phase in step.phases if phase.name != "init"]
        assert sum(within) <= step.host_us + len(within), step


def host_us(step, name):
    return sum(phase.host_us for phase in step.phases if phase.name == name)


@pytest.mark.parametrize("mode", [*PLAIN[:-1], *OTHERS[:-1]])
def test_the_losses_of_a_loop_s_steps_are_what_it_optimised(edges, mode):
    steps, told = edges[mode]
    if mode == "alike":  # summed; and a norm that is given to the clipping is the step's
        assert [[step.loss, step.grad_norm] for step in steps] == [pytest.approx(one, rel=1e-5) for one in told]
    elif mode == "adversarial":
        assert_owned(steps, told, "SGD")
    else:
        assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "micro_steps"), [("shared", 2), ("dropped", 1), ("repeated", 1), ("failed_and_evaluated", 1)]
)
def test_micro_batches_are_those_of_the_update_however_often_used_and_whoever_updates(edges, mode, micro_steps):
    assert {step.micro_steps for step in edges[mode][0]} == {micro_steps}


@pytest.mark.parametrize(
    ("mode", "part", "counts"),
    [
        ("validated", slice(None), (4, 32)),
        ("validated_within", slice(None), (4, 32)),
        ("looked_at", slice(None), (4, 32)),
        ("dropped", slice(None), (4, 0)),
        ("left_out", slice(None), (4, 0)),
        ("left_out_of_ddp", slice(None), (4, 0)),
        ("failed_and_evaluated", slice(5), (4, 0)),
        ("stages", slice(12, None), (4, 0)),
        ("ahead", slice(15, None), (4, 0)),  # of accelerate's loaders it is known which batch they hand over
        ("under_ddp", slice(8, None), (8, 0)),
    ],
)
def test_batches_that_are_evaluated_looked_at_dropped_or_left_out_are_in_no_step(edges, mode, part, counts):
    assert {(step.samples, step.tokens or 0) for step in edges[mode][0][part]} == {counts}


def test_batches_fetched_ahead_are_used_each_optimizer_has_its_figures_and_ddp_the_backend_chosen(edges):
    steps, _ = edges["ahead"]
    assert [sum(step.samples for step in steps[first : first + 5]) for first in (0, 5, 10)] == [20] * 3
    critic = next(update for step in edges["adversarial"][0] for update in step.updates if update.name == "SGD")
    assert (critic.count, critic.micro_steps, critic.lr) == (1, 2, 0.02)
    hello = next(hello for hello in edges["broken"].of(Hello) if hello.framework == "ddp")
    assert hello.backend == "gloo"


@pytest.mark.parametrize(
    ("mode", "evaluated"),
    [
        ("validated", [1, 4, 7]),
        ("failed_and_evaluated", [6, 8, 10, 12, 13, 14]),
        ("ahead", [21, 26]),
        ("looked_at", [11, 15, 19]),
    ],
)
def test_an_evaluation_is_told_from_the_steps_around_it_without_any_hook(edges, mode, evaluated):
    steps, _ = edges[mode]
    first = 15 if mode == "ahead" else 0
    assert [number for number, step in enumerate(steps, 1) if number > first and host_us(step, "eval")] == evaluated


def test_pauses_are_in_the_phase_that_they_fall_in(edges):
    validated, after_epochs, looked_at, mixed, saved, in_backward, under_ddp = (
        edges[mode][0]
        for mode in (
            *("validated", "after_epochs", "looked_at", "failed_and_evaluated", "ahead_and_saved", "in_backward"),
            "under_ddp",
        )
    )
    (closing,) = edges["leave"].of(Closing)
    assert min(host_us(step, "eval") for step in (validated[3], validated[6], closing)) > 150_000
    # Work after an epoch is no loading of data; nor is a look at a batch, whose evaluation is one.
    assert min(host_us(step, "idle") for step in (*after_epochs[3:7:3], looked_at[4], *looked_at[14:19:4])) > 250_000
    assert min(host_us(step, "eval") for step in looked_at[14:19:4]) > 25_000
    assert all(host_us(step, "eval") > 25_000 for step in mixed[11:14])
    assert all(host_us(step, "forward") > 25_000 for step in mixed[5:])
    # A batch fetched early begins no forward; a checkpoint is what is saved, not what is pickled.
    assert all(host_us(step, "idle") > 250_000 for step in saved[1:6])
    assert [bool(host_us(step, "checkpoint")) for step in saved] == [False] * 6 + [True]
    # The first optimizer steps in the backward, before the pause: it goes on.
    assert all(host_us(step, "backward") > 25_000 for step in in_backward[1:])
    assert all(host_us(step, "data") - step.fetch_us >= 30_000 for step in under_ddp[1:8])
    assert host_us(under_ddp[8], "eval") >= 120_000
    assert host_us(under_ddp[8], "idle") >= 1_200_000


def test_a_script_s_way_out_is_told(edges):
    """By an exception in the backward; by a status."""
    broken, left = edges["broken"], edges["leave"]
    (failure,) = broken.of(Failure)
    # Not the count of steps: after a training of 5 s (a slow host's) the next one in the process begins at step 1.
    last = broken.of(Step)[-1].step
    assert (failure.phase, failure.step, "broken backward" in failure.error) == ("backward", last + 1, True)
    assert broken.job.returncode == 1
    assert [(goodbye.reason, goodbye.text) for goodbye in left.of(Goodbye)] == [("failed", "sys.exit(3)")]
    assert left.job.returncode == 3


@pytest.mark.parametrize(("way", "status"), [("caught", 4), ("in-a-process", 1)])
def test_a_process_that_ends_itself_for_an_exception_reports_it_and_all_its_steps(collector, way, status):
    if way == "caught":
        collector.fork("tail_loop.py", way).finish()
    else:
        collector.start(BIN / "python", SCRIPTS / "tail_loop.py", way).finish()
    assert collector.job.returncode == status, collector.output()
    told = "KeyError: 'labels'"
    assert [(goodbye.reason, goodbye.text, goodbye.step) for goodbye in collector.of(Goodbye)] == [("failed", told, 10)]
    assert [step.step for step in collector.of(Step)] == list(range(1, 11))
    (failure,) = collector.of(Failure)
    assert (failure.error, "in fail" in failure.traceback) == (told, True)
    if way == "in-a-process":
        assert {hello.pid for hello in collector.of(Hello)}.isdisjoint({collector.job.pid}), "its parent is no rank"
        assert collector.log.read_text() == "nothing to train here\n", "and keeps its output"


def assert_owned(steps, told, owner):
    """Every step is an update of its owner, with the losses of the others since the step before."""
    assert [step.loss for step in steps] == pytest.approx([losses[owner] for losses in told], rel=1e-5)
    for step, losses in zip(steps, told, strict=True):
        updates = {update.name: update.loss for update in step.updates}
        assert updates == pytest.approx(losses if len(losses) > 1 else {}, rel=1e-5)


RANKS = {
    "plain": 5, "fsdp2_loop": 4, "pipeline_loop": 6, "losses_loop": 12, "plain again": 5, "two_engines": 6,
    "engine_calls": 10,
}  # fmt: skip
"""What two ranks train one after the other, and its steps."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The steps of each rank by what it trained, and the collector of both ranks."""
    names = [name.split()[0] for name in RANKS]
    with Collector(tmp_path_factory.mktemp("home")) as collector:
        collector.fork("one_after_another.py", *names, ranks=2).finish()
    return [collector.parts(RANKS, rank) for rank in (0, 1)], collector


def test_a_loss_is_what_ddp_ranks_optimise_however_scaled_and_two_engines_and_an_optimizer_make_one_step(trained):
    found, collector = trained
    for rank in (0, 1):
        frameworks = [each for each, _ in groupby(hello.framework for hello in collector.of(Hello, rank))]
        frameworks = frameworks[frameworks.index("fsdp") :]
        # A hello that another one follows at once is left out: DDP reports itself in its first forward.
        assert [each for each in frameworks if each != "pytorch"] == ["fsdp", "ddp", "deepspeed"]
        assert frameworks[-2:] == ["pytorch", "deepspeed"]
        assert [(step.samples, step.phase("data") is None) for step in found[rank]["plain again"]] == [(4, False)] * 5
        steps = found[rank]["losses_loop"]
        assert [step.loss for step in steps] == pytest.approx(printed(collector, "optimised", rank, 1), rel=1e-5)
        assert [step.micro_steps for step in steps] == [4] * 10 + [2] * 2
        assert all({"data", "forward", "backward", "optimizer"} <= {p.name for p in s.phases} for s in steps)
        assert_owned(found[rank]["two_engines"], printed(collector, "losses", rank), "Critic")
        assert {hello.model for hello in collector.of(Hello, rank)} >= {"Critic + Actor"}


def test_a_module_called_past_its_engine_and_a_pipeline_s_first_stage_have_all_samples(trained):
    found, _ = trained
    for rank in (0, 1):
        steps = found[rank]["engine_calls"]
        # The update that the first engine makes while it starts is no step.
        assert [step.step for step in steps] == [*range(1, 7), *range(1, 5)]
        assert [step.samples for step in steps[1:5]] == [4] * 4
        assert_disjoint(steps)
        assert all(host_us(step, "forward") > 250_000 for step in steps[1:5])
        assert host_us(steps[5], "eval") > 50_000
    assert [(step.samples, step.tokens) for step in found[0]["engine_calls"][6:]] == [(16, 256)] * 4


def test_a_pipeline_s_parameters_are_those_of_all_stages_and_fsdp2_s_of_all_shards(trained):
    found, collector = trained
    stages = [next(one for one in collector.of(Hello, rank) if one.pipeline_stage is not None) for rank in (0, 1)]
    expected = [(0, 8 * 16 + 16, "gloo"), (1, 16 + 1, "gloo")]
    assert [(hello.pipeline_stage, hello.parameters, hello.backend) for hello in stages] == expected
    run = RunModel()
    for number, hello in enumerate(stages, 1):
        run.apply(Frame(number, hello.time, hello))
    assert run.info.parameters == run.info.trainable_parameters == 161
    for rank, piped in enumerate(([None] * 6, printed(collector, "piped", 1))):
        steps, staged = found[rank]["fsdp2_loop"], found[rank]["pipeline_loop"]
        assert [step.loss for step in staged] == (pytest.approx(piped, rel=1e-5) if rank else piped)
        hello = [hello for hello in collector.of(Hello, rank) if hello.framework == "fsdp"][-1]
        assert (hello.framework, hello.model, hello.backend) == ("fsdp", "TinyNet", "gloo")
        assert (hello.parameters, hello.trainable_parameters) == (3 * 72, 2 * 72)
        assert [step.step for step in (*steps, *staged)] == list(range(6, 16))
        assert [step.grad_norm for step in steps] == pytest.approx(printed(collector, "norms", rank), rel=1e-5)
        # Losses are added up where gradients are.
        assert [step.loss for step in steps] == pytest.approx(printed(collector, "optimised", rank), rel=1e-5)
