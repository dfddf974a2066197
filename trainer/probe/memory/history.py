"""Switches PyTorch's recorder of allocations between numbers, stacks and off; leaves it alone if the script uses it.

The recorder is one per process and has one ring of entries a device. It is on all the time, numbers only (0.4 % of a
55 ms step, measured on an H200); with Python stacks it costs 23 %, so these are recorded for single phases or steps.
The ring's size is never changed without clearing it: PyTorch would then write past its end or out of order. An entry
uses 150 bytes or so, and a ring that leaves the processor's caches costs half as much again (0.45 ms instead of 0.29
ms in steps of 4,330 entries, on an H200's host), so its capacity is a step and a half.
"""

import functools
import gc
import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

MIN_ENTRIES = 2_000
MAX_ENTRIES = 25_000
STEPS_KEPT = 1.5
"""Steps that the ring holds: a failure in a step's last phase is explained by all of the step's allocations."""
LONG_ENTRIES = 200_000
STEP_ENTRIES = 100_000
"""Capacity for every action of one step and some of its neighbours'; a step has some 15,000."""

Mode = Literal["off", "numbers", "stacks"]


class Recording:
    """The recorder of this process; any thread may switch it.

    It stays as it is before the first switch. From ``watch_script`` on, switches by the script are detected.
    """

    def __init__(self) -> None:
        self._mode: Mode = "off"
        self.cleared = 0
        """Number of times the history was cleared; a reader of a span compares the counts at its two ends."""
        self.keeps_history = False
        """Whether this PyTorch can switch between numbers and stacks without clearing the ring (by its arguments)."""
        self.owner = ""
        """Present exclusive user of the recorder: stacks are recorded for one reader at a time."""
        self.entries = 0
        """Capacity of the ring, in entries."""
        self._usual = MAX_ENTRIES
        self._can_skip = False
        self._lock = threading.Lock()

    @property
    def mode(self) -> Mode:
        """The probe's present recording."""
        return "off" if self.by_script else self._mode

    @property
    def by_script(self) -> bool:
        """Whether the script has switched the recorder itself, and so owns it from then on."""
        return _by_script

    def claim(self, who: str) -> bool:
        """Acquire the recorder for ``who``; False while another has it."""
        with self._lock:
            if self.owner not in ("", who):
                return False
            self.owner = who
            return True

    def release(self) -> None:
        """Release the recorder."""
        self.owner = ""

    def fit(self, entries: int) -> None:
        """Set the capacity of later rings for numbers from the entries of a step."""
        self._usual = min(MAX_ENTRIES, max(MIN_ENTRIES, int(entries * STEPS_KEPT)))

    def numbers(self, *, whole: bool = False) -> bool:
        """Record sizes and addresses only; return False if the recorder is the script's.

        Right after stacks, which are about to be read, their ring is kept if PyTorch can do that. The long ring is not:
        it is read before.

        Args:
            whole: begin a new history with every action, to be read a step later. Requests to free are needed because
                the counters drop a block at its request, also while it waits for another stream.
        """
        options = {"context": None} if whole else {"context": None, **self._fewer()}
        usual = MAX_ENTRIES if self.mode == "stacks" and self.entries == MAX_ENTRIES else self._usual
        return self._switch("numbers", STEP_ENTRIES if whole else usual, options, fresh=whole)

    def stacks(self, *, long: bool = False, frees: bool = False) -> bool:
        """Record with the Python stack of every allocation; return False if the recorder is the script's.

        Requests to free are recorded too, unless only ``long`` is set: a phase's peak is found by them.

        Args:
            long: use a ring of ``LONG_ENTRIES`` and begin a new history. Otherwise the history continues if PyTorch can
                do that (``keeps_history``).
            frees: record stacks of frees as well.
        """
        options = {"context": "all" if frees else "alloc", "stacks": "python"}
        if long and not frees:
            options |= self._fewer()
        return self._switch("stacks", LONG_ENTRIES if long else MAX_ENTRIES, options, fresh=long)

    def off(self) -> bool:
        """Stop recording and discard the history; return False if the recorder is the script's."""
        with self._lock:
            record = self._recorder()
            if self.by_script:
                return False
            record(None)
            self._mode, self.entries = "off", 0
            self.cleared += 1
            return True

    def read(self, device: int) -> list[dict[str, Any]]:
        """Return the entries of one device, oldest first; 0.6 us each, under the interpreter's lock."""
        traces = self.snapshot()["device_traces"]
        return traces[device] if device < len(traces) else []

    def snapshot(self) -> dict[str, Any]:
        """Return segments and entries of all devices, in PyTorch's form; holds the lock as ``read`` does."""
        import torch

        core: Any = torch._C
        collects = gc.isenabled()
        gc.disable()  # it would traverse all objects of the script, repeatedly, without garbage to find
        try:
            return core._cuda_memorySnapshot(None)
        finally:
            if collects:
                gc.enable()

    def _fewer(self) -> dict[str, Any]:
        """Return options that leave out requests to free, a third of all entries; completions are enough."""
        self._recorder()
        return {"skip_actions": ["free_requested"]} if self._can_skip else {}

    def _switch(self, mode: Mode, entries: int, options: dict[str, Any], *, fresh: bool) -> bool:
        with self._lock:
            record = self._recorder()
            if self.by_script:
                return False
            fresh = fresh or entries != self.entries
            if fresh or not self.keeps_history:
                if self.mode != "off":
                    record(None)  # clears the ring in every PyTorch
                self.cleared += 1
            record("all", max_entries=entries, **options)
            self._mode, self.entries = mode, entries
            return True

    def _recorder(self) -> Callable[..., None]:
        """Return PyTorch's own function."""
        real = watch_script()
        parameters = inspect.signature(real).parameters
        self.keeps_history = "clear_history" in parameters
        self._can_skip = "skip_actions" in parameters
        return real


_by_script = False
_real: Callable[..., None] | None = None


def watch_script() -> Callable[..., None]:
    """Detect from now on switches of the recorder by the script; return PyTorch's own function."""
    global _real, _by_script
    if _real is not None:
        return _real
    import torch

    memory: Any = torch.cuda.memory
    real = memory._record_memory_history

    @functools.wraps(real)
    def recording(*args: Any, **kwargs: Any) -> Any:
        global _by_script
        _by_script = True
        return real(*args, **kwargs)

    _real = real
    if torch.cuda.is_initialized():  # before, there is no allocator, and a query would crash
        _by_script = bool(getattr(torch._C, "_cuda_isHistoryEnabled", bool)())
    memory._record_memory_history = recording
    if getattr(torch.cuda, "_record_memory_history", None) is real:
        setattr(torch.cuda, "_record_memory_history", recording)  # noqa: B010
    return real
