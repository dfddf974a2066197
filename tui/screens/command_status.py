"""Sends commands by one key from a screen: refused at once where impossible, else shown as answers come."""

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


class CommandStatus:
    """Sends commands and shows their state at the foot of the screen."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._open: dict[str, str] = {}
        """Commands without a final answer, and the last text shown of each."""

    def ask(self, verb: Verb, words: str) -> None:
        """Send a command; ``words`` is the text to show once it is accepted."""
        app_state, source = self._app_state, self._app_state.source
        if app_state.read_only:
            app_state.show_message(f"read-only: {verb.name} is refused", "warning")
        elif source is None or not source.can_command:
            replay = source is not None and source.transport.mode == "replay"
            app_state.show_message(
                f"cannot {verb.name}: {'a replay has no processes' if replay else 'the run has no hub'}", "warning"
            )
        else:
            number = source.send(verb)
            app_state.show_message(f"{words} ...")
            self._open[number] = ""

    def tick(self) -> None:
        """Show news of the sent commands."""
        source = self._app_state.source
        for number in list(self._open) if source is not None else []:
            record = source.commands.get(number) if source is not None else None
            if record is not None:
                self._show(number, record)

    def _show(self, number: str, record: CommandRecord) -> None:
        accepted, result = record.accepted, record.result
        if result is not None:
            del self._open[number]
            words = result_words(record.verb.name, result)
            self._app_state.show_message(words, "good" if result.ok else "error")
        elif accepted is not None and not accepted.ok:
            del self._open[number]
            self._app_state.show_message(f"{record.verb.name} refused: {sanitize(accepted.text, 200)}", "error")


def result_words(verb: str, result: Result) -> str:
    """Return a command's result on one line; of a snapshot, its path."""
    paths = snapshot_paths(result)
    if verb == "snapshot" and result.ok and paths:
        return f"snapshot written: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    if result.ok and verb in _DONE:
        return _DONE[verb]
    return sanitize(result.text or f"{verb}: {'done' if result.ok else 'failed'}", 300)


def snapshot_paths(result: Result) -> list[str]:
    """Return the files in the answers of a ``snapshot`` command's ranks."""
    answers = result.data.get("answers")
    found: list[str] = []
    for answer in answers.values() if isinstance(answers, dict) else ():
        path = answer.get("path") if isinstance(answer, dict) else None
        if isinstance(path, str) and path:
            found.append(sanitize(path))
    return found
