"""Describes a remedy as changes of a user's own script: keys of DeepSpeed, arguments of ``Trainer``, calls."""

from collections.abc import Sequence

from . import deepspeed_file
from .script import ADAMS, ScriptInputs

_OFFLOAD = "zero_optimization.offload_optimizer="
NOT_CHANGED = (
    "a script makes its model, optimizer and loss itself, so LoRA, other optimizers and a fused loss are not among the "
    "changes; --model with --lora-rank or --optimizer predicts them"
)


def words(changes: Sequence[str], script_inputs: ScriptInputs) -> str:
    """Return the settings of the script for changes (assignments to DeepSpeed's keys, flags of ``predict``)."""
    return " ".join(_one(change, script_inputs) for change in changes)


def refusal(changes: Sequence[str], script_inputs: ScriptInputs) -> str:
    """Return the reason why these changes do not apply to the script; empty if they do."""
    if not script_inputs.optimizer or not any(change.startswith(_OFFLOAD) for change in changes):
        return ""
    if deepspeed_file.offloads(script_inputs.deepspeed) or script_inputs.optimizer in ADAMS:
        return ""
    return f"the script makes {script_inputs.optimizer} itself; DeepSpeed offloads its own CPUAdam and CPULion only"


def _one(change: str, script_inputs: ScriptInputs) -> str:
    key, _, value = change.partition("=")
    if key == "--checkpointing":
        return "gradient_checkpointing=True" if script_inputs.trainer else "model.gradient_checkpointing_enable()"
    if key == "--micro-batch":
        if script_inputs.trainer:
            return f"per_device_train_batch_size={value}"
        return f"train_micro_batch_size_per_gpu={value} (and batches of {value} rows)"
    if key == "--accumulation":
        return f"gradient_accumulation_steps={value}"
    if change.startswith(_OFFLOAD) and script_inputs.optimizer in ADAMS and not script_inputs.trainer:
        return f"{change} deepspeed.ops.adam.DeepSpeedCPUAdam in place of its {script_inputs.optimizer}"
    return change
