"""Sends notifications of a run: runs a command, posts to a webhook, shows a desktop notification.

A thread delivers them, so that a slow server does not delay the hub. After two failed retries, the notification is
dropped for that target, and the failure is logged.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ... import __version__
from ...protocol.messages.wire import Message
from ...protocol.run.notices import DESKTOP, TERMINAL, Notice, Notices, Notify, is_webhook, shown

TRY_AGAIN_SECONDS = (1.0, 5.0)
WEBHOOK_SECONDS = 10.0
COMMAND_SECONDS = 60.0
_KILL_SECONDS = 5.0
CLOSE_SECONDS = 20.0  # Time limit at the hub's end for notices in delivery


class DeliveryError(Exception):
    """A notice could not be delivered to a target."""


class Notifier(threading.Thread):
    """Delivers the notices of one run.

    ``failed`` is called, from this thread, with the target (``shown``: without what may be secret) and the reason.
    """

    def __init__(self, notify: Notify, run: str, host: str, failed: Callable[[str, str], object]) -> None:
        super().__init__(name="notifier", daemon=True)
        self._targets = [target for target in notify.targets if target != TERMINAL]
        self._notices = Notices(run, host, notify.events, since=time.time())
        self._failed = failed
        self._waiting: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._closing = threading.Event()

    def note(self, message: Message) -> None:
        """Queue the notices of a message of the stream; never waits."""
        notice = self._notices.of(message) if self._targets else None
        if notice is not None:
            self._waiting.put(notice)

    def close(self) -> None:
        """Deliver the queued notices, for ``CLOSE_SECONDS`` at most."""
        self._waiting.put(None)
        if self.is_alive():
            self.join(CLOSE_SECONDS)
        self._closing.set()

    def run(self) -> None:
        """Deliver until closed."""
        while (notice := self._waiting.get()) is not None:
            for target in self._targets:
                self._deliver(target, notice)

    def _deliver(self, target: str, notice: Notice) -> None:
        for pause in (*TRY_AGAIN_SECONDS, None):
            try:
                deliver(target, notice)
                return
            except Exception as error:  # any other would end the thread, and with it all later notices
                if pause is None or self._closing.wait(pause):
                    print(f"notify {shown(target)}: {error}", file=sys.stderr, flush=True)
                    self._failed(shown(target), str(error))
                    return


def deliver(target: str, notice: Notice) -> None:
    """Deliver one notice to one target. Raises ``DeliveryError`` if the target refused it or did not answer."""
    if is_webhook(target):
        _post(target, notice)
    elif target == DESKTOP:
        _run(["notify-send", "--app-name=ftmon", f"ftmon {notice.event}: {notice.run}", notice.title], notice)
    else:
        _run(["/bin/sh", "-c", target], notice)


def _post(address: str, notice: Notice) -> None:
    # Imported here, because it takes a twelfth of a hub's start, and few runs have a webhook.
    import http.client
    import urllib.error
    import urllib.request

    line = f"ftmon {notice.event}: {notice.run} on {notice.host}: {notice.title}"
    # Slack, Mattermost and Teams show a body's ``text``, Discord its ``content``.
    body = json.dumps({**msgspec.to_builtins(notice), "content": line, "text": line, "detail": notice.text}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"ftmon/{__version__}"}
    try:
        request = urllib.request.Request(address, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=WEBHOOK_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        raise DeliveryError(f"the server answered {error.code}") from None
    except http.client.InvalidURL:  # its text has parts of the address
        raise DeliveryError("the address is not valid") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DeliveryError(str(getattr(error, "reason", error))) from None


def _run(command: list[str], notice: Notice) -> None:
    fields = {
        f"FTMON_NOTICE_{name.upper()}": getattr(notice, name) for name in ("event", "run", "host", "title", "text")
    }
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    try:
        environment = {**os.environ, **fields}
        process = subprocess.Popen[bytes](command, stdin=subprocess.PIPE, env=environment, **quiet)
    except OSError as error:
        raise DeliveryError(f"{command[0]}: {error.strerror}") from None
    try:
        process.communicate(msgspec.json.encode(notice), timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(PermissionError, subprocess.TimeoutExpired):  # a command may run as another user
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILL_SECONDS)
        raise DeliveryError(f"was ended after {COMMAND_SECONDS:g} s") from None
    if process.returncode:
        raise DeliveryError(f"exit status {process.returncode}")
