"""Sends commands by one key from a screen: refused at once if impossible, else their answers are shown."""

from ...protocol.messages.control import Result
from ...protocol.messages.verbs import Verb
from ...protocol.text import sanitize
from ..source.base import CommandRecord
from ..widgets.state.app_state import AppState

_DONE = {
    "compose": "a step was analysed",
    "arm": "stacks were recorded: the cause is below",
}
"""Text when a verb is done."""


def refusal(app_state: AppState, verb: str) -> str:
    """Return the reason why a command cannot be sent to the run; empty if it can."""
    source = app_state.source
    if app_state.read_only:
        return f"read-only: {verb} is refused"
    if source is None or not source.can_command:
        replay = source is not None and source.transport.mode == "replay"
        return f"cannot {verb}: {'a replay has no processes' if replay else 'the run has no hub'}"
    return ""


class CommandStatus:
    """Sends commands and shows their state at the bottom of the screen."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._open: set[str] = set()
        """Commands without a final answer, by id."""

    def ask(self, verb: Verb, words: str) -> None:
        """Send a command; ``words`` is the text to show once it is accepted."""
        app_state, source = self._app_state, self._app_state.source
        why = refusal(app_state, verb.name)
        if why or source is None:
            app_state.show_message(why, "warning")
            return
        self._open.add(source.send(verb))
        app_state.show_message(f"{words} ...")

    @property
    def waiting(self) -> bool:
        """Whether a command has no final answer yet."""
        return bool(self._open)

    def tick(self) -> None:
        source = self._app_state.source
        for number in list(self._open) if source is not None else []:
            record = source.commands.get(number) if source is not None else None
            if record is not None:
                self._show(number, record)

    def _show(self, number: str, record: CommandRecord) -> None:
        accepted, result = record.accepted, record.result
        if result is not None:
            self._open.discard(number)
            words = result_words(record.verb.name, result)
            tone = "error" if not result.ok else "warning" if without_native(result) else "good"
            self._app_state.show_message(words, tone)
        elif accepted is not None and not accepted.ok:
            self._open.discard(number)
            self._app_state.show_message(f"{record.verb.name} refused: {sanitize(accepted.text, 200)}", "error")


def result_words(verb: str, result: Result) -> str:
    """Return a command's result in one line; for a snapshot its path; for native stacks why a rank has none."""
    paths = snapshot_paths(result)
    if verb == "snapshot" and result.ok and paths:
        return f"snapshot written: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    for rank, why in without_native(result).items():
        return f"rank {rank}, no native frames: {why}"
    if result.ok and verb in _DONE:
        return _DONE[verb]
    return sanitize(result.text or f"{verb}: {'done' if result.ok else 'failed'}", 300)


def snapshot_paths(result: Result) -> list[str]:
    """Return the files in the answers of a ``snapshot`` command's ranks."""
    return [*_told(result, "path").values()]


def without_native(result: Result) -> dict[str, str]:
    """Return reasons of missing native frames, by rank, from the answers to a ``stacks`` command for them."""
    return _told(result, "no_native")


def _told(result: Result, field: str) -> dict[str, str]:
    """Return a text field of the ranks' answers, by rank; ranks without it are omitted."""
    answers = result.data.get("answers")
    found: dict[str, str] = {}
    for rank, answer in answers.items() if isinstance(answers, dict) else ():
        text = answer.get(field) if isinstance(answer, dict) else None
        if isinstance(text, str) and text:
            found[sanitize(str(rank))] = sanitize(text, 200)
    return found
