"""``ftmon predict``: predicts the memory of a training step, without a GPU."""

from argparse import Namespace

from ....protocol.errors import UsageError
from ..access.trainer_process import become, require_training

PREDICT = "ftmon.trainer.predict"
_OF_BOTH = ("ranks", "capacity", "gpu", "price", "data", "largest", "what_if")
_OF_A_SCRIPT = {
    "deepspeed": "deepspeed",
    "micro_batch": "training.micro_batch",
    "accumulation": "training.grad_accumulation",
    "checkpointing": "model.gradient_checkpointing",
    "lora_rank": "lora.rank",
    "optimizer": "optimizer.kind",
}
"""Options of --model, and the settings of a configuration that correspond to them."""


def predict(arguments: Namespace) -> int:
    """Predict the memory of a training step; return 0, or 2 for an unusable configuration.

    Raises:
        UsageError: neither a configuration nor --model, or options of the one with the other.
    """
    require_training()
    become(PREDICT, words(arguments), ends_at_once=True)


def words(arguments: Namespace) -> list[str]:
    """Return the arguments of the process that predicts.

    Raises:
        UsageError: neither a configuration nor --model, or options of the one with the other.
    """
    _check(arguments)
    result: list[str] = []
    if arguments.sequence_length:
        result.append(f"--sequence-length={','.join(map(str, arguments.sequence_length))}")
    for name in (*_OF_BOTH, "model", *_OF_A_SCRIPT):
        value = getattr(arguments, name)
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            result.append(option if value is True else f"{option}={value}")
    if arguments.json:
        result.append("--json")
    if arguments.command:
        return [*result, "--script", "--", *arguments.command]
    return [*result, "--", arguments.config, *arguments.overrides] if arguments.config else result


def _check_command(arguments: Namespace) -> None:
    """Refuse options whose values come from the command's script."""
    if arguments.config or arguments.model:
        raise UsageError(f"predict accepts {arguments.config or '--model'} or a command after '--', not both")
    if arguments.data:
        raise UsageError("--data needs CONFIG.yaml, which names the data set")
    for name in ("deepspeed", "lora_rank", "optimizer"):
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} goes with --model; a command's script sets it itself")


def _check(arguments: Namespace) -> None:
    if arguments.command:
        _check_command(arguments)
        return
    if not arguments.config and not arguments.model:
        raise UsageError(
            "predict needs CONFIG.yaml ('ftmon train --print-config' writes one), --model MODEL, or '-- COMMAND' for a "
            "script of your own"
        )
    if arguments.config and arguments.model:
        raise UsageError(f"predict takes {arguments.config} or --model, not both; set model.name=NAME instead")
    if not arguments.config:
        if arguments.data:
            raise UsageError("--data needs CONFIG.yaml, which names the data set")
        return
    for name, key in _OF_A_SCRIPT.items():
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} goes with --model; in {arguments.config} it is {key}")
