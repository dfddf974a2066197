"""``ftmon data check``: prints a report on the training data."""

from argparse import Namespace

from ..access.trainer_process import become, require_training
from ..output.terminal import draws_ascii

CHECK = "ftmon.trainer.recipe.data_check"


def check(arguments: Namespace) -> int:
    """Check the data of a configuration; return 0 for clean data, 1 for findings, 2 if no training would start."""
    require_training()
    words: list[str] = [f"--samples={arguments.samples}"]
    words += [f"--{name}" for name in ("json", "color") if getattr(arguments, name)]
    words += ["--ascii"] if draws_ascii(arguments) else []
    become(CHECK, [*words, "--", arguments.config, *arguments.overrides], ends_at_once=True)
