"""``ftmon chat``: replaces this process by the trainer's chat."""

from argparse import Namespace
from typing import NoReturn

from ..access.trainer_process import become, require_training

MODULE = "ftmon.trainer.recipe.chat"


def chat(arguments: Namespace) -> NoReturn:
    """Run the chat."""
    require_training()
    words: list[str] = []
    for name in ("system", "temperature", "top_p", "max_tokens", "seed", "device"):
        value = getattr(arguments, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    words += [f"--{name}" for name in ("whole", "debug") if getattr(arguments, name)]
    become(MODULE, [*words, "--", arguments.target])
