"""``ftmon cleanup``: the training side looks for what earlier runs left running, and ends it."""

import subprocess
import sys
from argparse import Namespace


def cleanup(arguments: Namespace) -> int:
    """Hand over to the trainer's own clean-up, which asks on this terminal; return its status."""
    words = [option for option, given in (("--yes", arguments.yes), ("--json", arguments.json)) if given]
    return subprocess.run([sys.executable, "-P", "-m", "ftmon.trainer.cleanup", *words], check=False).returncode
