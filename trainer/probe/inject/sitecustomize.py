"""Starts the probe if this process is a rank; ftmon puts this file on a job's PYTHONPATH.

Python imports it at start-up, before the script. It then runs any other ``sitecustomize`` further down the path. Its
errors are not raised.
"""

import importlib
import os
import sys
from typing import Any


def _hand_over() -> None:
    """Run the sitecustomize that this one hides."""
    import importlib.util
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _begin() -> None:
    if not os.environ.get("FTMON_RUN"):
        return
    try:
        # Absolute: Python runs this file by itself, not as a part of the package.
        begin: Any = importlib.import_module("ftmon.trainer.probe.start.activate").begin

        begin()
    except Exception as error:
        try:
            folder = os.environ.get("FTMON_PLACE") or os.environ["FTMON_RUN"]
            with open(os.path.join(folder, "logs", "probe.log"), "a", encoding="utf-8") as file:
                file.write(f"pid {os.getpid()}: cannot begin: {type(error).__name__}: {error}\n")
        except OSError:
            return


_begin()
_hand_over()
