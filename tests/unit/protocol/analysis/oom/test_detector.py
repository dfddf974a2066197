"""Why an allocation failed: each cause is told from its own numbers, and nothing is claimed that they do not say."""

from typing import get_args

import msgspec
import pytest
from failed_allocations import GIB, HELLO, MIB, OOMS, PROCESSES, of
from ftmon.protocol.analysis.oom.detector import ALONE, OomContext, judge, logits_bytes, steady_growth
from ftmon.protocol.analysis.oom.words import explain
from ftmon.protocol.analysis.remedies import remedies
from ftmon.protocol.messages.memory import OomKind, OomVerdict, Remedy
from ftmon.protocol.messages.telemetry import Oom, ProcessMemory
from hypothesis import given


def kind(oom: Oom, around: OomContext = OomContext(HELLO)) -> OomKind:  # noqa: B008
    return judge(oom, around).kind


def tried(oom: Oom, around: OomContext = ALONE) -> list[Remedy]:
    """Return the remedies; they follow from the verdict's kind, not from its words."""
    return remedies(oom, OomVerdict(judge(oom, around).kind, "", ""), around)


def test_enough_that_lies_in_pieces_is_fragmentation_and_expandable_segments_fix_it():
    oom = of(allocated_bytes=65 * GIB, usable_free_bytes=12 * GIB, reserved_free_bytes=12 * GIB, free_blocks=900)
    verdict = judge(oom, OomContext(HELLO))
    assert (verdict.kind, verdict.sure) == ("fragmentation", True)
    assert (verdict.figures["fragmented"], verdict.short_bytes, verdict.also) == (12 * GIB, GIB, [])
    first = tried(oom, OomContext(HELLO))[0]
    assert (first.kind, first.frees_bytes) == ("expandable_segments", 12 * GIB - 64 * MIB)
    assert kind(msgspec.structs.replace(oom, largest_free_bytes=3 * GIB)) != "fragmentation"
    expandable = msgspec.structs.replace(oom, expandable=True)
    assert "expandable_segments" not in [remedy.kind for remedy in tried(expandable)]


def test_a_batch_longer_than_any_before_is_told_and_a_model_that_fills_the_device_is_too_large():
    oom = of(batch_shape=[4, 8192], parts={"activations": 50 * GIB, "parameters": 27 * GIB})
    verdict = judge(oom, OomContext(HELLO))
    assert (verdict.kind, verdict.sure, verdict.figures["excess"]) == ("longer_batch", True, 3 * GIB)
    found = {remedy.kind: remedy for remedy in tried(oom, OomContext(HELLO))}
    assert (next(iter(found)), found["micro_batch"].frees_bytes) == ("sequence", 25 * GIB)
    assert (found["checkpointing"].frees_bytes, found["checkpointing"].bound) == (50 * GIB, "at most")
    oom = of(
        parts={"parameters": 20 * GIB, "gradients": 20 * GIB, "optimizer_states": 35 * GIB, "activations": 2 * GIB}
    )
    assert kind(oom) == "too_large"
    first = tried(oom, OomContext(HELLO))[0]
    assert (first.kind, first.setting) == ("zero", "zero_optimization.stage: 2")
    assert first.frees_bytes == 15 * GIB  # the gradients, three quarters of them


@pytest.mark.parametrize("width", [2, 4])
def test_a_request_of_the_size_of_the_logits_is_for_them(width):
    size = 4 * 2048 * 152_064 * width
    oom = of(requested_bytes=-(-size // (2 * MIB)) * 2 * MIB, vocabulary=152_064)
    verdict = judge(oom, OomContext(HELLO))
    assert (verdict.kind, verdict.sure, verdict.figures["logits"]) == ("logits", True, 4 * 2048 * 152_064 * 4)
    first = tried(oom)[0]
    assert (first.kind, first.frees_bytes) == ("chunked_loss", 4 * 2048 * 152_064 * 4)


def test_the_first_optimizer_step_creates_states_later_ones_temporaries_and_foreach_ones_a_parameter_each():
    stack = ["train.py:80 main", "optim/adamw.py:200 step", "optim/adamw.py:140 _init_group"]
    oom = of(phase="optimizer", steps_done=0, stack=stack, stack_of="failing", trainable=10**9, optimizer_class="AdamW")
    verdict = judge(oom, OomContext(HELLO))
    assert (verdict.kind, verdict.sure) == ("optimizer_states", True)
    assert "to_come" not in verdict.figures, "the states made so far are not known"
    found = {remedy.kind: remedy.frees_bytes for remedy in tried(oom, OomContext(HELLO))}
    assert (found["offload"], found["eight_bit"]) == (8 * 10**9, 6 * 10**9)
    later = of(phase="optimizer", stack=[*stack[:2], "optim/adamw.py:500 _multi_tensor_adamw"], stack_of="failing")
    assert kind(later) == "optimizer_temporaries"
    oom = of(phase="optimizer", optimizer_class="AdamW", optimizer_implementation="foreach", parameter_bytes=7 * GIB)
    first = tried(oom, OomContext(HELLO))[0]
    assert (kind(oom), first.kind, first.frees_bytes) == ("optimizer_temporaries", "fused", 7 * GIB)
    fused = msgspec.structs.replace(oom, optimizer_implementation="fused")
    assert "fused" not in [remedy.kind for remedy in tried(fused)]


def test_steps_that_begin_with_ever_more_are_a_leak_and_growth_at_once_or_that_falls_back_is_none():
    starts = [20 * GIB, 30 * GIB, *(30 * GIB + step * 200 * MIB for step in range(60))]
    listed = OomContext(HELLO, [ProcessMemory(HELLO.pid, 78 * GIB, HELLO.rank)])
    verdict = judge(of(starts=starts), listed)
    assert (verdict.kind, verdict.sure, "outside" in verdict.figures) == ("leak", False, True)
    assert steady_growth([10, 20, 30, 30, 30, 30, 30, 30, 30, 30, 30, 90]) is None
    assert steady_growth([10, 20, *[30, 40] * 8]) is None
    assert steady_growth([0, 50, *range(50, 60)]) == 9


@pytest.mark.parametrize("cause", get_args(OomKind))
def test_a_run_sharded_by_pytorch_gets_no_options_of_deepspeed(cause):
    around = OomContext(msgspec.structs.replace(HELLO, framework="fsdp", zero_stage=None))
    for remedy in remedies(of(phase="backward"), OomVerdict(cause, "", ""), around):
        assert "zero" not in (remedy.text + remedy.setting).lower()
        assert "stage3" not in remedy.setting


def test_memory_of_another_process_is_told_only_where_the_rank_itself_is_listed():
    other = ProcessMemory(77, 40 * GIB, None, "python")
    oom = of(allocated_bytes=37 * GIB, reserved_bytes=37 * GIB, peak_bytes=37 * GIB)
    listed = OomContext(HELLO, [other, ProcessMemory(11, 38 * GIB, 0)])
    verdict = judge(oom, listed)
    assert (verdict.kind, verdict.figures["others"]) == ("other_process", 40 * GIB)
    first = tried(oom, listed)[0]
    assert (first.kind, first.frees_bytes) == ("processes", 40 * GIB)
    unlisted = judge(oom, OomContext(HELLO, [other]))
    assert (unlisted.kind, unlisted.sure) == ("outside", False)
    assert unlisted.figures.keys() & {"others", "outside", "elsewhere"} == {"elsewhere"}
    assert unlisted.figures["elsewhere"] == 42 * GIB


def test_a_limit_on_the_process_is_named_with_what_lies_beyond_it_and_what_others_hold_is_not_why():
    limit = "torch.cuda.set_per_process_memory_fraction allows 20.00 GiB"
    oom = of(phase="idle", device_free_bytes=58 * GIB, device_total_bytes=20 * GIB, room_bytes=0, limit=limit,
             allocated_bytes=19 * GIB, reserved_bytes=20 * GIB, starts=[], peak_bytes=0)  # fmt: skip
    verdict = judge(oom, OomContext(HELLO))
    assert (verdict.kind, verdict.sure, verdict.short_bytes) == ("limit", True, 2 * GIB)
    assert tried(oom)[0].frees_bytes == 58 * GIB
    longer = msgspec.structs.replace(oom, phase="backward", batch_shape=[4, 9000], peak_bytes=15 * GIB)
    assert (kind(longer), tried(longer)[-1].kind) == ("longer_batch", "limit")
    # Two ranks of other jobs on an H200 with 107 GiB free; this one may take 12.
    around = OomContext(HELLO, [ProcessMemory(11, 12 * GIB, 0), ProcessMemory(99, 21 * GIB, None)])
    oom = of(phase="backward", device_total_bytes=12 * GIB, capacity_bytes=140 * GIB, device_free_bytes=107 * GIB,
             room_bytes=GIB, allocated_bytes=10 * GIB, reserved_bytes=11 * GIB, requested_bytes=5 * GIB, starts=[],
             peak_bytes=0, limit="torch.cuda.set_per_process_memory_fraction allows 12.00 GiB")  # fmt: skip
    assert kind(oom, around) == "activations"
    assert kind(msgspec.structs.replace(oom, limit="", device_free_bytes=GIB), around) == "other_process"


def test_certainty_of_a_limit_of_the_host_of_too_large_a_request_and_without_numbers():
    host = of(measure="glibc", device_free_bytes=15 * GIB, room_bytes=15 * GIB, limit="RLIMIT_AS is 9 GiB")
    assert (judge(host).kind, judge(host).sure) == ("limit", True)
    assert kind(msgspec.structs.replace(host, device_free_bytes=GIB, limit="", phase="")) == "unknown"
    assert [remedy.kind for remedy in tried(of(requested_bytes=160 * GIB))] == ["request"]
    none = judge(Oom(0, 1, "", 0.0, 0, 0, 0, 0, 0))
    assert (none.also, none.figures, none.short_bytes) == ([], {}, 0)


@given(OOMS, PROCESSES)
def test_any_numbers_have_a_verdict_and_no_remedy_frees_less_than_nothing(oom, processes):
    around = OomContext(HELLO, processes)
    verdict, said = judge(oom, around), explain(oom, around)
    assert (said.kind, said.sure, said.short_bytes) == (verdict.kind, verdict.sure, verdict.short_bytes)
    assert said.title
    assert said.text
    assert said.evidence
    assert 0 <= verdict.short_bytes <= oom.requested_bytes
    assert verdict.kind not in verdict.also
    assert all(size > 0 for size in verdict.figures.values())
    found = tried(oom, around)
    assert found
    assert all(remedy.frees_bytes >= 0 and bool(remedy.bound) == bool(remedy.frees_bytes) for remedy in found)
    size = logits_bytes(oom)
    assert size == 0 or abs(oom.requested_bytes - size) <= 2 * MIB or abs(oom.requested_bytes - size // 2) <= 2 * MIB
    if verdict.kind == "fragmentation":
        assert max(oom.usable_free_bytes, oom.reserved_bytes - oom.allocated_bytes) + oom.room_bytes > 0


def test_little_free_memory_in_pieces_is_not_why_a_first_optimizer_step_fails():
    """Of 201 states 73 were made: gigabytes more were to come, and 99.5 % of reserved memory was allocated."""
    stack = ["train.py:9 main", "stage_1_and_2.py:600 initialize_optimizer_states"]
    oom = of(phase="optimizer", steps_done=1, stack=stack, stack_of="failing", requested_bytes=64 * MIB,
             device_free_bytes=10 * MIB, room_bytes=10 * MIB, allocated_bytes=int(77.1 * GIB),
             reserved_bytes=int(77.5 * GIB), usable_free_bytes=128 * MIB, largest_free_bytes=32 * MIB)  # fmt: skip
    verdict = judge(oom, OomContext(HELLO))
    assert (verdict.kind, verdict.sure, verdict.also) == ("optimizer_states", True, [])
    assert tried(oom, OomContext(HELLO))[0].kind != "expandable_segments"
    assert "fragmentation" not in explain(oom, OomContext(HELLO)).text


@pytest.mark.parametrize(("made", "expected"), [(3 * GIB, "optimizer_states"), (14 * GIB, "fragmentation")])
def test_fragmentation_of_a_first_optimizer_step_needs_that_its_other_states_would_have_fitted(made, expected):
    """Two billion numbers under Adam with fp32 masters: 16 GB of states, and 6 GiB free in pieces."""
    stack = ["train.py:9 main", "adamw.py:150 _init_group"]
    oom = of(phase="optimizer", steps_done=0, stack=stack, stack_of="failing", allocated_bytes=71 * GIB,
             usable_free_bytes=6 * GIB, reserved_free_bytes=6 * GIB, trainable=2_000_000_000,
             optimizer_class="AdamW", optimizer_implementation="foreach",
             parts={"optimizer_states": made, "master_copies": 7 * GIB})  # fmt: skip
    verdict = judge(oom, OomContext(HELLO))
    assert (verdict.kind, verdict.figures["to_come"]) == (expected, 16_000_000_000 - made)
    missing = "of them were still missing." in explain(oom, OomContext(HELLO)).text
    assert missing == (expected == "optimizer_states"), "reported where they are the cause"
