"""The probe in scripts of kinds that nobody here wrote: what it says against what the scripts print themselves."""

import json

import pytest
import start_ranks
from ftmon.protocol.messages.telemetry import Closing, Failure, Goodbye, Hello, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model import RunModel
from probe_collector import BIN, SCRIPTS


def printed(collector, word, rank=0):
    """Return what a rank printed as JSON behind ``word``."""
    lines = collector.run.rank_log(rank, "out").read_text().splitlines()
    return json.loads(next(line for line in lines if line.startswith(f"{word} ")).split(" ", 1)[1])


def test_a_loss_is_what_the_script_optimises_however_it_scales_it(collector):
    collector.start(*start_ranks.command(2, SCRIPTS / "losses_loop.py")).finish()
    assert collector.job.returncode == 0, collector.output()
    for rank in (0, 1):
        steps = collector.of(Step, rank)
        assert [step.loss for step in steps] == pytest.approx(printed(collector, "optimised", rank), rel=1e-5)
        assert [step.micro_steps for step in steps] == [4] * 10 + [2] * 2


def edges(collector, mode, *command):
    """Run a mode of ``loop_edges.py``; return its steps and what it printed."""
    collector.start(*(command or (BIN / "python",)), SCRIPTS / "loop_edges.py", mode).finish()
    assert collector.job.returncode == 0, collector.output()
    steps = collector.of(Step)
    assert_disjoint(steps)
    return steps, printed(collector, "optimised")


def assert_disjoint(steps):
    """No time is in two phases: a pause that is in one of them is in no other, however long others last."""
    for step in steps:
        within = [phase.host_us for phase in step.phases if phase.name != "init"]
        assert sum(within) <= step.host_us + len(within), step


def host_us(step, name):
    return sum(phase.host_us for phase in step.phases if phase.name == name)


def test_work_after_an_epoch_is_no_loading_of_data(collector):
    steps, told = edges(collector, "after_epochs")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    for number in (4, 7):  # of the 300 ms after an epoch
        assert host_us(steps[number - 1], "idle") > 250_000


def test_a_validation_without_any_hook_is_an_evaluation_and_its_tokens_are_no_step_s(collector):
    steps, told = edges(collector, "validated")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert [(step.samples, step.tokens) for step in steps] == [(4, 32)] * 9
    assert [step.step for step in steps if host_us(step, "eval")] == [1, 4, 7]
    (closing,) = collector.of(Closing)
    for step in (steps[3], steps[6], closing):
        assert host_us(step, "eval") > 150_000


def test_a_validation_before_the_backward_takes_no_batch_from_the_step(collector):
    steps, told = edges(collector, "validated_within")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert [(step.samples, step.tokens) for step in steps] == [(4, 32)] * 6


def test_losses_of_one_kind_from_one_batch_are_summed_and_a_norm_given_to_the_clipping_is_the_step_s(collector):
    steps, told = edges(collector, "alike")
    assert [[step.loss, step.grad_norm] for step in steps] == [pytest.approx(one, rel=1e-5) for one in told]


def test_micro_batches_of_several_optimizers_are_not_shared_out_among_them(collector):
    steps, told = edges(collector, "shared")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert all(step.micro_steps == 2 for step in steps)


def test_optimizers_that_train_one_after_the_other_make_steps_of_their_own(collector):
    steps, told = edges(collector, "stages")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert [(step.samples, host_us(step, "data") > 0) for step in steps[12:]] == [(4, True)] * 2


def test_a_batch_whose_gradients_are_dropped_is_in_no_loss(collector):
    steps, told = edges(collector, "dropped")
    assert [step.samples for step in steps] == [4] * 6
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert all(step.micro_steps == 1 for step in steps)


def test_a_batch_that_is_used_twice_for_one_update_is_one_micro_batch(collector):
    steps, told = edges(collector, "repeated")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert all(step.micro_steps == 1 for step in steps)


def test_a_batch_whose_backward_fails_is_in_no_loss_and_a_forward_after_an_evaluation_is_none(collector):
    steps, told = edges(collector, "failed_and_evaluated")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert [step.samples for step in steps[:5]] == [4] * 5
    assert all(step.micro_steps == 1 for step in steps)
    evaluated = [False] * 5 + [True, False] * 3 + [True] * 3 + [False] * 2
    assert [bool(host_us(step, "eval")) for step in steps] == evaluated
    assert all(host_us(step, "eval") > 25_000 for step in steps[11:14])
    assert all(host_us(step, "forward") > 25_000 for step in steps[5:])


def test_batches_without_a_backward_are_in_no_step(collector):
    steps, told = edges(collector, "left_out")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert len(steps) == 18
    assert [step.samples for step in steps] == [4] * 18


def test_batches_that_are_fetched_ahead_are_not_left_out(collector):
    steps, told = edges(collector, "ahead")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert [sum(step.samples for step in steps[first : first + 5]) for first in (0, 5, 10)] == [20] * 3
    # Of accelerate's loaders it is known which batch they hand over.
    assert [step.samples for step in steps[15:]] == [4] * 15
    assert [bool(host_us(step, "eval")) for step in steps[15:]] == [place in (5, 10) for place in range(15)]


def test_a_single_batch_that_is_not_trained_on_is_in_no_step(collector):
    steps, told = edges(collector, "looked_at")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert [(step.samples, step.tokens) for step in steps] == [(4, 32)] * 20
    assert host_us(steps[4], "idle") > 250_000
    assert [number for number, step in enumerate(steps, 1) if host_us(step, "eval")] == [11, 15, 19]
    for number in (15, 19):
        assert host_us(steps[number - 1], "idle") > 250_000
        assert host_us(steps[number - 1], "eval") > 25_000


def test_a_batch_fetched_early_begins_no_forward_and_a_checkpoint_is_what_is_saved_not_what_is_pickled(collector):
    steps, told = edges(collector, "ahead_and_saved", *start_ranks.command(1))
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert all(host_us(step, "idle") > 250_000 for step in steps[1:6])
    assert [bool(host_us(step, "checkpoint")) for step in steps] == [False] * 6 + [True]


def test_a_backward_in_which_optimizers_step_goes_on(collector):
    steps, told = edges(collector, "in_backward")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert all(host_us(step, "backward") > 25_000 for step in steps[1:]), "the first optimizer steps before the pause"


def test_an_exception_in_the_backward_is_one_in_the_backward(collector):
    collector.start(BIN / "python", SCRIPTS / "loop_edges.py", "broken").finish()
    assert collector.job.returncode == 1
    (failure,) = collector.of(Failure)
    assert (failure.phase, failure.step, "broken backward" in failure.error) == ("backward", 3, True)


def test_a_training_in_another_thread_after_the_first_has_ended_is_recorded(collector):
    steps, told = edges(collector, "threads")
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)


def test_under_ddp_data_and_evaluations_are_told_apart(collector):
    steps, told = edges(collector, "under_ddp", *start_ranks.command(1))
    assert collector.of(Hello)[-1].backend == "gloo"
    loading, evaluated = steps[:8], steps[8]
    assert [step.loss for step in steps] == pytest.approx(told, rel=1e-5)
    assert all(host_us(step, "data") - step.fetch_us >= 30_000 for step in loading[1:])
    assert host_us(evaluated, "eval") >= 120_000
    assert host_us(evaluated, "idle") >= 1_200_000
    assert [(step.samples, step.micro_steps) for step in steps[8:]] == [(8, 1)] * 4


def test_what_comes_after_the_last_step_is_recorded_and_is_no_step(collector):
    collector.start(BIN / "python", SCRIPTS / "tail_loop.py").finish()
    assert collector.job.returncode == 0, collector.output()
    (closing,) = collector.of(Closing)
    assert [step.step for step in collector.of(Step)] == list(range(1, 11))
    hello = collector.of(Hello)[-1]
    assert (hello.framework, hello.model) == ("pytorch", "Linear")
    assert hello.parameters == hello.trainable_parameters > 0
    phases = {phase.name: phase for phase in closing.phases}
    assert (closing.step, phases.keys() - {"data"}) == (10, {"eval", "checkpoint"})
    evaluation = phases["eval"].resident
    assert evaluation.transient > 350 * 2**20
    assert evaluation.peak > max(phase.resident.peak for step in collector.of(Step) for phase in step.phases)
    assert [(goodbye.reason, goodbye.step) for goodbye in collector.of(Goodbye)] == [("finished", 10)]


def test_a_process_that_leaves_by_os_exit_has_reported_all_its_steps_and_its_status(collector):
    collector.start(BIN / "python", SCRIPTS / "tail_loop.py", "no-tail", "os._exit").finish()
    assert collector.job.returncode == 3, collector.output()
    assert [step.step for step in collector.of(Step)] == list(range(1, 11))
    assert [(g.reason, g.text, g.step) for g in collector.of(Goodbye)] == [("failed", "os._exit(3)", 10)]


@pytest.mark.parametrize(
    ("words", "status"), [(("caught",), 4), (("caught", "at-once"), 4), (("in-a-process",), 1), (("swallowed",), 0)]
)
def test_a_script_that_ends_itself_for_an_exception_reports_the_exception(collector, words, status):
    collector.start(BIN / "python", SCRIPTS / "tail_loop.py", "no-tail", *words).finish()
    assert collector.job.returncode == status, collector.output()
    told = "KeyError: 'labels'" if status else ""
    assert [(g.reason, g.text) for g in collector.of(Goodbye)] == [("failed" if status else "finished", told)]
    assert [failure.error for failure in collector.of(Failure)] == ([told] if status else [])
    assert all("in fail" in failure.traceback for failure in collector.of(Failure))


def assert_owned(collector, owner):
    """Every step is an update of its owner, with the losses of the others since the step before."""
    expected, since = [], {}
    for name, loss in printed(collector, "losses"):
        since[name] = loss
        if name == owner:
            expected.append(since)
            since = {}
    steps = collector.of(Step)
    assert [step.step for step in steps] == list(range(1, len(expected) + 1))
    assert [step.loss for step in steps] == pytest.approx([losses[owner] for losses in expected], rel=1e-5)
    for step, losses in zip(steps, expected, strict=True):
        told = {update.name: update.loss for update in step.updates}
        assert told == pytest.approx(losses if len(losses) > 1 else {}, rel=1e-5)


@pytest.mark.parametrize("kind", ["alternating", "every-third", "by-turns", "inner-loop"])
def test_a_step_of_several_optimizers_is_an_update_of_the_first_with_the_loss_of_each(collector, kind):
    collector.start(BIN / "python", SCRIPTS / "gan_loop.py", kind).finish()
    assert collector.job.returncode == 0, collector.output()
    assert_owned(collector, "SGD")
    critic = next(update for step in collector.of(Step) for update in step.updates if update.name == "SGD")
    assert (critic.count, critic.micro_steps, critic.lr) == (1, 2, 0.02)


def test_two_engines_and_a_bare_optimizer_make_one_step(collector):
    collector.start(*start_ranks.command(1, SCRIPTS / "two_engines.py")).finish()
    assert collector.job.returncode == 0, collector.output()
    assert_owned(collector, "Critic")
    assert {hello.model for hello in collector.of(Hello)} >= {"Critic + Actor"}


def test_a_module_called_past_its_engine_and_a_pipeline_s_first_stage_have_all_samples(collector):
    collector.start(*start_ranks.command(2, SCRIPTS / "engine_calls.py")).finish()
    assert collector.job.returncode == 0, collector.output()
    for rank in (0, 1):
        steps = collector.of(Step, rank)
        assert [step.samples for step in steps[1:5]] == [4] * 4
        assert_disjoint(steps)
        assert all(host_us(step, "forward") > 250_000 for step in steps[1:5])
        assert host_us(steps[5], "eval") > 50_000
    pipeline = collector.of(Step, 0)[6:]
    assert [(step.samples, step.tokens) for step in pipeline] == [(16, 256)] * 4


def test_fsdp2_shows_its_framework_model_and_backend_with_all_parameters_of_all_shards_and_adds_up_losses(collector):
    collector.start(*start_ranks.command(2, SCRIPTS / "fsdp2_loop.py")).finish()
    assert collector.job.returncode == 0, collector.output()
    for rank in (0, 1):
        hello = collector.of(Hello, rank)[-1]
        assert (hello.framework, hello.model, hello.backend) == ("fsdp", "TinyNet", "gloo")
        assert (hello.parameters, hello.trainable_parameters) == (3 * 72, 2 * 72)
        assert [step.step for step in collector.of(Step, rank)] == [1, 2, 3, 4]
        norms = [step.grad_norm for step in collector.of(Step, rank)]
        assert norms == pytest.approx(printed(collector, "norms", rank), rel=1e-5)
        losses = [step.loss for step in collector.of(Step, rank)]
        assert losses == pytest.approx(printed(collector, "optimised", rank), rel=1e-5)


def test_a_pipeline_s_parameters_are_those_of_all_its_stages(collector):
    collector.start(*start_ranks.command(2, SCRIPTS / "pipeline_loop.py")).finish()
    assert collector.job.returncode == 0, collector.output()
    hellos = [collector.of(Hello, rank)[-1] for rank in (0, 1)]
    assert [(hello.pipeline_stage, hello.parameters, hello.backend) for hello in hellos] == [
        (0, 8 * 16 + 16, "gloo"),
        (1, 16 + 1, "gloo"),
    ]
    assert [step.loss for step in collector.of(Step, 1)] == pytest.approx(printed(collector, "optimised", 1), rel=1e-5)
    assert [step.loss for step in collector.of(Step, 0)] == [None] * 6
    run = RunModel()
    for number, hello in enumerate(hellos, 1):
        run.apply(Frame(number, hello.time, hello))
    assert run.info.parameters == run.info.trainable_parameters == 161


def test_a_trainer_with_a_peft_model_shows_the_model_inside_and_the_loss_that_it_logs(collector, tmp_path):
    collector.start(BIN / "python", SCRIPTS / "trainer_lora.py", tmp_path / "out").finish()
    assert collector.job.returncode == 0, collector.output()
    losses, total, trained = printed(collector, "logged")
    hello = collector.of(Hello)[-1]
    assert (hello.framework, hello.model) == ("transformers", "GPT2LMHeadModel")
    assert (hello.parameters, hello.trainable_parameters) == (total, trained)
    assert [step.loss for step in collector.of(Step)] == pytest.approx(losses, abs=1e-4)  # logged with four digits
