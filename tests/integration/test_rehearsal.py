"""A rehearsal before the first step changes nothing, and finds what does not fit."""

import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import small_runs
import torch

TRAIN = "training={max_steps: 4, micro_batch: 2, grad_accumulation: 2, sequence_length: 256}"
CASES: dict[str, tuple[int, list[str]]] = {
    "stage-0": (1, ["zero.stage=0"]),
    "stage-1-bf16": (1, ["zero.stage=1", "training.precision=bf16"]),
    "stage-2-two-ranks": (2, ["zero.stage=2", "training.grad_accumulation=1", "training.precision=bf16"]),
    # All parameters are partitioned, and gathered when they are used.
    "stage-3": (
        1,
        [
            *("zero.stage=3", "training.precision=bf16"),
            "deepspeed.zero_optimization={stage3_param_persistence_threshold: 0, stage3_prefetch_bucket_size: 0}",
        ],
    ),
    "stage-3-two-ranks": (2, ["zero.stage=3", "training.grad_accumulation=1"]),
    "shared": (2, ["zero.stage=2", "training={sequence_parallel_size: 2, grad_accumulation: 1}"]),
    "lora": (1, ["zero.stage=2", "lora={rank: 4, dropout: 0.1}"]),
    "offload": (1, ["zero={stage: 2, offload_optimizer: true}", "optimizer.kind=torch_fused"]),
}

RESUMED = ("stage-1-bf16", "stage-3")
SMALL_DISKS = {
    # Tenths of a checkpoint that another program takes after the rehearsal, and that are free before it.
    "small-disk-0-26": ["checkpoint={every: 1, keep: 2}"],
    "small-disk-0-22-best": ["checkpoint={every: 1, keep: 1, keep_best: true}", "evaluation.every=1"],
    "small-disk-12-24": ["checkpoint={every: 1, keep: 1}"],
    "small-disk-3-15-at-end": ["checkpoint.at_end=true"],
    "small-disk-0-2": [],
}


@contextmanager
def mounted(folder: Path) -> Generator[bool]:
    """Mount a tmpfs of 64 MiB; yield whether that is allowed here."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    mounts = subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        yield mounts
    finally:
        if mounts:
            subprocess.run(["umount", str(folder)], check=True)


class Outcome:
    def __init__(self, folder: Path, disk: Path | None) -> None:
        # Dropout: a random number more or less changes every loss that follows.
        small_runs.write_model(folder, attention_dropout=0.2)
        small_runs.write_records(folder / "data.jsonl", [5, 60, 7, 1, 9, 30, 2, 11, 4, 3])
        small_runs.write_records(folder / "long.jsonl", [5, 4000, 7])
        common = [
            TRAIN,
            "evaluation={share: 0.2, every: 3}",
            "checkpoint.keep_best=false",
            "optimizer.lr=1e-2",
            "schedule.warmup_steps=2",
        ]
        jobs = {
            f"{name}-{kind}": (ranks, [*common, *words, f"training.rehearsal={kind == 'rehearsed'}"])
            for name, (ranks, words) in CASES.items()
            for kind in ("rehearsed", "plain")
        }
        for name in RESUMED:
            # The run without a rehearsal leaves a checkpoint, which the next one resumes from after a rehearsal.
            jobs[f"{name}-plain"][1].extend(["checkpoint={every: 2, keep: 9}", "output.overwrite=true"])
            step = folder / "out" / f"{name}-plain" / "checkpoints" / "step-2"
            step.mkdir(parents=True)  # it must exist when configurations are checked
            ranks, words = CASES[name]
            jobs[f"{name}-resumed"] = (ranks, [*common, *words, f"checkpoint.resume={step}"])
        jobs["full-disk"] = (2, [*common, "checkpoint={at_end: true, background: false}"])
        jobs["full-disk-unplanned"] = (1, common)
        export = f"output={{dir: {folder}/out/full-disk-at-export, save_model: true}}"
        jobs["full-disk-at-export"] = (2, [*common, export])
        jobs["no-room"] = (1, [*common, "checkpoint.every=3"])
        jobs["left-out"] = (1, [*common, "checkpoint.rehearse=false"])
        for name, words in SMALL_DISKS.items() if disk is not None else ():
            here = [f"output={{dir: {disk}/{name}, save_model: true}}", "model.fused_loss=off", *words]
            jobs[name] = (1, [*common, *here])
        one = "training={max_steps: 2, micro_batch: 1, sequence_length: 8192}"
        jobs["out-of-memory"] = (
            1,
            [one, f"data.path={folder}/long.jsonl", "data.packing=false", "model.attention=eager"],
        )
        self.text = small_runs.launch(folder, "evaluation_ranks", jobs)
        self.out = folder / "out"
        saved: dict[str, Any] = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
        self.saved = {name: one["weights"] for name, one in saved.items()}
        self.gathered: dict[str, list[int]] = {name: one["gathered"] for name, one in saved.items()}

    def of_small_disk(self, name: str) -> str:
        if name not in self.text:
            pytest.skip("mounting a tmpfs is not allowed here")
        return self.text[name]

    def losses(self, name: str) -> list[str]:
        return re.findall(r"^(?:step \d+/\d+|evaluation after step \d+:)  ?loss (\S+)", self.text[name], re.MULTILINE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("rehearsal")
    with mounted(folder / "disk") as mounts:
        return Outcome(folder, folder / "disk" if mounts else None)


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_changes_no_bit_and_its_checkpoint_is_written_read_back_compared_and_gone(outcome, name):
    rehearsed, plain = f"{name}-rehearsed", f"{name}-plain"
    assert "rehearsal: " in outcome.text[rehearsed]
    assert "rehearsal: " not in outcome.text[plain]
    assert (len(outcome.losses(plain)), outcome.losses(rehearsed)) == (6, outcome.losses(plain))
    for key, weight in outcome.saved[plain].items():
        assert torch.equal(outcome.saved[rehearsed][key], weight), key
    text = outcome.text[f"{name}-rehearsed"]
    assert "the largest evaluation batch; a sample of a checkpoint written and read back" in text
    found = re.search(
        r"a checkpoint takes (\S+) MiB; a sample of each file was written, read back and compared \((\d+) tensors\)",
        text,
    )
    assert found
    assert float(found[1]) > 0
    # At least the trained parameters and their two moments; partitions are flat.
    assert int(found[2]) > 4
    assert not (outcome.out / f"{name}-rehearsed" / "checkpoints").exists()


def test_zero_3_keeps_for_the_backward_what_is_used_again_soon(outcome):
    # Two forwards a step, of which the first teaches DeepSpeed the order of modules; four steps.
    first, *others = outcome.gathered["stage-3-plain"]
    assert first == 0
    assert len(others) == 7
    assert min(others) > 0
    assert outcome.gathered["stage-3-rehearsed"] == [first, *others[:1], *others[:1], *others]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_rehearsed_and_repeats_the_uninterrupted_one(outcome, name):
    resumed, plain = f"{name}-resumed", f"{name}-plain"
    text = outcome.text[resumed]
    assert text.index("rehearsal: ") < text.index("resumed from ") < text.index("step 3/4")
    assert outcome.losses(resumed) == outcome.losses(plain)[2:]
    for key, weight in outcome.saved[plain].items():
        assert torch.equal(outcome.saved[resumed][key], weight), key


def test_a_checkpoint_or_a_model_that_cannot_be_written_ends_the_run_with_what_can_be(outcome):
    (line,) = re.findall("^refused: (.*)", outcome.text["full-disk"], re.MULTILINE)
    assert re.match(
        r"rehearsal: a checkpoint could not be written to \S+/checkpoints: rank 0: File too large; free", line
    )
    assert "checkpoint.rehearse=false" in line
    text = outcome.text["full-disk-unplanned"]
    assert "note: rehearsal: a checkpoint could not be written" in text
    assert "step 4/4" in text
    (line,) = re.findall("^refused: (.*)", outcome.text["full-disk-at-export"], re.MULTILINE)
    kept = outcome.out / "full-disk-at-export" / "checkpoints" / "step-4"
    assert re.match(rf"the final model cannot be written to \S+/model: .*; step 4 is in {kept}; to write it", line)
    assert (kept / "manifest.json").exists()


def test_a_disk_without_room_is_refused_before_anything_is_written_and_a_checkpoint_can_be_left_out(outcome):
    (line,) = re.findall("^refused: (.*)", outcome.text["no-room"], re.MULTILINE)
    assert re.match(r"rehearsal: a checkpoint takes [\d.]+ MiB, and the disk of \S+ has 0.1 MiB free; free space", line)
    assert "rehearsal: " in outcome.text["left-out"]
    assert "read back" not in outcome.text["left-out"]


def test_a_disk_short_of_keep_costs_the_oldest_checkpoints_but_not_the_best_or_the_run(outcome):
    text = outcome.of_small_disk("small-disk-0-26")
    assert re.search(
        r"note: rehearsal: 3 checkpoints of \S+ MiB take \S+ MiB \(checkpoint.keep=2 and one being written\), and the "
        r"disk of \S+ has \S+ MiB free: the oldest checkpoints will be removed before the next is written; free space",
        text,
    )
    expected = [("step-1", "step-3"), ("step-2", "step-4")]
    assert re.findall("note: (step-.*) removed to make room for (step-.*|the final model):", text) == expected
    assert len(re.findall("^checkpoint: ", text, re.MULTILINE)) == 4
    assert "final model: " in text
    text = outcome.of_small_disk("small-disk-0-22-best")
    losses = re.findall(r"^evaluation after step \d+: loss (\S+)", text, re.MULTILINE)
    best = 1 + losses.index(min(losses, key=float))
    assert f"step-{best}" not in {name for line in re.findall("note: (.*) removed", text) for name in line.split(", ")}
    assert "final model: " in text


def test_a_disk_that_fills_up_later_ends_no_training_and_the_model_takes_the_place_of_an_old_one(outcome):
    text = outcome.of_small_disk("small-disk-12-24")
    # The only checkpoint stays during the training; every later one has no room.
    assert len(re.findall("^checkpoint: ", text, re.MULTILINE)) == 1
    assert len(re.findall(r"note: checkpoint step-\d could not be written: it takes .* MiB free; training", text)) == 3
    assert "note: step-1 removed to make room for the final model: " in text
    assert "final model: " in text


def test_a_model_that_does_not_fit_is_named_with_the_last_checkpoint_or_before_the_first_step(outcome):
    (line,) = re.findall("^refused: (.*)", outcome.of_small_disk("small-disk-3-15-at-end"), re.MULTILINE)
    assert re.match(r"the final model cannot be written to \S+: it takes \S+ MiB, and the disk of \S+ has \S+", line)
    assert re.search(r"; step 4 is in \S+/step-4; to write it, resume with checkpoint.resume=\S+-at-end$", line)
    (line,) = re.findall("^refused: (.*)", outcome.of_small_disk("small-disk-0-2"), re.MULTILINE)
    assert re.match(r"rehearsal: the final model takes \S+ MiB, and the disk of \S+ has \S+ MiB free; free space", line)


def test_memory_that_runs_out_is_found_before_the_first_step_and_names_the_row(outcome):
    text = outcome.text["out-of-memory"]
    assert re.search(
        r"^rehearsal: out of memory on the longest micro-batch, 1 x 4,\d+ tokens \(training rows 1\); lower "
        r"training\.micro_batch or training\.sequence_length",
        text,
        re.MULTILINE,
    )
    assert "failed: " in text
    assert "step 1/" not in text
