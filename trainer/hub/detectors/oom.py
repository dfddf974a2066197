"""Out of memory: the allocator's own numbers at the moment of the failure, in words, with the mend they point to."""

from ....protocol.control import Alert
from ....protocol.oom import Mend, OomReport
from ....protocol.telemetry import Failure, Oom, Step
from ....protocol.text import duration, gib
from .book import AlertBook, Key
from .words import first_line

OOM_WORDS = ("outofmemoryerror", "out of memory", "can't allocate memory", "cannot allocate memory", "memoryerror")
TRACEBACK_LIMIT = 8000
_MENDS_TOLD = 3


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
        self._held: set[int] = set()

    def oom(self, t: float, report: OomReport) -> list[Alert]:
        """Raise the alert of one failed allocation."""
        oom, verdict = report.oom, report.verdict
        key: Key = ("oom", oom.rank, oom.phase, "allocation")
        self._standing[oom.rank] = key, oom.step
        where = f" in {oom.phase}" if oom.phase else ""
        return self._book.raise_alert(
            t,
            "oom",
            "error",
            f"rank {oom.rank} out of memory{where}: wanted {gib(oom.requested_bytes)}, "
            f"{gib(oom.device_free_bytes)} free; {verdict.title.split(':')[0]}",
            rule="allocation",
            rank=oom.rank,
            step=oom.step,
            phase=oom.phase,
            text=" ".join(filter(None, (_numbers(oom), verdict.text, _mends(report.mends), _held(oom)))),
            evidence={
                "verdict": verdict.kind,
                "sure": verdict.sure,
                "why": verdict.evidence,
                "mends": [
                    {"kind": mend.kind, "setting": mend.setting, "frees_bytes": mend.frees_bytes, "bound": mend.bound}
                    for mend in report.mends
                ],
                "requested_bytes": oom.requested_bytes,
                "device_free_bytes": oom.device_free_bytes,
                "device_total_bytes": oom.device_total_bytes,
                "allocated_bytes": oom.allocated_bytes,
                "reserved_bytes": oom.reserved_bytes,
                "reserved_unallocated_bytes": max(0, oom.reserved_bytes - oom.allocated_bytes),
                "largest_free_bytes": oom.largest_free_bytes,
                "batch_shape": oom.batch_shape,
                "largest_shape": oom.largest_shape,
                "held": oom.held,
                "peer_timeout_s": oom.peer_timeout_s,
                "report": report.path,
                "snapshot": oom.snapshot or oom.snapshot_note,
                "message": oom.message[:2000],
                "stack": oom.stack[-20:],
            },
        )

    def held(self, t: float, rank: int, held: bool) -> list[Alert]:
        """Note that a rank is held at its out-of-memory error, or was let go."""
        key = self.standing(rank)
        if held:
            self._held.add(rank)
        if key is None or held or rank not in self._held:
            return []
        self._held.discard(rank)
        return self._book.annotate(t, key, {"held": False}, "It was let go.")

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


def _numbers(oom: Oom) -> str:
    host = oom.measure != "cuda"
    shape = f" Batch shape {oom.batch_shape}." if oom.batch_shape else ""
    return (
        f"Tried to allocate {gib(oom.requested_bytes)} in step {oom.step}. Of {gib(oom.device_total_bytes)} the "
        f"{'host' if host else 'device'} has {gib(oom.device_free_bytes)} free; "
        f"{'this process holds' if host else 'PyTorch holds'} {gib(oom.reserved_bytes)}: {gib(oom.allocated_bytes)} "
        f"allocated, {gib(max(0, oom.reserved_bytes - oom.allocated_bytes))} reserved but unallocated.{shape}"
    )


def _mends(mends: list[Mend]) -> str:
    shown = [f"{number}. {_mend(mend)}" for number, mend in enumerate(mends[:_MENDS_TOLD], 1)]
    return f"To try, in this order: {' '.join(shown)}" if shown else ""


def _mend(mend: Mend) -> str:
    frees = f" (frees {mend.bound} {gib(mend.frees_bytes)})" if mend.frees_bytes else ""
    setting = f" {mend.setting}." if mend.setting else ""
    return f"{mend.text}{frees}{setting}".replace("  ", " ")


def _held(oom: Oom) -> str:
    if not oom.held:
        return ""
    until = f" for {duration(oom.hold_seconds)} at most" if oom.hold_seconds else ""
    console = ", 'ftmon console' looks around in that frame" if oom.console else ""
    return (
        f"The rank is held in the failing frame{until}: 'ftmon release' lets it go{console}, 'ftmon kill' ends it. "
        f"Meanwhile {oom.others or 'nothing is known of the other ranks'}."
    )
