"""Which checkpoints a run resumes from."""

import pytest
from ftmon.trainer.recipe.checkpoint.manifest import Manifest
from ftmon.trainer.recipe.checkpoint.restore import stage_refusal
from ftmon.trainer.recipe.state import TrainState


@pytest.mark.parametrize(
    ("written", "precision", "states", "stage", "refusal"),
    [
        (2, "bf16", "adamw", 1, ""),  # of one rank, before these ran at stage 1
        (1, "fp32", "adamw", 2, ""),
        (0, "fp32", "adamw", 0, ""),
        (0, "bf16", "adamw_bf16 without master weights", 0, ""),
        (3, "bf16", "adamw", 1, "was written with ZeRO-3; set zero.stage=3"),
        (0, "fp32", "adamw", 2, "was written with ZeRO-0; set zero.stage=0"),
    ],
)
def test_stages_1_and_2_resume_from_each_other(written, precision, states, stage, refusal):
    state = TrainState()
    content = Manifest(
        0.0, state, written, precision, parameters={}, trained=[], files={}, settings={}, optimizer=states
    )
    found = stage_refusal(content, stage)
    assert found.startswith(refusal)
    assert bool(found) is bool(refusal)
