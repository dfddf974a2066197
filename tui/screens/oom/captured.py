"""The snapshot captured at an out-of-memory error: its place, and the explorer on it."""

from pathlib import Path
from typing import ClassVar

from textual.binding import BindingType

from ....protocol.messages.telemetry import Oom
from ....protocol.text import sanitize
from ...model.run import RunModel
from ...model.snapshot_explorer import Explorer
from ...widgets.state.app_state import AppState
from ..base import key
from ..snapshot.screen import SnapshotScreen


class CapturedScreen(SnapshotScreen, inherit_bindings=False):
    """The explorer on a run's own snapshot; escape returns to the previous screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("escape", "app.back", "back", "back to the report"),
        *SnapshotScreen.BINDINGS,
    ]

    def __init__(self, app_state: AppState, explorer: Explorer, view: str) -> None:
        super().__init__(app_state, explorer)
        if not explorer.before:
            explorer.show(view)


def file_of(oom: Oom, folder: Path | None) -> Path | None:
    """Return the snapshot of an error; None if there is none, or it is not on this host.

    The name is from a rank, so only files in the run's directory are opened.
    """
    if folder is None or not oom.snapshot:
        return None
    home = folder.resolve()
    path = (home / oom.snapshot).resolve()
    return path if path.is_relative_to(home) and path.is_file() else None


def place_words(oom: Oom, folder: Path | None, model: RunModel) -> str:
    """Return the place of the snapshot, or the reason why there is none."""
    if not oom.snapshot:
        return "none was captured" + ("" if oom.measure == "cuda" else ": the CPU's allocator keeps no trace")
    name = sanitize(oom.snapshot, 300)
    if file_of(oom, folder) is not None:
        return f"{folder}/{name}: 2 opens its timeline and live stacks, 4 the segment map"
    rank = model.ranks.get(oom.rank)
    host = f" on {sanitize(rank.hello.host, 100)}" if rank is not None and rank.hello is not None else ""
    run = f"{model.info.id}/" if model.info.id else ""
    if folder is not None:
        return f"{name} is not in {folder} any more, or is{host or ' on another host'}: ftmon snapshot FILE opens it"
    return f"{run}{name} in the directory of runs{host}: copy it here, then: ftmon snapshot {Path(name).name}"
