"""State shared by all screens: the source and its model, the theme, and the user's selections."""

import time
from typing import Literal

from ...model.chartview import ChartView
from ...model.console import ConsoleSession
from ...model.held import HeldWatch
from ...model.oom import CaseKey
from ...model.rank import RankModel
from ...model.run import RunModel
from ...source.base import Source
from ...source.dry_runs import DryRuns
from ..drawing.theme import Theme
from .view_models import nice_top

SPANS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Choices of the seconds per graph column."""

ViewName = Literal["auto", "cards", "rows", "heat"]
VIEWS: tuple[ViewName, ...] = ("auto", "cards", "rows", "heat")

MESSAGE_SECONDS = 5.0


class AppState:
    """Shared state of the screens; plain, without Textual."""

    def __init__(self, source: Source | None, theme: Theme, read_only: bool = False) -> None:
        self.source = source
        self.theme = theme
        self.read_only = read_only
        self.selected = 0
        """The selected rank of every screen; initially the first."""
        self.chosen = False
        self.span = 1
        self.view: ViewName = "auto"
        self.held = HeldWatch()
        self.chart = ChartView()
        """Window, cursor and axis of the training screen, kept after it is closed."""
        self.consoles: dict[int, ConsoleSession] = {}
        """Console sessions with held ranks, by rank, kept after their screen is closed."""
        self.dry_runs: dict[CaseKey, DryRuns] = {}
        """Predictions of changes, by their error, kept after its screen is closed."""
        self._zoom: bool | None = None
        self._message: tuple[str, str, float] = ("", "", 0.0)
        self._empty = RunModel()

    @property
    def can_act(self) -> bool:
        """Whether commands to the run are possible."""
        return self.source is not None and self.source.can_command and not self.read_only

    def end_dry_runs(self) -> None:
        """End the predictions under way."""
        for one in self.dry_runs.values():
            one.close()
        self.dry_runs.clear()

    @property
    def model(self) -> RunModel:
        """The state to draw; read again at every paint, since a seek replaces it."""
        return self.source.model if self.source is not None else self._empty

    @property
    def rank(self) -> RankModel | None:
        """The selected rank; None before the first one."""
        return self.model.ranks.get(self.selected)

    @property
    def zoom(self) -> bool:
        """Whether graphs reach to the run's highest peak instead of the device's capacity.

        On the CPU this is the default, as the capacity is the host's, shared by all ranks.
        """
        if self._zoom is not None:
            return self._zoom
        return any(rank.on_cpu for rank in self.model.ranks.values())

    def toggle_zoom(self) -> None:
        """Switch between the two scales."""
        self._zoom = not self.zoom

    @property
    def run_peak(self) -> int:
        """The run's highest peak over all ranks, bytes; before the first step, the highest present figure."""
        peak = self.model.peak
        if peak is not None:
            return peak.bytes
        return max((max(r.reserved_bytes, r.resident_bytes) for r in self.model.ranks.values()), default=0)

    @property
    def scale_words(self) -> str:
        """Return text with the scale of graphs and the length of a column."""
        model = self.model
        capacities = {rank.capacity_bytes for rank in model.ranks.values() if rank.capacity_bytes}
        cpu = any(rank.on_cpu for rank in model.ranks.values())
        if self.zoom:
            why = "the run's peak" if model.peak else "no peak yet"
            top = f"graphs 0 to {nice_top(self.run_peak) / 2**30:.4g} GiB ({why})"
        elif len(capacities) == 1:
            top = f"graphs 0 to {capacities.pop() / 2**30:.1f} GiB ({'host RAM' if cpu else 'device'})"
        else:
            top = "graphs 0 to each device's capacity"
        return f"{top}, 1 column = {self.span} s"

    def finer(self) -> None:
        """Reduce the time of a graph's column."""
        self.span = SPANS[max(0, SPANS.index(self.span) - 1)]

    def coarser(self) -> None:
        """Increase the time of a graph's column."""
        self.span = SPANS[min(len(SPANS) - 1, SPANS.index(self.span) + 1)]

    def next_view(self) -> None:
        """Select the next layout of ranks."""
        self.view = VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)]

    @property
    def replaying(self) -> bool:
        """Whether the screens show the past: a recording, or a live run paused or rewound."""
        transport = self.source.transport if self.source is not None else None
        return transport is not None and (transport.mode != "live" or not transport.playing)

    def show_message(self, text: str, tone: str = "accent") -> None:
        """Show a line at the bottom for a few seconds."""
        self._message = (text, tone, time.monotonic() + MESSAGE_SECONDS)

    @property
    def message(self) -> tuple[str, str]:
        """The line to show at the bottom, with its tone; empty if there is none."""
        text, tone, until = self._message
        return (text, tone) if text and time.monotonic() < until else ("", "")

    def select_valid(self) -> None:
        """Move the selection to an existing rank."""
        ranks = self.model.ranks
        if ranks and not self.chosen:
            self.selected = next(iter(ranks))
        elif ranks and self.selected not in ranks:
            self.selected = min(ranks, key=lambda rank: abs(rank - self.selected))

    def select(self, rank: int) -> None:
        """Select a rank on the user's request."""
        self.selected, self.chosen = rank, True
