"""Makes this process a rank: its probe, its publisher, and the hooks for its end."""

import os

from ....protocol.run.environment import RANK_PID_ENV
from ....protocol.run.rundir import RunDir
from .. import active, guard
from ..link import run_files
from ..link.options import read_options
from ..link.publisher import Publisher
from ..link.redirect import redirect_output
from ..link.tee import tee_output
from ..loop.training import Training
from ..memory.annotations import PhaseMarks
from ..oom.allocation_failure import AllocationFailures
from ..oom.history import OomHistory
from ..oom.hold import Hold
from ..oom.report import OomReporter
from ..phases.outbox import Outbox
from ..phases.pace import Pace
from ..phases.stop_request import StopRequest
from ..probe import Probe
from ..rank.context import RankContext, place_of_this_process
from ..rank.hello import Introduction
from ..rank.trained import Trained
from . import ending


def begin_rank(sends_logs: bool = False) -> Probe | None:
    """Create this process's probe and start its publisher; return the existing probe if there is one.

    Args:
        sends_logs: whether to send the process's output too, because it is not redirected into files.
    """
    if active.probe is not None or active.forked:
        return active.probe
    if not os.environ.get("FTMON_RUN"):
        return None
    try:
        run_files.settle()
        rank = RankContext(*place_of_this_process(), RunDir(run_files.folder()), read_options(), sends_logs)
        return _begin(rank)
    except Exception as error:
        guard.log_error("cannot start the probe", error)
        return None


def become_rank() -> None:
    """Make this process a rank if it is not one yet.

    Called when it creates an optimizer or an engine, or computes gradients without one.
    """
    if active.probe is not None or active.forked:
        return
    if os.environ.get(RANK_PID_ENV) or not os.environ.get("FTMON_RUN"):
        return
    os.environ[RANK_PID_ENV] = str(os.getpid())
    redirect_output(place_of_this_process()[0])
    begin_rank()


def _begin(rank: RankContext) -> Probe:
    introduction, trained, outbox, pace, stop = Introduction(rank), Trained(), Outbox(), Pace(), StopRequest()
    training = Training(rank, introduction, trained, outbox, active.counts)
    tracker = training.tracker
    hold, history, phase_marks = Hold(rank.options), OomHistory(), PhaseMarks()
    reporter = OomReporter(rank, tracker, trained, outbox, hold, history, phase_marks)
    failures = AllocationFailures(rank, reporter, hold, training.phases.check_device)
    training.on_error, training.phases.met_cuda = failures.report, failures.watch_cuda
    publisher = Publisher(
        rank,
        introduction,
        trained,
        tracker,
        outbox,
        pace,
        stop,
        hold,
        history,
        phase_marks,
        training.loading.last_iterator,
    )
    ending.install(rank, training, stop, publisher)
    probe = Probe(rank.rank, training, stop)
    active.training, active.probe = training, probe
    failures.await_cuda()
    outbox.send_hello()
    publisher.start()
    if rank.sends_logs:
        tee_output(rank.rank, outbox.hand_over)
    return probe
