"""Updates whose gradients overflow, and losses that are not numbers, on real ranks in bf16 and fp32."""

import re
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import small_runs

BF16 = ["training.precision=bf16", "zero.stage=2", "optimizer.lr=1e-2"]
LATE = "optimizer.kind=torch_fused"  # the device skips the update, which the host reads in the next step
SIX = "training={max_steps: 6, micro_batch: 2, grad_accumulation: 1, sequence_length: 256}"

NAN = ["zero.stage=0", "training.max_steps=20", "training.stop_after_nan=2"]


class Outcome:
    def __init__(self, folder: Path) -> None:
        small_runs.write_model(folder)
        small_runs.write_records(folder / "data.jsonl", [5, 60, 7, 1, 9, 30, 2, 11, 4, 3])
        resumed = folder / "out" / "overflow-at-2" / "checkpoints" / "step-3"
        resumed.mkdir(parents=True)  # it must exist when configurations are checked; the run before writes it
        self.out = folder / "out"
        self.text = small_runs.launch(
            folder,
            "broken_ranks",
            {
                "overflow-at-2": (1, [SIX, *BF16, "checkpoint={every: 3, keep: 9}", "output.overwrite=true"]),
                "resumed": (1, [SIX, *BF16, f"checkpoint.resume={resumed}"]),
                "overflow-from-3": (1, [SIX, *BF16, "training.max_skipped=4"]),
                "overflow-at-2-late": (2, [SIX, *BF16, "zero.stage=0", LATE]),
                "overflow-at-2-late-2": (2, [SIX, *BF16, LATE]),
                "overflow-from-3-late": (1, [SIX, *BF16, LATE, "training.max_skipped=4"]),
                # Without partitioning fp32 gradients are not looked at before they are applied.
                "nan-from-4": (2, [SIX, *NAN, "checkpoint.every=2"]),
            },
        )

    def steps(self, name: str) -> dict[int, tuple[str, str]]:
        found = re.findall(r"^step (\d+)/\d+  loss (\S+)  lr (\S+)", self.text[name], re.MULTILINE)
        return {int(step): (loss, lr) for step, loss, lr in found}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("name", ["overflow-at-2", "overflow-at-2-late", "overflow-at-2-late-2"])
def test_an_update_whose_gradients_overflow_is_no_step_and_does_not_advance_the_schedule(outcome, name):
    steps = outcome.steps(name)
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    # Seven batches were taken for six steps; the last one has the schedule's last rate.
    assert "batches taken: 7" in outcome.text[name]
    assert steps[6][1] == "1.00e-03"
    rates = [float(lr) for _, lr in steps.values()]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 6


def test_a_run_with_an_overflow_resumes_alike_and_losses_that_are_no_numbers_end_one(outcome):
    whole = outcome.steps("overflow-at-2")
    assert outcome.steps("resumed") == {step: whole[step] for step in (4, 5, 6)}
    text = outcome.text["nan-from-4"]
    (refused,) = re.findall(r"^refused: (.*)", text, re.MULTILINE)
    assert "the loss is not a number" in refused
    assert re.search(r"go on from \S+/step-2, with a lower", refused)
    assert "note: no checkpoint after step 4: the loss is not a number" in text
    assert not (outcome.out / "nan-from-4" / "checkpoints" / "step-4").exists()
    assert max(outcome.steps("nan-from-4")) < 20


@pytest.mark.parametrize(("name", "step"), [("overflow-from-3", 2), ("overflow-from-3-late", 3)])
def test_overflows_without_end_end_the_run(outcome, name, step):
    assert (
        f"refused: after step {step} the gradients of 4 updates in a row overflowed (training.max_skipped)"
        in outcome.text[name]
    )


@pytest.mark.parametrize("name", ["overflow-at-2-late", "overflow-at-2-late-2"])
def test_a_skipped_update_leaves_numbers_behind(outcome, name):
    losses = [float(loss) for loss, _ in outcome.steps(name).values()]
    assert losses[-1] < losses[0]
