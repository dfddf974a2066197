"""Faults that raise no error, in real trainings: the signs of each step, and the alerts."""

import json

from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.nonfinite import NonFinite
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.analysis.learning.inputs import Copies, Inputs
from ftmon.protocol.analysis.learning.updates import Updates
from ftmon.protocol.messages.telemetry import Goodbye, Hello, LostEdit, Signs, Step
from msgspec.structs import replace
from probe_collector import alone


def test_each_fault_of_a_plain_loop_has_its_signs_and_a_sound_training_has_none(collector):
    run = collector.run.read_run()
    collector.run.write_run(replace(run, options=replace(run.options, probe_budget=0.0)))  # each step is sampled
    collector.fork("silent_faults.py").finish()
    assert collector.job.returncode == 0, collector.output()
    line = next(line for line in collector.run.rank_log(0, "out").read_text().splitlines() if line.startswith("begun "))
    begun = json.loads(line.removeprefix("begun "))
    steps = collector.of(Step)
    parts = {kind: steps[first - 1 : first + 5] for kind, first in begun.items()}
    signs = {kind: [step.signs or Signs() for step in part] for kind, part in parts.items()}
    assert {len(part) for part in parts.values()} == {6}
    assert len({step.batch_id for step in parts["fine"]}) == 6
    assert [step.batch_id for step in parts["fine"]] == [step.batch_id for step in parts["evaluation"]], "the same data"

    assert [(one.mixed_by, one.mixed) for one in signs["packed, mask"]] == [("mask", 1)] * 6
    assert [(one.mixed_by, one.mixed) for one in signs["packed, cache"]] == [("cache", 1)] * 6
    assert [(one.mixed_by, one.mixed) for one in signs["packed, encoder"]] == [("encoder", 1)] * 6
    assert all(not one.mixed for kind in ("fine", "packed, right", "no end") for one in signs[kind])
    # Of each row the end of the first document, and that of the second.
    assert {(one.ends, one.learned_ends) for one in signs["fine"]} == {(4, 4)}
    assert {(one.ends, one.learned_ends) for one in signs["no end"]} == {(4, 0)}
    assert [(one.unlabelled, one.labelled) for one in signs["no labels"]] == [(1, 1)] * 6
    # Without a DataLoader, or with one that gives no tensors: what the model's forward receives, once a micro-batch.
    assert {(one.ends, one.learned_ends, one.unlabelled) for one in signs["plain, fine"]} == {(4, 4, 0)}
    assert [(one.unlabelled, one.labelled) for one in signs["plain, no labels"]] == [(1, 1)] * 6
    for kind in ("later, no end", "by hand, no end"):
        assert {(one.ends, one.learned_ends) for one in signs[kind]} == {(4, 0)}
    assert [(one.unlabelled, one.labelled) for one in signs["by hand, no labels"]] == [(1, 1)] * 6
    assert all(one.evaluating == (kind == "evaluation") for kind in signs for one in signs[kind])
    expected = {("a part", "model")}
    assert {(kind, one.evaluating_part) for kind in signs for one in signs[kind] if one.evaluating_part} == expected
    assert [one.weights for one in signs["frozen"]][1:] == ["same"] * 5
    assert [(one.weights, one.no_gradients) for one in signs["another model"]][1:] == [("same", True)] * 5
    assert not any(one.no_gradients for kind in signs for one in signs[kind] if kind != "another model")
    assert all(one.weights == "" for kind in ("fine", "packed, mask", "evaluation") for one in signs[kind])
    assert [one.weights for one in signs["backward"]] == [""] * 5 + ["nan"]

    assert [one.weights_lost for one in signs["backward, elsewhere"]] == [False] * 5 + [True]
    lost = [found for detector in [Updates()] for step in parts["backward, elsewhere"] for found in detector.step(step)]
    (first,) = (found for found in lost if found.state == "raised")
    at = begun["backward, elsewhere"] + 4
    assert (first.kind, first.step) == ("weights_not_finite", at)
    assert words_of(first).title == f"weights are not finite since the update of step {at}, or one before: the backward"

    shifts = ("not shifted", "shifted twice", "plain, not shifted")
    looked_at = [each for kind in shifts for one in signs[kind] if (each := one.shifted)]
    assert looked_at == ["never"] * 4 + ["twice"] * 4 + ["never"] * 4
    assert not any(one.shifted for kind in signs for one in signs[kind] if kind not in shifts)

    told = [found for detector in (Inputs(), Updates()) for step in steps for found in detector.step(step)]
    firsts = {found.kind: found.step for found in reversed(told) if found.state == "raised"}
    assert firsts == {
        "mixed_documents": begun["packed, mask"],
        "no_labels": begun["plain, no labels"],
        "evaluation_mode": begun["evaluation"],
        "weights_not_finite": begun["backward"] + 5,
        "weights_unchanged": begun["another model"] + 1,  # the first has none to be compared with
        "clipping": begun["clipped"],
    }


def test_lost_gradients_are_told_at_the_step_they_ruined_and_the_same_batches_on_all_ranks(collector):
    collector.fork("lost_gradients.py", ranks=2).finish()
    assert collector.job.returncode == 0, collector.output()
    updates, losses, copies, told = Updates(), NonFinite("loss"), Copies(), list[Finding]()
    for hello in collector.of(Hello):
        copies.hello(hello)
    for step in sorted(collector.of(Step), key=lambda step: step.step):
        assert step.grad_norm is None
        told += [*updates.step(step), *losses.step(step, ranks=(0, 1)), *copies.step(step)]
    same, one = (found for found in told if found.state == "raised")
    assert (same.kind, same.step, same.ranks) == ("same_batches", 1, (0, 1))
    assert (one.kind, one.step, one.severity) == ("weights_not_finite", 61, "error")


def test_edits_of_gathered_parameters_and_micro_batches_left_over_are_reported(collector):
    collector.fork("silent_deepspeed.py", **alone()).finish()
    assert collector.job.returncode == 0, collector.output()
    lost, overwritten = collector.of(LostEdit)
    assert (lost.parameters, lost.count, lost.overwritten, lost.step) == (["0.weight"], 1, False, 1)
    assert (overwritten.parameters, overwritten.overwritten) == (["1.weight"], True)
    assert overwritten.where.startswith("silent_deepspeed.py:")
    pending = [step.signs.pending if step.signs is not None else 0 for step in collector.of(Step)]
    assert pending == [0, 2, 0, 0]
    put_back = [step.step for step in collector.of(Step) if step.signs is not None and step.signs.overwritten]
    assert put_back == [overwritten.step + 1]
    assert [step.signs is not None and step.signs.unloaded for step in collector.of(Step)] == [True] + [False] * 3
    (goodbye,) = collector.of(Goodbye)
    assert goodbye.pending == 3
    (told,) = Updates().goodbye(goodbye)
    assert words_of(told).title == "3 micro-batches at the end were never applied"
