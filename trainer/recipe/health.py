"""Ends a broken run before it replaces good checkpoints."""

from pathlib import Path

from ...protocol.errors import FtmonError
from .config.schema import Config


def check_skipped(skipped: int, config: Config, step: int) -> None:
    """Raise if too many updates in a row were skipped.

    Raises:
        FtmonError: there are ``training.max_skipped`` of them.
    """
    if skipped >= config.training.max_skipped:
        raise FtmonError(
            f"after step {step} the gradients of {skipped} updates in a row overflowed (training.max_skipped); lower "
            "optimizer.lr, check the data, or use another training.precision"
        )


def refuse_nan(step: int, checkpoints: Path) -> None:
    """Raise an error about losses that are not numbers.

    Raises:
        FtmonError: always; it names the checkpoint to resume from.
    """
    latest = checkpoints / "latest"
    kept = f"go on from {checkpoints / latest.read_text().strip()}" if latest.is_file() else "there is no checkpoint"
    raise FtmonError(
        f"the loss is not a number since before step {step} (training.stop_after_nan); {kept}, with a lower "
        "optimizer.lr or without the rows that caused it"
    )
