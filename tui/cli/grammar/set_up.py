"""The commands of the group "set up" of ``ftmon --help``."""

from typing import TYPE_CHECKING

from .parts import add_command

if TYPE_CHECKING:
    from .parts import Commands

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: "Commands") -> None:
    """Add the group's commands."""
    _doctor(commands)
    _keys(commands)
    _completion(commands)


def _doctor(commands: "Commands") -> None:
    doctor = add_command(
        commands, "doctor", "set_up.doctor:doctor", "check what works on this machine, with fixes for the rest"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _keys(commands: "Commands") -> None:
    keys = add_command(commands, "keys", "watch.remote:manage_keys", "show and change which hosts may attach")
    keys.add_argument("--allow", metavar="KEY", help="allow this public key to attach")
    keys.add_argument("--remark", default="", metavar="TEXT", help="a note about the owner of the key")
    keys.add_argument("--remove", metavar="KEY", help="revoke this public key")


def _completion(commands: "Commands") -> None:
    completion = add_command(
        commands, "completion", "set_up.complete:completion", "write a completion script for a shell"
    )
    completion.add_argument("shell", choices=SHELLS)
