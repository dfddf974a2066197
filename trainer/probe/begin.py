"""Making this process a rank: its probe, its publisher, and its last words."""

import os

from . import active, ending, guard, place
from .about import About
from .probe import Probe
from .publisher import Publisher


def begin_rank(sends_logs: bool = False) -> Probe | None:
    """Make this process's probe and start its publisher; returns the one that is there when there is one already."""
    if active.probe is not None or active.forked:
        return active.probe
    if not os.environ.get("FTMON_RUN"):
        return None
    try:
        place.settle()
        run = place.folder()
        probe = Probe(About.of_this_process(), sends_logs)
        publisher = Publisher(probe, run)
        ending.install(probe, publisher)
        active.probe = probe
        probe.say_hello()
        publisher.start()
    except Exception as error:
        guard.log_error("cannot start the probe", error)
        return None
    return probe
