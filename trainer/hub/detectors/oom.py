"""Out of memory: the allocator's own numbers at the moment of the failure, in words, with the mend they point to."""

from ....protocol.control import Alert
from ....protocol.telemetry import Failure, Hello, Oom, Step
from ....protocol.text import gib
from .book import AlertBook, Key
from .words import first_line

OOM_WORDS = ("outofmemoryerror", "out of memory", "can't allocate memory", "cannot allocate memory", "memoryerror")
TRACEBACK_LIMIT = 8000


def is_oom(error: str) -> bool:
    """Tell whether an exception's words say that memory ran out (CUDA's, the CPU allocator's or Python's own)."""
    lowered = error.lower()
    return any(words in lowered for words in OOM_WORDS)


class OomDetector:
    """Turns out-of-memory messages into alerts; a rank that caught the error and steps on resolves its own."""

    def __init__(self, book: AlertBook) -> None:
        self._book = book
        self._standing: dict[int, tuple[Key, int]] = {}
        """For each rank that ran out of memory: its alert, and the step in which it did."""
        self._on_host: set[int] = set()

    def hello(self, hello: Hello) -> None:
        """Learn whose memory a rank's numbers are: a GPU's, or the host's."""
        if hello.memory_measure == "cuda":
            self._on_host.discard(hello.rank)
        else:
            self._on_host.add(hello.rank)

    def oom(self, t: float, oom: Oom) -> list[Alert]:
        """Raise the alert of one failed allocation."""
        key: Key = ("oom", oom.rank, oom.phase, "allocation")
        self._standing[oom.rank] = key, oom.step
        unused = max(0, oom.reserved_bytes - oom.allocated_bytes)
        elsewhere = max(0, oom.device_total_bytes - oom.device_free_bytes - oom.reserved_bytes)
        shape = f" Batch shape {oom.batch_shape}." if oom.batch_shape else ""
        where = f" in {oom.phase}" if oom.phase else ""
        host = oom.rank in self._on_host
        device, holder, others = (
            ("host", "this process holds", "other processes")
            if host
            else ("device", "PyTorch holds", "CUDA context, NCCL, other processes")
        )
        return self._book.raise_alert(
            t,
            "oom",
            "error",
            f"rank {oom.rank} out of memory{where}: wanted {gib(oom.requested_bytes)}, "
            f"{gib(oom.device_free_bytes)} free",
            rule="allocation",
            rank=oom.rank,
            step=oom.step,
            phase=oom.phase,
            text=(
                f"Tried to allocate {gib(oom.requested_bytes)} in step {oom.step}. Of {gib(oom.device_total_bytes)} "
                f"the {device} has {gib(oom.device_free_bytes)} free; {holder} {gib(oom.reserved_bytes)}: "
                f"{gib(oom.allocated_bytes)} allocated, {gib(unused)} reserved but unallocated. Outside of it are "
                f"{gib(elsewhere)} ({others}).{shape} {_mend(oom, unused, elsewhere, host=host)}"
            ),
            evidence={
                "requested_bytes": oom.requested_bytes,
                "device_free_bytes": oom.device_free_bytes,
                "device_total_bytes": oom.device_total_bytes,
                "allocated_bytes": oom.allocated_bytes,
                "reserved_bytes": oom.reserved_bytes,
                "reserved_unallocated_bytes": unused,
                "elsewhere_bytes": elsewhere,
                "batch_shape": oom.batch_shape,
                "message": oom.message[:2000],
                "stack": oom.stack[-20:],
            },
        )

    def failure(self, t: float, failure: Failure) -> list[Alert] | None:
        """Take over a failure for want of memory; None: this failure is about something else."""
        if not is_oom(failure.error):
            return None
        key = self.standing(failure.rank)
        if key is not None:
            traceback = failure.traceback[-TRACEBACK_LIMIT:]
            return self._book.annotate(
                t, key, {"error": failure.error, "traceback": traceback}, "The script did not catch it and failed."
            )
        where = f" in {failure.phase}" if failure.phase else ""
        self._standing[failure.rank] = ("oom", failure.rank, failure.phase, "exception"), failure.step
        return self._book.raise_alert(
            t,
            "oom",
            "error",
            f"rank {failure.rank} out of memory{where}: {first_line(failure.error)}",
            rule="exception",
            rank=failure.rank,
            step=failure.step,
            phase=failure.phase,
            text=(
                f"{first_line(failure.error, 1000)}. The script did not catch it and failed in step {failure.step}. "
                "Use a smaller micro-batch with more accumulation, gradient checkpointing, or a higher ZeRO stage."
            ),
            evidence={"error": failure.error, "traceback": failure.traceback[-TRACEBACK_LIMIT:]},
        )

    def step(self, t: float, step: Step) -> list[Alert]:
        """A step of a rank that ran out of memory before: its script caught the error and went on."""
        if not self._standing:
            return []
        known = self._standing.get(step.rank)
        # A step from before it may come in later: steps wait for their device times.
        if known is None or step.step < known[1]:
            return []
        del self._standing[step.rank]
        return self._book.resolve(t, known[0], f"The script caught it and finished step {step.step}.")

    def standing(self, rank: int) -> Key | None:
        """Return the key of a rank's unresolved out-of-memory alert, or None."""
        known = self._standing.get(rank)
        return known[0] if known is not None else None

    def restore(self, alert: Alert) -> None:
        """Take in an alert of the recording."""
        if alert.rank is not None and alert.resolved is None:
            rule = str(alert.evidence.get("rule", ""))
            self._standing[alert.rank] = ("oom", alert.rank, alert.phase, rule), alert.step or 0


def _mend(oom: Oom, unused: int, elsewhere: int, *, host: bool) -> str:
    if host and oom.device_free_bytes >= oom.requested_bytes:
        return (
            "The host had that much: a limit refused it. Look at ulimit -v, the control group's memory limit and "
            "vm.overcommit_memory."
        )
    if not host and unused >= oom.requested_bytes > 0:
        return (
            "The unallocated part would have been enough in one piece: memory is fragmented. Set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    if elsewhere > 0.25 * oom.device_total_bytes:
        return "Much of the device is held outside of this process: see which processes share it."
    if oom.phase == "optimizer":
        return "A fused optimizer, a higher ZeRO stage or optimizer offload needs less in this phase."
    return (
        "Use a smaller micro-batch with more gradient accumulation, shorter sequences, gradient checkpointing, or a "
        "higher ZeRO stage."
    )
