"""Likely reasons for how a process ended."""

from ...run.endings import signal_name

_SIGNAL_HINTS = {
    "SIGKILL": "a person, a job scheduler, or the kernel's out-of-memory killer may have sent it (see dmesg)",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm is full",
    "SIGABRT": "native code aborted: an assertion, or NCCL's watchdog after a timeout",
    "SIGTERM": "it was asked to end: by a launcher, a job scheduler or a person",
    "SIGINT": "it was interrupted from a keyboard or by its launcher",
    "SIGFPE": "a crash in native code: an arithmetic error",
    "SIGHUP": "its terminal was closed",
}


def signal_hint(number: int) -> str:
    """Return a possible reason for that signal; empty: unknown."""
    return _SIGNAL_HINTS.get(signal_name(number), "")


def library_hint(text: str) -> str:
    """Return the meaning of a communication library's last message; empty if unknown."""
    if "op.preamble.length" in text:  # gloo: a peer sent more than was expected
        return "gloo aborted because ranks entered one collective with tensors of different sizes (shapes)"
    if "Watchdog caught collective operation timeout" in text:
        return "NCCL's watchdog aborted it: a rank did not enter this collective in time, or entered another one"
    return ""
