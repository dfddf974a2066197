"""``ftmon doctor``: runs the terminal side's checks, and in a separate process the training side's."""

import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec

import msgspec

from ....protocol.checks import Check
from ....protocol.training_packages import TRAINING_PACKAGES
from ..output import terminal
from ..output.printable import print_json
from .doctor_terminal import own_checks

_MARKS = {"ok": ("✓", "ok"), "warning": ("▲", "!!"), "error": ("✖", "XX")}
_TRAINER_SECONDS = 120.0
"""Time limit: importing torch and DeepSpeed from a cold, shared disk is slow."""

INSTALL = 'pip install "ftmon[train]"'


def doctor(arguments: Namespace) -> int:
    """Print the checks of this machine; return 1 if one of them is an error."""
    groups = {"terminal": list(own_checks()), "training": trainer_checks()}
    broken = any(check.state == "error" for checks in groups.values() for check in checks)
    if arguments.json:
        print_json({"ok": not broken, **groups})
    else:
        plain = getattr(arguments, "ascii", False) or terminal.wants_ascii()
        for title, checks in groups.items():
            print(title)
            for check in checks:
                print(f"  {_MARKS[check.state][plain]} {check.name:<19} {check.text}")
                if check.remedy and check.state != "ok":
                    print(f"    {'':<19} {'->' if plain else '→'} {check.remedy}")
    return 1 if broken else 0


def trainer_checks() -> list[Check]:
    """Return the training side's checks; if that side is not installed, a single check that reports it."""
    if missing := missing_training_packages():
        return [Check("training side", "warning", f"not installed here ({', '.join(missing)} missing)", INSTALL)]
    command = [sys.executable, "-P", "-m", "ftmon.trainer.doctor", "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRAINER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Check("training side", "error", f"no answer in {_TRAINER_SECONDS:.0f} s: {' '.join(command)}")]
    try:
        return msgspec.json.decode(done.stdout, type=list[Check])
    except msgspec.MsgspecError:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        reason = words[-1] if words else f"ended with status {done.returncode}"
        return [Check("training side", "error", reason, INSTALL)]


def missing_training_packages() -> list[str]:
    """Return the missing packages that ftmon's own trainer requires, without importing any package."""
    return [name for name in TRAINING_PACKAGES if find_spec(name) is None]
