"""``python -m ftmon.trainer.launch RUNDIR``: the launcher of a run."""

import sys

from .launcher import main

if __name__ == "__main__":
    sys.exit(main())
