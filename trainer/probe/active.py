"""The one probe of this process, where every hook looks for it; None until the process turns out to be a rank."""

from threading import get_ident
from typing import TYPE_CHECKING

from .tracker import Counts

if TYPE_CHECKING:
    from .probe import Probe

probe: "Probe | None" = None
forked = False
"""This process is a fork of a rank: it never gets a probe."""
counts = Counts()


def mine() -> "Probe | None":
    """Return the probe when it is on and the caller is the training thread: the only thread that moves phases."""
    found = probe
    return found if found is not None and found.enabled and found.thread == get_ident() else None
