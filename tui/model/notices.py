"""Notifications by the terminal that shows a run."""

import time
from collections.abc import Iterator

from ...protocol.messages import control
from ...protocol.run.notices import TERMINAL, Notice, Notices, read_notify
from ...protocol.run.rundir import RunDir
from .run import RunModel


class TerminalNotices:
    """Finds events of a run that cause a notification, from its creation on."""

    def __init__(self, run: RunDir) -> None:
        notify = read_notify(run)
        wanted = notify.events if notify is not None and TERMINAL in notify.targets else []
        self._since = time.time()
        self._notices = Notices(run.id, "", wanted, self._since) if wanted else None
        self._version = 0

    def fresh(self, model: RunModel) -> Iterator[Notice]:
        """Yield the notifications for changes of the model since the last call."""
        if self._notices is None:
            return
        if model.alerts.version != self._version:
            self._version = model.alerts.version
            for alert in model.alerts:
                notice = self._notices.of(alert)
                if notice is not None:
                    yield notice
        if model.ended and model.state_time >= self._since:
            notice = self._notices.of(
                control.RunState(model.state, model.state_time, model.state_text, model.exit_code)
            )
            if notice is not None:
                yield notice
