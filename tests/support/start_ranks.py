"""A launcher of ranks that costs little itself, for tests of something else: torchrun imports torch first.

``python -E start_ranks.py N SCRIPT ARGUMENT...``. The first rank that fails ends the others, and the launcher fails.

Several ranks are forks of the launcher, which imports torch once for all of them and, with ``-E``, no probe. In each
rank everything begins as in a new process: with the ``sitecustomize`` of the run, before the script.
"""

import contextlib
import os
import signal
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from io import FileIO, TextIOWrapper
from pathlib import Path
from types import ModuleType

from ftmon.trainer.recipe.hardware import free_port

STARTUP = str(Path(__file__).with_name("startup"))


def command(ranks: int, *words: object) -> list[str]:
    """Return the command of a job of so many ranks."""
    return [sys.executable, *(["-E"] if ranks > 1 else []), str(Path(__file__)), str(ranks), *map(str, words)]


def main() -> None:
    ranks, words = int(sys.argv[1]), sys.argv[2:]
    if ranks > 1:
        start_up([STARTUP])
        import torch  # noqa: F401
    launch(ranks, words)


def launch(ranks: int, words: list[str]) -> None:
    """Run a script on so many ranks to their end; several are forks of this process, and return from here too."""
    port = free_port()
    children: set[int] = set()
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        if ranks == 1:
            children.add(subprocess.Popen([sys.executable, "-u", *words], env=environment).pid)
        elif child := os.fork():
            children.add(child)
        else:
            os.environ.update(environment)
            return become(words)

    def end(*_: object) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the ranks too
    failed = False
    while children:
        pid, status = os.wait()
        if pid in children and status and not failed:
            failed = True
            children.discard(pid)
            end()
        children.discard(pid)
    sys.exit(failed)


def start_up(folders: list[str]) -> None:
    """Run the ``sitecustomize`` in the first of these folders that has one, as Python does when it starts."""
    spec = PathFinder.find_spec("sitecustomize", folders)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def become(words: list[str]) -> None:
    """Run a script in this process, a fork, as ``python -u`` would."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = FileIO(descriptor, "wb", closefd=False)
        raw.name = f"<{name}>"  # pyright: ignore[reportAttributeAccessIssue]
        stream = TextIOWrapper(raw, "utf-8", write_through=True)  # pyright: ignore[reportArgumentType]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    path = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv, sys.orig_argv = words, [sys.executable, "-u", *words]
    sys.path[:1] = [os.path.dirname(words[0]), *path]
    sys.modules["__main__"] = script = ModuleType("__main__")
    script.__file__ = words[0]
    start_up(path)
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(script))


if __name__ == "__main__":
    main()
