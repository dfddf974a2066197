"""``ftmon capture RUN``: captures memory snapshots of ranks and prints their paths."""

import shlex
import sys
from argparse import Namespace

from ....protocol.errors import HubError
from ....protocol.messages import verbs
from ....protocol.run import run_store
from ....protocol.text import sanitize
from ..access.control import ask
from ..access.trainer_process import living_hub


def capture(arguments: Namespace) -> int:
    """Request a memory snapshot of a run's ranks and print the paths; return 1 if a rank wrote none."""
    run = run_store.find(arguments.run)
    if run.read_exit() is not None:
        raise HubError(f"{run.id} has ended: its snapshots, if it has any, are in {run.snapshots}")
    verb = verbs.Snapshot(sorted(set(arguments.rank)))
    result = ask(living_hub(run), verb, on_accepted=lambda text: print(text, file=sys.stderr, flush=True))
    answers = result.data.get("answers")
    paths = [
        answer["path"]
        for answer in (answers.values() if isinstance(answers, dict) else ())
        if isinstance(answer, dict) and isinstance(answer.get("path"), str)
    ]
    for path in paths:
        print(sanitize(path))
    if not result.ok or not paths:
        print(f"ftmon: {sanitize(result.text)}", file=sys.stderr)
        return 1
    if sys.stdout.isatty():
        print(f"open it: ftmon snapshot {shlex.quote(sanitize(paths[0]))}", file=sys.stderr)
    return 0
