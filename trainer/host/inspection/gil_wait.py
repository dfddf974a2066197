"""Finds ranks whose native code holds the GIL: faulthandler may read their frames from within a signal handler.

faulthandler reads the frames of all threads without the GIL. If a thread runs Python meanwhile, it may follow a frame
that no longer exists, and the process dies of SIGSEGV. No thread is assumed to run Python if the probe's thread waits
for the GIL without getting it, and each other thread sleeps or has used enough processor time that it would have
released the GIL if it ran Python; a garbage collection is native code. A thread in state D, for example on a page
fault, counts as runnable. The threads are sampled, not stopped, so this is not a proof: ``bench/RESULTS.md`` has the
error rates on an overloaded host.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .. import processes
from .stack_dump import DumpTarget

_SAMPLES, _SAMPLE_SECONDS = 8, 0.03
_LEAST_WAKEUPS = 2
_LONGEST_SECONDS = 0.045
"""A thread that waits for the GIL wakes up every 5 ms (``sys.getswitchinterval``), so at least ``_LEAST_WAKEUPS`` times
between two samples. A thread that waits for messages sleeps for a tenth of a second, so it wakes up at most once
between two samples that are at most ``_LONGEST_SECONDS`` apart. Samples delayed by an overloaded host prove nothing."""
RANKS_AT_ONCE = 4
"""Maximum number of ranks to sample together, because reading the state of 150 threads takes 5 ms."""
_LEAST_TICKS = 3
"""Processor time, in clock ticks, from the first sample to the last, after which a thread that runs Python would have
released the GIL. A thread in state R or D with less may hold the GIL without getting a processor."""


class Sample(NamedTuple):
    """State of a rank's threads at one moment."""

    begun: float
    ended: float
    """``time.monotonic`` before and after ``wakeups`` was read."""
    wakeups: int
    """Number of waits of the probe's thread so far; 0 if not readable."""
    threads: dict[int, tuple[str, int]]
    """State (proc(5)) and processor time, in clock ticks, of every other thread, by its id."""


def waiting_for_gil(targets: Iterable[DumpTarget]) -> set[int]:
    """Return the ranks whose native code holds the GIL. Blocks for a fifth of a second; not for use in a main loop.

    Takes at most ``RANKS_AT_ONCE`` ranks.
    """
    samples: dict[DumpTarget, list[Sample]] = {target: [] for target in targets}
    begun = time.monotonic()
    for number in range(_SAMPLES if samples else 0):
        time.sleep(max(0.0, begun + number * _SAMPLE_SECONDS - time.monotonic()))
        for target, found in samples.items():
            found.append(_sample(target))
    return {target.rank for target, found in samples.items() if is_held_by_native_code(found)}


def is_held_by_native_code(samples: Sequence[Sample]) -> bool:
    """Return whether the probe's thread waited for the GIL in all samples, and no other thread can have run Python."""
    if any(
        after.wakeups - before.wakeups < _LEAST_WAKEUPS or after.ended - before.begun > _LONGEST_SECONDS
        for before, after in pairwise(samples)
    ):
        return False
    first, last = samples[0].threads, samples[-1].threads
    unknown = {thread for sample in samples for thread, (state, _) in sample.threads.items() if state in "RD"}
    return unknown <= first.keys() & last.keys() and all(
        last[thread][1] - first[thread][1] >= _LEAST_TICKS for thread in unknown
    )


def _sample(target: DumpTarget) -> Sample:
    begun = time.monotonic()
    if target.dump is None:
        return Sample(begun, begun, 0, {})
    receiver = target.dump.receiver
    wakeups = int(processes.status(target.pid, receiver).get("voluntary_ctxt_switches", 0))
    ended = time.monotonic()
    threads: dict[int, tuple[str, int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{target.pid}/task"):
            if int(name) == receiver:
                continue
            read = processes.stat_fields(f"/proc/{target.pid}/task/{name}/stat")
            if read is not None:
                threads[int(name)] = read[1][0], int(read[1][11]) + int(read[1][12])
    return Sample(begun, ended, wakeups, threads)
