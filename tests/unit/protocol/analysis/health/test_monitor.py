"""What is wrong with the training, the GPUs and the disks, in words."""

from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.gradients import GradientFacts, ScalerFacts
from ftmon.protocol.analysis.health.loss import DivergenceFacts, PlateauFacts
from ftmon.protocol.analysis.health.machine import CheckpointFacts, DeviceFacts, DiskFacts, XidFacts
from ftmon.protocol.analysis.health.nonfinite import NonFiniteFacts
from ftmon.protocol.analysis.health.speed import CompileFacts, DataWaitFacts
from ftmon.protocol.analysis.words import Words
from ftmon.protocol.messages.telemetry import DataLoaderInfo

replace = msgspec.structs.replace
GIB = 2**30
FULL = "No space left on device"
DIVERGENCE = DivergenceFacts(36.1, 2.1678, 281, 300, 0.2205, 4.9346, 1e-4, None, 328)
GRADIENT = GradientFacts(120.0, 1.2, 100.0, 200, 6, 2.5, 1e-4)
GPU = DeviceFacts("n", 0)
LINE = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
CHEAPER = "make each sample cheaper (tokenize or decode once, before the run)"
LOADER = DataLoaderInfo(workers=0, cpus=16)
NAN = NonFiniteFacts("nan", 1, (1,), 30, 29, 2.29, 0.5, 1e-4, 1, 2, True)
PLATEAU = PlateauFacts(5.01, -0.0007, 41, 1000, 4.999, 1e-4, True)
SCALER = ScalerFacts(1.0, 1.0, 60, 100, 99, 101)
STALLED = DataWaitFacts(0.6, 150.0, 249.0, 80, 1, 1, False)
VOLUME = DiskFacts("node-1", "/scratch/run", "output", "rate", 3 * GIB, 100 * GIB, 5 * GIB / 60, 659.0)
XID = XidFacts("n", 79, -1, "0000:3b:00", 1, LINE, "the GPU has fallen off the bus")

LIMIT = " torch.compile has reached its recompilation limit: it runs uncompiled from now on."
CASES = [
    (
        Finding("nan_loss", NAN, ranks=(1,)),
        "NaN loss on rank 1 since step 30",
        "The last good step of rank 1 was 29: loss 2.29, gradient norm 0.5, learning rate 0.0001. Other ranks were "
        "finite in that step, so it came from the batch or device of rank 1.",
    ),
    (
        Finding(
            "nan_gradient",
            replace(
                NAN, first_ranks=(0, 1), first_step=5, last_good_step=4, last_good_loss=1.0, finite_elsewhere=False
            ),
            ranks=(0, 1),
        ),
        "NaN gradient norm on ranks 0-1 since step 5",
        "The last good step of rank 1 was 4: loss 1, gradient norm 0.5, learning rate 0.0001.",
    ),
    (
        Finding("diverging_loss", DIVERGENCE),
        "loss is diverging: 36.1, was 2.168 at step 281",
        "Since about step 300 the loss (median of 8 steps, mean over ranks) has been at 36.1, against 2.168 at the "
        "lowest of the 328 steps before; single steps scatter by 0.2205. The run began at 4.935. Learning rate 0.0001, "
        "gradient norm ?.",
    ),
    (
        Finding("loss_plateau", PLATEAU),
        "the loss has not fallen since the start: 5.01",
        "After 1040 steps it is at 5.01; it began at 4.999. Learning rate 0.0001.",
    ),
    (
        Finding("loss_plateau", replace(PLATEAU, improvement=0.01, never_fell=False)),
        "the loss has been flat at 5.01 for 1000 steps",
        "Since step 41 it changed by -0.01. Learning rate 0.0001, not in the tail of its schedule.",
    ),
    (
        Finding("gradient_explosion", GRADIENT),
        "gradient norm 120, usually 1.2",
        "Since step 200 it was 100 times its usual size in 6 steps (before clipping). Loss 2.5, learning rate 0.0001.",
    ),
    (
        Finding("gradient_collapse", replace(GRADIENT, grad_norm=1e-6, ratio=1e-6, steps=20, loss=None)),
        "gradient norm has collapsed to 1e-06, usually 1.2",
        "Since step 200, for 20 steps in a row, the parameters have received almost no gradient. Loss ?, learning rate "
        "0.0001.",
    ),
    (
        Finding("scaler_floor", SCALER),
        "loss scale is at its floor, 1, and updates still overflow",
        "60 of the last 100 updates were skipped at a loss scale of 1, 99 in all. The scale cannot go lower: the "
        "gradients themselves are infinite, and the run does not learn.",
    ),
    (
        Finding("scaler_skipping", replace(SCALER, loss_scale=None, skipped=40, skipped_in_all=41)),
        "the loss scaler skips updates: 40 of the last 100",
        "40 of the last 100 updates were skipped by the loss scaler, since step 101, 41 in all. A stable loss scaler "
        "skips about one update in a thousand.",
    ),
    (
        Finding("input_bound", replace(STALLED, loader=LOADER, workers_needed=3), ranks=(0,)),
        "waits for data 60% of each step",
        "Waiting for the next batch takes 150 of 249 ms a step (mean of 80 steps); its DataLoader has num_workers=0, "
        "memory not pinned.",
    ),
    (
        Finding("recompilation", CompileFacts("forward (model.py:40)", 4, 2.0, "size mismatch", 2), ranks=(0,)),
        "torch.compile keeps recompiling forward (model.py:40): 4 times",
        "Since step 2 compilation took 2.0 s. Latest reason: size mismatch.",
    ),
    (
        Finding("recompilation", CompileFacts("forward", 8, 90.0, "", 2, limit_reached=True)),
        "torch.compile keeps recompiling forward: 8 times",
        f"Since step 2 compilation took 1 m 30 s.{LIMIT}",
    ),
    (
        Finding(
            "gpu_throttling",
            replace(
                GPU, reasons=("thermal (hardware)", "power brake"), temperature_c=91.0, power_w=310.0,
                sm_clock_mhz=900, others_sm_clock_mhz=1980,
            ),
        ),
        "GPU 0 of n is throttled: thermal (hardware), power brake",
        "For most of the last 20 s its clock was reduced while computing: 91 °C, 310 W, SM clock 900 MHz (the host's "
        "other GPUs: 1980).",
    ),
    (
        Finding("gpu_memory_errors", replace(GPU, remap_pending=True)),
        "GPU 0 of n has memory errors: a memory row waits to be remapped at the next reset",
        "a memory row waits to be remapped at the next reset.",
    ),
    (
        Finding("gpu_xid", XID),
        "XID 79 on 0000:3b:00 of n: the GPU has fallen off the bus",
        f'the GPU has fallen off the bus. The driver\'s line: "{LINE}".',
    ),
    (
        Finding("gpu_xid", replace(XID, code=31, index=3, count=2, text="", meaning="a memory page fault")),
        "XID 31 on GPU 3 of n, 2 times: a memory page fault",
        "a memory page fault.",
    ),
    (
        Finding("disk_filling", VOLUME),
        "disk full in 10 m 59 s at 5.00 GiB/min: /scratch/run (output) on node-1",
        "3.00 GiB of 100.00 GiB left. Most trainings end if a checkpoint or a log cannot be written.",
    ),
    (
        Finding("checkpoint_failed", CheckpointFacts("out/step-20", FULL, 20, 20, 1, "out/step-10")),
        f"a checkpoint could not be written, at step 20: {FULL}",
        f"out/step-20: {FULL}. Training continues. The newest complete one is out/step-10. What was trained since then "
        "is lost if the run ends now.",
    ),
]  # fmt: skip


def said(kind: str, facts: Any, **fields: Any) -> Words:
    return kinds.words_of(Finding(kind, facts, **fields))


@pytest.mark.parametrize(("finding", "title", "text"), CASES)
def test_a_finding_in_words_and_its_evidence(finding: Finding, title: str, text: str) -> None:
    words = kinds.words_of(finding)
    assert words[:2] == (title, text)
    plain = {"finding": finding.kind, "remedy": words.remedy, **msgspec.to_builtins(finding.facts)}
    assert kinds.evidence_of(finding) == plain


def test_where_a_loss_that_is_no_number_began_and_what_else_than_a_divergence_explains_a_rise():
    infinite = said("nan_loss", replace(NAN, value="inf", last_good_step=None, precision="fp16"), ranks=(1,))
    assert infinite.title == "infinite loss on rank 1 since step 30"
    assert infinite.text.startswith("Rank 1 had no finite one before, learning rate 0.0001. Other ranks were finite")
    assert infinite.remedy.endswith(" bf16 has a larger range than fp16.")
    lone = said("nan_loss", replace(NAN, ranks_total=1, last_good_grad_norm=None), ranks=(1,))
    assert lone.text == "The last good step of rank 1 was 29: loss 2.29, learning rate 0.0001."
    spread = said("nan_loss", replace(NAN, finite_elsewhere=False), ranks=(0, 1))
    assert spread.title == "NaN loss on rank 1 since step 30"
    assert spread.text.endswith("learning rate 0.0001. Since then: ranks 0-1.")
    rollouts = said("diverging_loss", replace(DIVERGENCE, rollouts=True, stepped=True), severity="info")
    assert rollouts.title == "loss has risen to 36.1, was 2.168 at step 281"
    why = "The run trains on its own rollouts: the loss of a policy or value model may rise as rewards do."
    assert f"The run began at 4.935. {why} Learning rate 0.0001" in rollouts.text
    stepped = said("diverging_loss", replace(DIVERGENCE, stepped=True, grad_norm=3.0))
    assert stepped.title == "loss is diverging: 36.1, was 2.168 at step 281"
    why = "It rose at once and has not fallen since: other data, or a divergence."
    assert stepped.text.endswith(f"The run began at 4.935. {why} Learning rate 0.0001, gradient norm 3.")


def test_ranks_that_wait_for_data_and_what_loads_it() -> None:
    some = said("input_bound", replace(STALLED, ranks_bound=2, ranks_total=4))
    assert some.title == "waits for data 60% of each step (2 of 4 ranks)"
    assert some.text == "Waiting for the next batch takes 150 of 249 ms a step (mean of 80 steps)."
    assert some.remedy == (
        "Load data in advance: a DataLoader with num_workers, or a prefetching thread; or prepare (tokenize, decode) "
        "the data once, before the run."
    )
    loader = DataLoaderInfo(workers=2, prefetch_factor=4, pin_memory=True, cpus=8)
    assert said("input_bound", replace(STALLED, loader=loader)).text.endswith(
        "; its DataLoader has num_workers=2, 4 batches ahead each, memory pinned."
    )


@pytest.mark.parametrize(
    ("loader", "needed", "cuda", "remedy"),
    [
        (LOADER, 0, False, "num_workers above 0 loads batches in the background"),
        (LOADER, 17, False, f"hiding it takes about 17 workers, but this rank may use 16 CPUs: {CHEAPER}"),
        (LOADER, 160, False, f"hiding it takes more than 32 workers, but this rank may use 16 CPUs: {CHEAPER}"),
        (DataLoaderInfo(), 65, False, f"hiding it takes about 65 workers: {CHEAPER}"),
        (
            *(DataLoaderInfo(workers=4, prefetch_factor=2, cpus=16), 3, True),
            "num_workers=5 would hide the wait, if workers scale; a higher prefetch_factor evens out samples that "
            "differ in cost; persistent_workers=True avoids restarting them at each epoch; pin_memory=True with "
            "non_blocking copies overlaps the copy with the step",
        ),
        (DataLoaderInfo(workers=4, prefetch_factor=4, pin_memory=True, persistent_workers=True, cpus=16), 0, True, ""),
    ],
)
def test_what_would_hide_a_wait_for_data(loader: DataLoaderInfo, needed: int, cuda: bool, remedy: str) -> None:
    assert said("input_bound", replace(STALLED, loader=loader, workers_needed=needed, cuda=cuda)).remedy == (
        f"Try: {remedy}." if remedy else "Make each sample cheaper."
    )


def test_a_throttled_gpu_with_what_is_known_of_it_and_an_xid_of_program_device_or_unknown_gpu():
    words = said("gpu_throttling", replace(GPU, reasons=("hardware slowdown",), sm_clock_mhz=900))
    assert words.title == "GPU 0 of n is throttled: hardware slowdown"
    assert words.text.endswith("while computing: SM clock 900 MHz.")
    hot = said("gpu_throttling", replace(GPU, reasons=("thermal",), temperature_c=91.0))
    assert hot.text.endswith("while computing: 91 °C.")
    assert "compute-sanitizer" in said("gpu_xid", replace(XID, code=31)).remedy
    assert "reset the GPU" in said("gpu_xid", XID).remedy
    assert said("gpu_xid", replace(XID, bus="")).title == "XID 79 on a GPU of n: the GPU has fallen off the bus"


def test_memory_errors_that_are_old_new_and_beyond_remapping() -> None:
    old = said("gpu_memory_errors", replace(GPU, uncorrected=3))
    counted = "3 uncorrectable ECC errors since its driver was loaded"
    assert old.title == f"GPU 0 of n has memory errors: {counted}, none of them during this run"
    assert "cannot be trusted" not in old.text
    assert " 1 uncorrectable ECC error since " in said("gpu_memory_errors", replace(GPU, uncorrected=1)).title
    new = said("gpu_memory_errors", replace(GPU, uncorrected=3, new_errors=2, remap_failed=True, remap_pending=True))
    assert new.title == f"GPU 0 of n has memory errors: {counted}, 2 of them during this run"
    assert new.text == (
        f"{counted}, 2 of them during this run; a memory row could not be remapped; a memory row waits to be remapped "
        "at the next reset. Results computed with it cannot be trusted."
    )


def test_a_disk_nearly_full_or_too_small_for_the_next_checkpoint_and_ones_that_could_not_be_written():
    volume = replace(VOLUME, free_bytes=6 * GIB, bytes_per_s=0.0, full_in_s=None)
    low = said("disk_filling", replace(volume, why="low"))
    assert low.title == "disk nearly full, 6.00 GiB of 100.00 GiB left: /scratch/run (output) on node-1"
    burst = said("disk_filling", replace(volume, why="next write", burst_bytes=10 * GIB))
    expected = "the next checkpoint will not fit, 6.00 GiB of 100.00 GiB left: /scratch/run (output) on node-1"
    assert burst.title == expected
    assert burst.text.startswith(
        "6.00 GiB of 100.00 GiB left. The largest single write was 10.00 GiB, more than is left. Most trainings end"
    )
    again = said("checkpoint_failed", CheckpointFacts("out/step-30", FULL, 20, 30, 2, ""))
    assert again.title == f"2 checkpoints in a row could not be written, at step 30: {FULL}"
    assert again.text.startswith(f"out/step-30: {FULL}. Training continues. There is no complete one. ")
