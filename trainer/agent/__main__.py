"""``python -m ftmon.trainer.agent PLACE JOIN LOCK``: run the agent on another host of a run.

Started by the first rank there (``probe.link.run_files``), with the lock already acquired.
"""

import os
import sys


def main(argv: list[str]) -> int:
    """Serve this host of the run until it is over; return the exit status."""
    if len(argv) != 3 or not argv[2].isdecimal():
        print("usage: python -m ftmon.trainer.agent PLACE JOIN-FILE LOCK-DESCRIPTOR", file=sys.stderr)
        return 2
    # A launcher ends all descendants of its ranks: the agent must not be one.
    if os.fork():
        os._exit(0)
    from ...protocol.errors import FtmonError
    from ...protocol.host.process import never_fail
    from .agent import serve

    never_fail()
    try:
        return serve(argv[0], argv[1])
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
