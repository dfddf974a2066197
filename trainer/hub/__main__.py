"""``python -m ftmon.trainer.hub RUNDIR``: serve one run until it is over."""

import contextlib
import resource
import sys

from ...protocol.errors import FtmonError
from ...protocol.host.process import never_fail
from ...protocol.run.rundir import RunDir
from .core import already_over
from .hub import Hub


def main(argv: list[str]) -> int:
    """Run the hub of the run directory named in ``argv``; return the exit status."""
    if len(argv) != 1:
        print("usage: python -m ftmon.trainer.hub RUNDIR", file=sys.stderr)
        return 2
    never_fail()
    run = RunDir(argv[0])
    try:
        run.check()
        if already_over(run):
            return 0
        _allow_many_peers()
        return Hub(run).run()
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def _allow_many_peers() -> None:
    """Raise the soft limit of open files to the hard limit: every rank and app needs a few descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
