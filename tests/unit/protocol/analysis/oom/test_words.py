"""Failed allocations in words: why each failed, by which figures, and what to try."""

from typing import NamedTuple, get_args

import pytest
from failed_allocations import GIB, HELLO, MIB, of
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.oom.detector import ALONE, OomContext
from ftmon.protocol.analysis.oom.words import explain
from ftmon.protocol.analysis.remedies import remedies
from ftmon.protocol.analysis.words import Words
from ftmon.protocol.messages.memory import OomKind, OomReport, OomVerdict, Remedy
from ftmon.protocol.messages.telemetry import Oom, ProcessMemory

KNOWN = OomContext(HELLO)
LIMIT = "torch.cuda.set_per_process_memory_fraction allows 20.00 GiB"
LIMITED = {
    "device_free_bytes": 58 * GIB, "device_total_bytes": 20 * GIB, "room_bytes": 0, "limit": LIMIT,
    "allocated_bytes": 19 * GIB, "reserved_bytes": 20 * GIB,
}  # fmt: skip
LOGITS = 4 * 2048 * 152_064 * 4
STATES = ["train.py:80 main", "optim/adamw.py:200 step", "optim/adamw.py:140 _init_group"]
BUCKET = ["engine.py:2000 backward", "stage_1_and_2.py:1000 average_tensor"]
LOSS = ["train.py:9 main", "functional.py:3504 cross_entropy"]
OTHER = ProcessMemory(77, 40 * GIB, None, "python")


class Case(NamedTuple):
    """A failed allocation, its verdict, and that in words."""

    kind: OomKind
    oom: Oom
    text: str
    around: OomContext = KNOWN
    sure: bool = True


def half_full(**fields: object) -> Oom:
    return of(allocated_bytes=37 * GIB, reserved_bytes=37 * GIB, peak_bytes=37 * GIB, **fields)


TITLES: dict[OomKind, str] = {
    "fragmentation": "fragmentation: enough was free, but not in one piece",
    "limit": "a limit on this process, not a full device",
    "longer_batch": "activations of a longer or larger batch than any before",
    "activations": "activations",
    "logits": "logits and loss",
    "optimizer_states": "the optimizer's states, created in its first step",
    "optimizer_temporaries": "temporaries of the optimizer step",
    "buckets": "communication and reduction buckets",
    "leak": "a leak: allocated memory grows from step to step",
    "checkpoint": "gathering a checkpoint",
    "outside": "memory outside of PyTorch's allocator",
    "other_process": "another process holds memory of this device",
    "too_large": "simply too large",
    "unknown": "cannot tell why",
}
CASES = [
    Case(
        "fragmentation",
        of(allocated_bytes=65 * GIB, usable_free_bytes=12 * GIB, reserved_free_bytes=12 * GIB, free_blocks=900),
        "2.00 GiB was requested and 12.00 GiB of reserved memory was free for it, but the largest piece was 64.0 MiB, "
        "and the device had 1.00 GiB more.",
    ),
    Case(
        "fragmentation",
        of(allocated_bytes=65 * GIB, reserved_free_bytes=0, free_blocks=0, largest_free_bytes=0, usable_free_bytes=0),
        "2.00 GiB was requested, and 12.50 GiB was reserved but not allocated: enough, if it were in one piece.",
    ),
    Case(
        "limit",
        of(phase="idle", starts=[], peak_bytes=0, **LIMITED),
        f"2.00 GiB was requested while the device had 58.00 GiB free. A limit refused it: {LIMIT}.",
    ),
    Case(
        "limit",
        of(measure="glibc", device_free_bytes=15 * GIB, room_bytes=15 * GIB),
        "2.00 GiB was requested while the host had 15.00 GiB free. A limit refused it; such as ulimit -v, a control "
        "group or vm.overcommit_memory.",
        *(ALONE, False),
    ),
    Case(
        "longer_batch",
        of(batch_shape=[4, 8192], parts={"activations": 50 * GIB, "parameters": 27 * GIB}),
        "The batch of 4 x 8192 is larger than any of the 200 steps before: the largest was 4 x 2048 in step 17. With "
        "this request 3.00 GiB more than the highest peak so far would have been allocated.",
    ),
    Case(
        "activations",
        of(parts={"activations": 45 * GIB, "parameters": 32 * GIB}),
        "Activations saved for the backward pass held 45.00 GiB of 77.00 GiB. The batch (4 x 2048) is no larger than "
        "those before; the phase needs more than was left.",
    ),
    Case(
        "activations",
        of(steps_done=0, batch_shape=[], largest_shape=[]),
        "The batch (shape not known) is the first of this process; the phase needs more than was left.",
        sure=False,
    ),
    Case(
        "logits",
        of(requested_bytes=-(-LOGITS // (2 * MIB)) * 2 * MIB, vocabulary=152_064),
        "It failed at the logits and the loss: 4 x 2048 x 152,064 vocabulary entries, 4.64 GiB in fp32; forward and "
        "backward hold several copies of them.",
    ),
    Case(
        "logits",
        of(phase="forward", batch_shape=[], stack=LOSS, stack_of="failing"),
        "It failed at the logits and the loss; forward and backward hold several copies of them.",
    ),
    Case(
        "logits",
        of(phase="forward", batch_shape=[4, 4096], peak_bytes=0, stack=LOSS, stack_of="failing"),
        "It failed at the logits and the loss: 4 x 4096; forward and backward hold several copies of them. The batch "
        "is larger than any before (4 x 2048).",
    ),
    Case(
        "optimizer_states",
        of(phase="optimizer", steps_done=0, stack=STATES, stack_of="failing", trainable=10**9, optimizer_class="AdamW"),
        "The first optimizer step creates its states, which stay allocated. Adam keeps two numbers for each of "
        "1,000,000,000 trainable parameters.",
    ),
    Case(
        "optimizer_states",
        of(phase="optimizer", steps_done=0, stack=STATES, stack_of="failing"),
        "The first optimizer step creates its states, which stay allocated. About 7.00 GiB of them were still missing.",
        KNOWN._replace(to_come=7 * GIB),
    ),
    Case(
        "optimizer_temporaries",
        of(phase="optimizer", optimizer="AdamW foreach", parameter_bytes=7 * GIB),
        "The optimizer step (AdamW foreach) needs memory for temporaries, which it frees at its end: up to one "
        "parameter-size, 7.00 GiB.",
        sure=False,
    ),
    Case(
        "optimizer_temporaries",
        of(phase="optimizer"),
        "The optimizer step needs memory for temporaries, which it frees at its end.",
        sure=False,
    ),
    Case(
        "buckets",
        of(stack=BUCKET, stack_of="failing"),
        "The allocation was for a buffer in which gradients or parameters are gathered for communication.",
    ),
    Case(
        "leak",
        of(starts=[20 * GIB, 30 * GIB, *(30 * GIB + step * 200 * MIB for step in range(60))]),
        "Memory at the start of a step has grown by 11.52 GiB in 198 steps, about 59.6 MiB a step. Without this growth "
        "the request would have fitted.",
        sure=False,
    ),
    Case(
        "checkpoint",
        of(phase="checkpoint"),
        "It failed while a checkpoint was saved: gathering weights or states takes additional memory.",
        sure=False,
    ),
    Case(
        "outside",
        of(requested_bytes=0, message="NCCL error: Cuda failure 2 'out of memory'\nmore"),
        "The driver refused memory outside PyTorch's allocator (NCCL, a library, pinned memory): NCCL error: Cuda "
        "failure 2 'out of memory'. PyTorch held 77.50 GiB.",
    ),
    Case(
        "outside",
        of(requested_bytes=0),
        "The driver refused memory outside PyTorch's allocator (NCCL, a library, pinned memory): no message. PyTorch "
        "held 77.50 GiB.",
    ),
    Case(
        "outside",
        half_full(),
        "42.00 GiB of the device is held by something outside this process's PyTorch (its CUDA context, NCCL, "
        "libraries, or other processes; the owner is not known); PyTorch itself held 37.00 GiB.",
        *(OomContext(HELLO, [OTHER]), False),
    ),
    Case(
        "other_process",
        half_full(),
        "Other processes hold 40.00 GiB of this device; without them the request would have fitted.",
        OomContext(HELLO, [OTHER, ProcessMemory(11, 38 * GIB, 0)]),
    ),
    Case(
        "too_large",
        of(requested_bytes=160 * GIB),
        "This single request, 160.00 GiB, is more than the whole device has.",
    ),
    Case(
        "too_large",
        of(parts={"parameters": 20 * GIB, "gradients": 20 * GIB, "optimizer_states": 35 * GIB, "activations": 2 * GIB}),
        "The memory that does not depend on the batch leaves too little: optimizer states 35.00 GiB, parameters 20.00 "
        "GiB, gradients 20.00 GiB.",
        sure=False,
    ),
    Case(
        "unknown", Oom(0, 1, "", 0.0, 0, 0, 0, 0, 0), "The available figures do not identify one cause.", ALONE, False
    ),
    Case(
        "outside",
        of(allocated_bytes=60 * GIB, reserved_bytes=60 * GIB, peak_bytes=60 * GIB),
        "19.00 GiB of the device is held by this process outside of PyTorch's allocator; PyTorch itself held 60.00 "
        "GiB.",
        OomContext(HELLO, [ProcessMemory(11, 79 * GIB, 0)]),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_a_verdict_in_words(case: Case) -> None:
    verdict = explain(case.oom, case.around)
    assert (verdict.kind, verdict.title, verdict.text) == (case.kind, TITLES[case.kind], case.text)
    assert verdict.sure == case.sure
    assert {case.kind for case in CASES} == set(get_args(OomKind))


def test_other_causes_and_a_limit_are_named_beside_a_verdict():
    pieces = {"usable_free_bytes": 12 * GIB, "reserved_free_bytes": 12 * GIB, "free_blocks": 900}
    verdict = explain(of(allocated_bytes=65 * GIB, batch_shape=[4, 8192], peak_bytes=60 * GIB, **pieces), KNOWN)
    assert verdict.kind == "fragmentation"
    assert verdict.text.endswith(
        " more. Without activations of a longer or larger batch than any before it would have fitted too."
    )
    verdict = explain(of(batch_shape=[4, 9000], peak_bytes=15 * GIB, **LIMITED), KNOWN)
    assert verdict.kind == "longer_batch"
    assert verdict.text.endswith(f" The process may use 20.00 GiB of the device's memory only ({LIMIT}).")
    unnamed = explain(of(phase="checkpoint", device_free_bytes=3 * GIB, room_bytes=0), KNOWN)
    assert unnamed.kind == "checkpoint"
    assert unnamed.text.endswith(
        " The device had 3.00 GiB free: a limit on this process, such as torch.cuda.set_per_process_memory_fraction "
        "sets, refused it."
    )


def test_the_figures_of_a_verdict_one_in_a_line() -> None:
    oom = half_full(parts={"activations": 30 * GIB, "unattributed": 7 * GIB}, parts_note="no stacks")
    processes = [OTHER, ProcessMemory(11, 38 * GIB, 0)]
    assert explain(oom, OomContext(HELLO, processes)).evidence == [
        "requested 2.00 GiB; 1.00 GiB of 80.00 GiB was free on the device",
        "37.00 GiB allocated of 37.00 GiB reserved",
        "0.50 GiB reserved but free in 40 pieces; for a request like this 0.50 GiB, at most 64.0 MiB in one",
        "allocated were: activations 30.00 GiB, not attributed 7.00 GiB (no stacks)",
        "batch 4 x 2048; largest before 4 x 2048",
        "highest peak of the 200 steps before: 37.00 GiB",
        "42.00 GiB of the device held outside of this PyTorch: 40.00 GiB by other processes, 1.00 GiB by this one "
        "(CUDA context, NCCL)",
    ]
    host = of(measure="glibc", limit="RLIMIT_AS is 9 GiB", free_blocks=0, batch_shape=[], peak_bytes=0)
    assert explain(host).evidence == [
        "requested 2.00 GiB; 1.00 GiB of 80.00 GiB was free on the host",
        "RLIMIT_AS is 9 GiB; it left 1.00 GiB",
        "77.00 GiB allocated of 77.50 GiB held by malloc",
    ]


def failed(oom: Oom, *tried: Remedy) -> Words:
    report = OomReport(oom.rank, oom.step, oom.phase, 1.0, oom, OomVerdict("leak", "a leak", "It grew."), list(tried))
    return kinds.words_of(Finding("oom", report, rank=oom.rank))


def test_a_failed_allocation_with_what_to_try_and_a_rank_that_is_held() -> None:
    oom = of(rank=1, held=True, hold_seconds=600.0, console=True, others="the other ranks wait")
    settings = Remedy("zero", "ZeRO stage 2.", "zero_optimization.stage: 2", 15 * GIB, "about")
    words = failed(oom, settings, *(Remedy(name, f"Try {name}.") for name in ("two", "three", "four")))
    assert words.title == "rank 1 out of memory in backward: wanted 2.00 GiB, 1.00 GiB free; a leak"
    assert words.text == (
        "Tried to allocate 2.00 GiB in step 201. Of 80.00 GiB the device has 1.00 GiB free; PyTorch holds 77.50 GiB: "
        "77.00 GiB allocated, 0.50 GiB reserved but unallocated. Batch shape [4, 2048]. It grew. To try, in this "
        "order: 1. ZeRO stage 2. (frees about 15.00 GiB) zero_optimization.stage: 2. 2. Try two. 3. Try three. The "
        "rank is held in the failing frame for 10 m 00 s at most: 'ftmon release' releases it, 'ftmon console' runs "
        "Python in that frame, 'ftmon kill' ends it. Meanwhile the other ranks wait."
    )


def test_a_failed_allocation_of_the_host_and_remedies_name_their_figures():
    words = failed(of(measure="glibc", phase="", batch_shape=[], held=True))
    assert words.title == "rank 0 out of memory: wanted 2.00 GiB, 1.00 GiB free; a leak"
    assert words.text == (
        "Tried to allocate 2.00 GiB in step 201. Of 80.00 GiB the host has 1.00 GiB free; this process holds 77.50 "
        "GiB: 77.00 GiB allocated, 0.50 GiB reserved but unallocated. It grew. The rank is held in the failing frame: "
        "'ftmon release' releases it, 'ftmon kill' ends it. Meanwhile the state of the other ranks is unknown."
    )

    def remedy(kind: str, oom: Oom, *processes: ProcessMemory) -> str:
        around = OomContext(HELLO, processes)
        return next(one.text for one in remedies(oom, explain(oom, around), around) if one.kind == kind)

    smaller = "A smaller micro-batch, 2 instead of 4, with 2 times the accumulation steps."
    assert remedy("micro_batch", of(batch_shape=[4, 8192])) == smaller
    others = "End or move the other processes on this device: python (pid 77)."
    assert remedy("processes", half_full(), OTHER, ProcessMemory(11, 38 * GIB, 0)) == others
