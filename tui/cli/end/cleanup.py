"""``ftmon cleanup``: finds processes that earlier runs left, and ends them."""

import subprocess
import sys
from argparse import Namespace


def cleanup(arguments: Namespace) -> int:
    """Run the trainer's clean-up, which asks on this terminal; return its status."""
    words = [f"--{name}" for name in ("yes", "json", "elsewhere") if getattr(arguments, name)]
    return subprocess.run(
        [sys.executable, "-P", "-m", "ftmon.trainer.host.end.cleanup", *words], check=False
    ).returncode
