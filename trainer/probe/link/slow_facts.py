"""Reads slowly changing facts once a second, on the publisher thread, at no cost to the training thread.

The DataLoader's settings come from the iterator that the training thread fetched from last, compilations from Dynamo's
metrics (``torch._dynamo.utils``), which this module never imports.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ....protocol.messages.health import Compilation, Compiles, DataLoaderInfo
from ..phases.marks import wall_offset_ns
from ..phases.tracker import Tracker
from ..rank.hello import Introduction

_REASON = 400
_MOST = 32


class SlowFacts:
    """Reads slowly changing facts; for the publisher thread."""

    def __init__(
        self,
        rank: int,
        introduction: Introduction,
        tracker: Tracker,
        last_iterator: Callable[[], Any],
    ) -> None:
        self._rank = rank
        self._introduction = introduction
        self._tracker = tracker
        self._last_iterator = last_iterator
        self._last: Any = None
        self._total = 0
        self._trained_since = 0.0

    def loader(self) -> DataLoaderInfo | None:
        """Return the settings of the training's DataLoader if they have changed, else None."""
        iterator = self._last_iterator()
        if iterator is None or getattr(iterator, "_ftmon_eval", False):
            return None
        found = loader_info(iterator)
        if found is None or found == self._introduction.facts.get("loader"):
            return None
        return found

    def note_step(self, ended_ns: int) -> None:
        """Record when the first step ended (``time.perf_counter_ns``): earlier compilations are the run's warm-up."""
        if not self._trained_since:
            self._trained_since = (ended_ns + wall_offset_ns()) / 1e9

    def compiles(self) -> Compiles | None:
        """Return Dynamo's compilations since the last call; None: none."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        kept = getattr(utils, "_compilation_metrics", None)
        if not kept:
            return None
        try:
            metrics = list(kept)
        except RuntimeError:  # the training thread is adding one
            return None
        fresh: list[Any] = []
        for one in reversed(metrics):
            if one is self._last:
                break
            fresh.append(one)
        if not fresh:
            return None
        self._last = metrics[-1]
        functions = [found for one in reversed(fresh) if (found := self._compilation(one)) is not None]
        self._total += len(functions)
        return Compiles(self._rank, time.time(), self._total, functions[-_MOST:]) if functions else None

    def _compilation(self, metrics: Any) -> Compilation | None:
        name = getattr(metrics, "co_name", None)
        if not name:
            return None
        began = (getattr(metrics, "start_time_us", None) or 0) / 1e6
        warm_up = not self._trained_since or began < self._trained_since
        file = os.path.basename(str(getattr(metrics, "co_filename", "") or "?"))
        return Compilation(
            f"{name} ({file}:{getattr(metrics, 'co_firstlineno', 0)})"[:200],
            1 if warm_up else self._tracker.step + 1,
            float(getattr(metrics, "entire_frame_compile_time_s", None) or 0.0),
            str(getattr(metrics, "recompile_reason", None) or "")[:_REASON],
            str(getattr(metrics, "fail_type", None) or "")[:100],
        )


def loader_info(iterator: Any) -> DataLoaderInfo | None:
    """Return the settings of an iterator of PyTorch's DataLoader; None for other iterators."""
    workers = getattr(iterator, "_num_workers", None)
    if workers is None:
        return None
    return DataLoaderInfo(
        int(workers),
        int(getattr(iterator, "_prefetch_factor", None) or 0) if workers else 0,
        bool(getattr(iterator, "_pin_memory", False)),
        bool(getattr(iterator, "_persistent_workers", False)),
        _processors(),
    )


def _processors() -> int:
    """Return this rank's share of the processors that it may use."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks))
