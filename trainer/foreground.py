"""Runs a module of ftmon in place of a command: ``python -m ftmon.trainer.foreground MODULE [WORDS...]``.

Ctrl-C ends it at once and without a traceback, from its first import on; its forked processes end with it.
"""

import os
import runpy
import signal
import sys

from ..protocol.run import exits


def main() -> None:
    """Run the module that the first argument names, as the main program with the other arguments."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(exits.INTERRUPTED))
    module = sys.argv[1]
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
