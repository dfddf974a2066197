"""Reads the run's options in a rank. ``read_raw`` uses the standard library only: it runs before any other import."""

import json
import os
from typing import TYPE_CHECKING, Any

from ....protocol.run.environment import JOIN_ENV, RUN_ENV

if TYPE_CHECKING:
    from ....protocol.run.run_options import RunOptions


def read_raw() -> dict[str, Any]:
    """Return the options in ``join.json`` or ``run.json``, those that differ from the defaults; empty without a run."""
    run = os.environ.get(RUN_ENV)
    # On another host the run directory may be missing; join.json holds the same options.
    for path in (os.environ.get(JOIN_ENV), run and os.path.join(run, "run.json")):
        try:
            with open(path or "", "rb") as file:
                content = json.load(file)
        except (OSError, ValueError):
            continue
        found = content.get("options", {}) if isinstance(content, dict) else {}
        return found if isinstance(found, dict) else {}
    return {}


def read_options() -> "RunOptions":
    """Return the run's options; the defaults without a run, or where they cannot be read."""
    import msgspec

    from ....protocol.run.run_options import RunOptions

    try:
        return msgspec.convert(read_raw(), RunOptions)
    except msgspec.ValidationError:
        return RunOptions()
