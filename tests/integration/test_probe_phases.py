"""Phases of loops that do not go data, forward, backward, optimizer: against what the scripts measure themselves."""

import json
from statistics import median

import pytest
from ftmon.protocol.messages.telemetry import Closing, Goodbye, Heartbeat, Hello, Step
from ftmon.trainer.probe.phases.budget import CHOICES, FIRST
from ftmon.tui.model.rank import shares
from ports import free_port
from probe_collector import Collector, alone


def printed(collector):
    """The lines of JSON of rank 0, one a step."""
    lines = collector.run.rank_log(0, "out").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"')]


def missing(step, own, name):
    """Return the seconds that the script measured in a phase and the probe neither counts there nor took itself."""
    return own[name] - (step.phase(name).host_us + step.probe_us) / 1e6


PLAIN = {"rollout_loop": 6, "trainer_lora": 3, "closure_loop": 18, "tail_loop": 10}
"""What one process trains, one after the other, and its steps."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The steps by what was trained, and the collector of the process."""
    with Collector(tmp_path_factory.mktemp("home")) as collector:
        collector.fork("one_after_another.py", *PLAIN).finish(280)
    return collector.parts(PLAIN), collector


def test_what_a_closure_runs_is_told_apart_from_the_update_that_calls_it(plain):
    steps, truth = plain[0]["closure_loop"], printed(plain[1])[6:]
    # A training of less than five seconds is counted on by the next one, and a slow host takes longer.
    last = plain[0]["trainer_lora"][-1].step
    for first in (0, 6, 12):
        assert steps[first].step in (1, last + 1)
        assert [step.step - steps[first].step for step in steps[first : first + 6]] == list(range(6))
        last = steps[first + 5].step
    assert [own["mode"] for own in truth] == ["lbfgs"] * 6 + ["sam"] * 6 + ["accumulate"] * 6
    for step, own in zip(steps, truth, strict=True):
        accumulates = own["mode"] == "accumulate"
        assert step.phase("backward").count == own["evaluations"]
        # A line search, or SAM's second pass, evaluates the same batch again: the loss is that before the update.
        expected = sum(own["losses"]) / 3 if accumulates else own["losses"][0]
        assert step.loss == pytest.approx(expected, rel=1e-5)
        assert (step.micro_steps, step.samples) == ((3, 192) if accumulates else (1, 64))
    # Each phase has all that the script spent in it, and no time is in two of them: so none has another's.
    for first, names in (
        (0, ("forward", "backward")),
        (6, ("forward", "backward", "optimizer")),
        (12, ("forward", "backward")),
    ):
        for name in names:
            pairs = list(zip(steps, truth, strict=True))[first + 1 : first + 6]
            assert median(missing(step, own, name) for step, own in pairs) < 0.003
        for step in steps[first + 1 : first + 6]:
            assert sum(phase.host_us for phase in step.phases) <= step.host_us + len(step.phases)
    assert steps[8].phase("optimizer").count == 2


def test_a_reference_s_forward_is_part_of_the_training_step_and_an_evaluation_is_one(collector):
    collector.fork("second_model.py", **alone()).finish()
    assert collector.job.returncode == 0, collector.output()
    steps, truth = collector.of(Step), printed(collector)
    assert [step.step for step in steps] == [*range(1, 9)] * 2
    hello = collector.of(Hello)[-1]
    assert (hello.framework, hello.deepspeed_config is not None) == ("ddp", True), "the first, and the second"
    for step, own in zip(steps, truth, strict=True):
        names = {phase.name for phase in step.phases}
        assert names >= {"data", "forward", "backward", "optimizer"}, own
        assert ("eval" in names) == (step.step == 4), own
        assert step.loss == pytest.approx(own["loss"], rel=1e-5)
        assert step.samples == 4
        if own["eval"]:
            # The fetches of the held-out batches are part of it; the first sleeps alone are 180 ms.
            assert missing(step, own, "eval") <= 0.05, own
    for first in (0, 8):
        pairs = list(zip(steps, truth, strict=True))[first : first + 8]
        assert median(missing(step, own, "forward") for step, own in pairs) < 0.003
    # In step 7 the policy is in evaluation mode without gradients for 30 ms, decided by its next forward alone.
    assert not [beat for beat in collector.of(Heartbeat) if beat.phase == "eval" and beat.step not in (4, 7)]


def test_lightning_s_closure_and_ddp_wrapper_hide_no_phase_and_no_loss(collector):
    collector.fork("lightning_loop.py", MASTER_PORT=str(free_port())).finish(280)
    assert collector.job.returncode == 0, collector.output()
    steps, truth = collector.of(Step), printed(collector)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert len(truth) == 4
    assert collector.of(Hello)[-1].framework == "ddp"
    for step, own in zip(steps, truth, strict=True):
        assert step.micro_steps == step.phase("backward").count == step.phase("forward").count == 2
        assert step.loss == pytest.approx(sum(own["losses"]) / 2, rel=1e-5)
        # Validation before the first and the third step; DDP's own flag stays in evaluation mode after it.
        assert (step.phase("eval") is not None) == (step.step in (1, 3))
        assert step.phase("optimizer").host_us / 1e6 <= step.host_us / 1e6 - own["forward"]
    for name in ("forward", "optimizer"):
        assert median(missing(step, own, name) for step, own in zip(steps, truth, strict=True)) < 0.003


def test_a_rollout_is_a_phase_and_start_up_and_what_comes_after_the_last_step_are_in_no_step(plain):
    steps, truth = plain[0]["rollout_loop"], printed(plain[1])[:6]
    assert [step.step for step in steps] == list(range(1, 7))
    for step, own in zip(steps, truth, strict=True):
        assert {"generate", "forward", "backward", "optimizer"} <= {phase.name for phase in step.phases}
        assert step.phase("generate").host_us / 1e6 <= own["generate"] + 0.002
        assert step.loss == pytest.approx(own["loss"], rel=1e-4, abs=1e-6)
    found = shares(steps)
    own_ms = [own["step"] * 1000 for own in truth]
    assert found.step_ms == pytest.approx(sum(step.host_us for step in steps) / 6000)
    assert found.step_ms < sum(own_ms) / 6 + 750  # start-up took more than 5,000 ms
    generated = sum(step.phase("generate").host_us for step in steps) / sum(step.host_us for step in steps)
    assert found.parts["generate"] == pytest.approx(generated, abs=0.01)
    assert "init" in {beat.phase for beat in plain[1].of(Heartbeat)}
    found, collector = plain
    (closing,) = collector.of(Closing)
    last = found["tail_loop"][-1].step
    assert last in (10, found["closure_loop"][-1].step + 10)
    hello = collector.of(Hello)[-1]
    assert (hello.framework, hello.model) == ("pytorch", "Linear")
    assert hello.parameters == hello.trainable_parameters > 0
    phases = {phase.name: phase for phase in closing.phases}
    assert (closing.step, phases.keys() - {"data"}) == (last, {"eval", "checkpoint"})
    evaluation = phases["eval"].resident
    assert evaluation.transient > 350 * 2**20
    assert evaluation.peak > max(phase.resident.peak for step in collector.of(Step) for phase in step.phases)
    assert [(goodbye.reason, goodbye.step) for goodbye in collector.of(Goodbye)] == [("finished", last)]


def test_a_trainer_with_a_peft_model_shows_the_model_inside_and_the_loss_that_it_logs(plain):
    found, collector = plain
    lines = collector.run.rank_log(0, "out").read_text().splitlines()
    losses, total, trained = next(json.loads(line.removeprefix("logged ")) for line in lines if "logged" in line)
    hello = [hello for hello in collector.of(Hello) if hello.framework == "transformers"][-1]
    assert (hello.framework, hello.model) == ("transformers", "GPT2LMHeadModel")
    assert (hello.parameters, hello.trainable_parameters) == (total, trained)
    steps = found["trainer_lora"]
    assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-4)  # logged with four digits
    seen = [(step.step, step.micro_steps, step.samples, step.tokens) for step in steps]
    assert seen == [(number, 2, 4, 32) for number in (1, 2, 3)]
    assert steps[1].phase("forward").count == 2


def test_short_steps_read_memory_by_phase_now_and_then_and_tell_all_else_as_before(collector):
    collector.fork("deepspeed_loop.py", STEPS="200", **alone()).finish(280)
    assert collector.job.returncode == 0, collector.output()
    steps = collector.of(Step)
    lines = collector.run.rank_log(0, "out").read_text().splitlines()
    losses = [float(line.split()[1]) for line in lines if line.startswith("loss")]
    assert [step.step for step in steps] == list(range(1, 201))
    assert not any(phase.coarse for step in steps[:FIRST] for phase in step.phases)
    later = steps[FIRST + 20 :]
    assert later[-1].memory_every == CHOICES[-1], "a millisecond's step has no time for it"
    coarse = [step for step in later if step.phase("forward").coarse]
    assert len(coarse) > len(later) * 0.6
    for number, step in enumerate(steps):
        assert step.loss == pytest.approx(sum(losses[2 * number : 2 * number + 2]) / 2, rel=1e-5)
        assert (step.micro_steps, step.samples, step.tokens, step.padded_tokens) == (2, 4, 24, 32)
        assert {name: step.phase(name).count for name in ("forward", "backward")} == {"forward": 2, "backward": 2}
    for step in coarse:
        assert not step.phase("optimizer").coarse
        assert step.phase("forward").resident == step.phase("backward").resident, "of one stretch"
        assert step.phase("backward").resident.end == step.phase("optimizer").resident.start
