"""Makes this process a rank: its probe, its publisher, and the hooks for its end."""

import os
from functools import partial

from ....protocol.run.environment import RANK_PID_ENV
from ....protocol.run.rundir import RunDir
from .. import active, guard
from ..events import TorchEvents
from ..link import output
from ..link.publisher import Publisher
from ..loop.training import Training
from ..memory.snapshots import PhaseMarks
from ..oom.console import Hold
from ..oom.report import AllocationFailures, OomHistory, OomReporter
from ..phases.tracker import Pace, StopRequest
from ..probe import Probe
from ..rank.context import RankContext, place_of_this_process
from . import ending


def begin_rank(sends_logs: bool = False) -> Probe | None:
    """Create this process's probe and start its publisher; return the existing probe if there is one."""
    if active.probe is not None or active.forked:
        return active.probe
    if not os.environ.get("FTMON_RUN"):
        return None
    try:
        output.settle()
        rank = RankContext(*place_of_this_process(), RunDir(output.folder()), output.read_options(), sends_logs)
        return _begin(rank)
    except Exception as error:
        guard.log_error("cannot start the probe", error)
        return None


def become_rank() -> None:
    """Make this process a rank if it is not one yet; called when it creates an optimizer or an engine."""
    if active.probe is not None or active.forked:
        return
    if os.environ.get(RANK_PID_ENV) or not os.environ.get("FTMON_RUN"):
        return
    os.environ[RANK_PID_ENV] = str(os.getpid())
    output.redirect_output(place_of_this_process()[0])
    begin_rank()


def _begin(rank: RankContext) -> Probe:
    training, pace, stop = Training(rank, active.counts), Pace(), StopRequest()
    hold, history, phase_marks = Hold(rank.options), OomHistory(), PhaseMarks()
    reporter = OomReporter(rank, training.tracker, training.trained, training.outbox, hold, history, phase_marks)
    failures = AllocationFailures(rank, reporter, hold, training.phases.check_device)
    training.on_error, training.phases.met_cuda = failures.report, failures.watch_cuda
    stop.asked = partial(training.asked_to_stop, "ftmon stop")
    publisher = Publisher(training, pace, stop, hold, history, phase_marks)
    ending.install(training, stop, publisher)
    active.events, active.probe = TorchEvents(training), Probe(training, stop)
    failures.await_cuda()
    training.outbox.send_hello()
    training.phases.check_device()
    publisher.capture_first()  # the process may have called a model already
    publisher.start()
    if rank.sends_logs:
        output.tee_output(rank.rank, training.outbox.hand_over)
    return active.probe
