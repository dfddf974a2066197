"""Says which signals it got; TERM ends it with status 5, unless it is called stubborn. Takes a line of input first."""

import signal
import sys
import time


def note(number: int, _frame: object) -> None:
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM and "stubborn" not in sys.argv:
        sys.exit(5)


for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
print("read", repr(sys.stdin.readline()), flush=True)
while True:
    time.sleep(0.05)
