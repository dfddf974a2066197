"""Help of the whole ``ftmon`` command, with its commands grouped by purpose."""

import argparse
from difflib import get_close_matches

GROUPS = {
    "train": ("predict", "demo", "train", "resume", "sweep", "data", "chat"),
    "watch": ("run", "attach", "replay", "ls", "status", "logs"),
    "investigate": ("memory", "events", "oom", "snapshot", "capture", "stacks", "console", "report", "compare"),
    "end": ("stop", "kill", "release", "cleanup"),
    "set up": ("doctor", "keys", "completion"),
}
INTERNAL = ("relay",)
"""Commands that other commands run; help leaves them out."""


class GroupedParser(argparse.ArgumentParser):
    """A parser whose help lists its commands under ``GROUPS``."""

    def _check_value(self, action: argparse.Action, value: str) -> None:
        """Refuse an unknown command with a suggestion, instead of the list of all commands."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = [name for names in GROUPS.values() for name in names]
            near = get_close_matches(value, known, n=1, cutoff=0.7)
            meant = f"did you mean {near[0]}?" if near else "ftmon --help lists them"
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {meant}")
        super()._check_value(action, value)

    def format_help(self) -> str:
        """Return usage, description, options, the groups of commands and the epilog."""
        helps: dict[str, str] = {}
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s [OPTIONS] COMMAND ...", [], [])
        formatter.add_text(self.description)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {str(choice.dest): choice.help or "" for choice in action._choices_actions}
        for title, names in GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([_Listed(name, helps[name]) for name in names])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class _Listed(argparse.Action):
    """A command as one line of the help."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(option_strings=[], dest=name, metavar=name, help=text)

    def __call__(self, *_: object) -> None:
        """Do nothing: a line of the help is not parsed."""
