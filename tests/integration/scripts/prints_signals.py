"""Says which signals it got; TERM ends it with status 5, unless it is called stubborn. Takes a line of input first."""

import signal
import sys
import time


def say(text: str) -> None:
    """Write a line at once: ``print`` writes each of its words and the line's end separately."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def note(number: int, _frame: object) -> None:
    say(f"got {signal.Signals(number).name}")
    if number == signal.SIGTERM and "stubborn" not in sys.argv:
        sys.exit(5)


for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
say(f"read {sys.stdin.readline()!r}")
while True:
    time.sleep(0.05)
