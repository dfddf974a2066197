"""The probe in foreign scripts on a GPU: their losses, what comes after the last step, FSDP2 and a pipeline."""

import json
import os
import sys

import pytest
from ftmon.protocol.messages.telemetry import Closing, Hello, Step
from ftmon.trainer.recipe.hardware import visible_gpus
from ports import free_port
from probe_collector import BIN, SCRIPTS

pytestmark = pytest.mark.gpu
if not os.path.exists("/dev/nvidia0"):
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

BIG = 400 * 2**20


MODES = (
    *("after_epochs", "validated", "validated_within", "dropped", "looked_at", "left_out", "failed_and_evaluated"),
    *("stages", "shared", "left_out_of_ddp", "in_backward"),
)


def test_losses_are_those_that_a_loop_optimised(collector):
    collector.start(sys.executable, SCRIPTS / "loop_edges.py", *MODES, CUDA_VISIBLE_DEVICES="0").finish(180)
    assert collector.job.returncode == 0, collector.output()
    lines = collector.run.rank_log(0, "out").read_text().splitlines()
    told = [json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith("optimised ")]
    assert [mode for mode, _ in told] == list(MODES)
    steps = collector.of(Step)
    assert [step.loss for step in steps] == pytest.approx([loss for _, losses in told for loss in losses], rel=1e-5)
    assert all(step.device_us is not None for step in steps)


def test_the_peak_of_a_final_evaluation_is_in_the_closing_record_to_the_byte(collector):
    collector.start(sys.executable, SCRIPTS / "tail_loop.py", CUDA_VISIBLE_DEVICES="0").finish(180)
    assert collector.job.returncode == 0, collector.output()
    (closing,) = collector.of(Closing)
    steps = collector.of(Step)
    assert (closing.step, steps[-1].step) == (10, 10)
    evaluation = next(phase for phase in closing.phases if phase.name == "eval")
    # The temporary, what the rank held all along, and the evaluation's own small tensors.
    assert BIG <= evaluation.allocated.transient < BIG + 2**20
    assert evaluation.allocated.peak > max(phase.allocated.peak for step in steps for phase in step.phases)
    assert any(phase.name == "checkpoint" for phase in closing.phases)


def test_fsdp2_over_nccl_shows_its_framework_model_and_backend(collector):
    visible = visible_gpus()[:2]
    devices, ranks = ",".join(visible), len(visible)
    launcher = BIN / "torchrun", "--nproc_per_node", str(ranks), "--master_port", str(free_port())
    collector.start(*launcher, SCRIPTS / "fsdp2_loop.py", CUDA_VISIBLE_DEVICES=devices).finish(180)
    assert collector.job.returncode == 0, collector.output()
    for rank in range(ranks):
        hello = collector.of(Hello, rank)[-1]
        assert (hello.framework, hello.model, hello.backend) == ("fsdp", "TinyNet", "nccl")
        assert (hello.parameters, hello.trainable_parameters) == (3 * 72, 2 * 72)
        assert [step.step for step in collector.of(Step, rank)] == [1, 2, 3, 4]
        told = collector.run.rank_log(rank, "out").read_text().split("norms ", 1)[1].splitlines()[0]
        assert [step.grad_norm for step in collector.of(Step, rank)] == pytest.approx(json.loads(told), rel=1e-5)
