"""Notifications of a run's events, and the file with their targets.

The targets are not kept in ``run.json``, which is copied into the recording: a webhook's address is a secret.
"""

import shutil
from collections.abc import Mapping, Sequence
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from ..errors import UsageError
from ..host.process import write_private
from ..messages.control import Alert, AlertKind, RunState
from ..messages.wire import Message
from ..text import sanitize
from .end import first_failure
from .rundir import RunDir

Event = Literal["finish", "failure", "hang", "oom", "nan"]
EVENTS: tuple[Event, ...] = get_args(Event)
TERMINAL = "terminal"
"""Target: a terminal escape sequence (OSC 9) and the bell, from the app or command that shows the run."""
DESKTOP = "desktop"  # target: a notification on this host's desktop
_FILE = "notify.json"
_OF_ALERTS: Mapping[AlertKind, Event] = {"hang": "hang", "oom": "oom"}
_OF_FINDINGS: Mapping[str, Event] = {"nan_loss": "nan", "nan_gradient": "nan"}
"""Events by the finding in the evidence of an alert of kind ``health``."""
_OF_STATES: Mapping[str, Event] = {"finished": "finish", "stopped": "finish", "failed": "failure"}


class Notify(msgspec.Struct, frozen=True):
    """Targets and events of notifications."""

    targets: list[str]  # `terminal`, `desktop`, an http(s) address, or a shell command
    events: list[Event]


class Notice(msgspec.Struct, frozen=True):
    """One event; sent as JSON to a command's standard input, or as the body of a webhook's request."""

    event: Event
    run: str
    host: str
    time: float  # seconds since the epoch
    title: str
    text: str = ""


def make_notify(targets: Sequence[str], events: str) -> Notify | None:
    """Return the targets and events of notifications; None: there are no targets.

    ``events`` has some of ``EVENTS``, separated by commas; empty: all. Raises ``UsageError`` for an unknown event, and
    for events without a target.
    """
    names = [name.strip() for name in events.split(",") if name.strip()]
    if not targets and names:
        raise UsageError("--notify-on needs --notify TARGET")
    for name in names:
        if name not in EVENTS:
            raise UsageError(f"--notify-on {name}: must be of {', '.join(EVENTS)}")
    if not targets:
        return None
    return Notify(list(dict.fromkeys(targets)), [event for event in EVENTS if not names or event in names])


def check_target(target: str) -> None:
    """Raise ``UsageError`` for a target that cannot work here."""
    if not target.strip():
        raise UsageError("--notify needs a command, a webhook's address, 'desktop' or 'terminal'")
    if is_webhook(target):
        try:
            host, _ = urlsplit(target).hostname, urlsplit(target).port
        except ValueError as error:
            raise UsageError(f"--notify {target}: not an address: {error}") from None
        if urlsplit(target).username is not None:
            raise UsageError(
                f"--notify {shown(target)}: a user and password in an address are not sent; use a command such as curl"
            )
        if not host:
            raise UsageError(f"--notify {target}: the address names no host")
        if " " in target or not target.isascii() or not target.isprintable():
            raise UsageError(f"--notify {target!r}: write spaces and special characters of an address as %XX")
    if target == DESKTOP and shutil.which("notify-send") is None:
        raise UsageError("--notify desktop: notify-send is not installed here; over SSH use 'terminal' or a webhook")


def shown(target: str) -> str:
    """Name a target without what may be secret in it: a webhook's path and query, a command's arguments."""
    if is_webhook(target):
        return f"{urlsplit(target).scheme}://{urlsplit(target).hostname}"
    word = target.split(maxsplit=1)[0]
    return "a command" if "=" in word else word  # a variable of its environment


def is_webhook(target: str) -> bool:
    """Return whether a target is the address of a web server."""
    return target.startswith(("http://", "https://"))


def read_notify(run: RunDir) -> Notify | None:
    """Return the targets and events of notifications; None if there are none, or the file cannot be read."""
    try:
        return msgspec.json.decode((run.path / _FILE).read_bytes(), type=Notify)
    except (OSError, msgspec.MsgspecError):
        return None


def write_notify(run: RunDir, notify: Notify) -> None:
    """Write the targets and events, for the run's hubs and for the apps that show it; mode 0600."""
    write_private(run.path / _FILE, msgspec.json.encode(notify))


class Notices:
    """Derives notices from a run's messages, each once; not for alerts raised before ``since`` (Unix time)."""

    def __init__(self, run: str, host: str, events: list[Event], since: float) -> None:
        self._run, self._host, self._events, self._since = run, host, frozenset(events), since
        self._notified: set[int | str] = set()
        self._alerts: dict[int, Alert] = {}  # the run's errors, one of which explains its failure

    def of(self, message: Message) -> Notice | None:
        """Return the notice for a message; None if there is none."""
        if isinstance(message, Alert):
            if message.severity == "error":
                self._alerts[message.id] = message
            event = _OF_ALERTS.get(message.kind) or _OF_FINDINGS.get(str(message.evidence.get("finding", "")))
            key: int | str = message.id
            if message.resolved is not None or message.severity == "info" or message.time < self._since:
                return None
            title, text = message.title, message.text
        elif isinstance(message, RunState):
            event, key = _OF_STATES.get(message.state), "end"
            title, text = f"{self._run} {message.state}", message.text
            first = first_failure(self._alerts.values()) if message.state == "failed" else None
            if first is not None:
                title, text = f"{title}: {first.title}", "; ".join(part for part in (text, first.text) if part)
        else:
            return None
        if event not in self._events or key in self._notified:
            return None
        self._notified.add(key)
        return Notice(event, self._run, self._host, message.time, sanitize(title, 300), sanitize(text, 2000))


def terminal_sequence(notice: Notice) -> str:
    """Return a notice as a terminal's notification: OSC 9 (iTerm2, kitty, WezTerm, Windows Terminal, ghostty) and BEL.

    tmux and screen forward BEL from a window that is not visible.
    """
    return f"\x1b]9;{notice.run}: {sanitize(notice.title, 120)}\x1b\\\a"
