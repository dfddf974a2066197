"""Texts for how a process ended."""

import signal as signals

from ..messages.hosts import KernelKill


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9; ``signal 77`` for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending_in_words(exit_code: int | None, signal: int | None) -> str:
    """Return how a process ended: ``killed by SIGKILL``, ``exit code 1``, ``exit status unknown``.

    A negative exit code is a signal, as in ``subprocess``; 129 to 159 is 128 plus a signal, as in a shell.
    """
    if signal is None and exit_code is not None and exit_code < 0:
        signal = -exit_code
    if signal:
        return f"killed by {signal_name(signal)}"
    if exit_code is None:
        return "exit status unknown"
    if 128 < exit_code < 160:
        return f"exit code {exit_code}, {signal_name(exit_code - 128)}"
    return f"exit code {exit_code}"


def exhausted_memory(kill: KernelKill) -> str:
    """Return which memory ran out; empty if the evidence is against a kill by the kernel."""
    return {"": "", "group": "its control group's limit was exhausted", "host": "the host's memory was exhausted"}[
        kill.exhausted
    ]
