"""Text of how a process ended."""

import signal as signals

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


def signal_name(number: int) -> str:
    """Name a signal: ``SIGKILL`` for 9; ``signal 77`` for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_hint(number: int) -> str:
    """Return a possible meaning of that signal; empty when there is none."""
    return _SIGNAL_HINTS.get(signal_name(number), "")


def library_hint(text: str) -> str:
    """Return the meaning of a communication library's last message; empty if unknown."""
    if "op.preamble.length" in text:  # gloo: a peer sent more than was expected
        return "gloo aborted because ranks entered one collective with tensors of different sizes (shapes)"
    return ""


def ending_in_words(exit_code: int | None, signal: int | None) -> str:
    """Return how a process ended: ``killed by SIGKILL``, ``exit code 1``, ``exit status unknown``.

    A negative exit code is a signal, as in ``subprocess``; 129 to 159 is a shell's way to name one.
    """
    if signal is None and exit_code is not None and exit_code < 0:
        signal = -exit_code
    if signal:
        return f"killed by {signal_name(signal)}"
    if exit_code is None:
        return "exit status unknown"
    if 128 < exit_code < 160:
        return f"exit code {exit_code} ({signal_name(exit_code - 128)})"
    return f"exit code {exit_code}"
