"""Draws the phase table of a rank's last step: time, memory at start, end and peak, growth and transient."""

from collections.abc import Sequence

from ....protocol.messages.telemetry import PhaseRecord
from ..drawing.figures import GIB_UNIT, MIB_UNIT, Unit, milliseconds
from ..drawing.line import Line
from ..drawing.theme import Theme

_SMALL = 2 * 2**30
"""Peaks below this are shown in MiB."""


def phase_table(table: Sequence[PhaseRecord], width: int, theme: Theme) -> list[Line]:
    """Draw the table: a head and a line per phase; the phase with the step's peak is marked."""
    dim = theme.style("dim")
    resident = any(row.resident is not None for row in table)
    device = any(row.device_us is not None for row in table)
    wide = width >= 100
    top = max((row.peak_span.peak for row in table), default=0)
    unit = GIB_UNIT if top >= _SMALL else MIB_UNIT
    head = Line(f" {f'phase, {unit.name}':<12}{'device ms' if device else 'host ms':>9}", dim)
    if wide:
        head.add(f"{'host ms' if device else '':>10}{'wait ms':>10}", dim)
    head.add(
        f"{'start':>9}{'end':>9}{'peak':>9}{'growth':>9}{'transient':>10}{'resident' if resident else 'reserved':>10}",
        dim,
    )
    if wide:
        head.add(f"{'allocs':>9}{'collectives':>13}", dim)
    lines = [head]
    for row in table:
        lines.append(_line(row, top, unit, device, wide, theme))
    return lines


def _line(row: PhaseRecord, top: int, unit: Unit, device: bool, wide: bool, theme: Theme) -> Line:
    measured = row.peak_span
    span = row.resident if row.resident is not None else row.allocated
    behind = row.resident.end if row.resident is not None else row.reserved.end
    base, dim = theme.base, theme.style("dim")
    line = (
        Line(" ", base)
        .add(" ", theme.style("text", theme.phase(row.name)))
        .add(f" {row.name:<10}", theme.style(bold=True))
    )
    main = row.device_us if device and row.device_us is not None else row.host_us
    line.add(f"{milliseconds(main):>9}", base)
    if wide:
        line.add(f"{milliseconds(row.host_us) if device else '':>10}", dim)
        line.add(f"{milliseconds(row.collective_us) if row.collectives else '':>10}", dim)
    line.add(f"{unit.size(span.start):>9}{unit.size(span.end):>9}", base)
    line.add(f"{unit.size(measured.peak):>9}", theme.style("peak", bold=measured.peak == top))
    line.add(f"{unit.change(measured.growth):>9}", base if abs(measured.growth) >= 2**20 else dim)
    line.add(
        f"{unit.change(measured.transient):>10}", theme.style("warning") if measured.transient >= top * 0.02 else dim
    )
    line.add(f"{unit.size(behind):>10}", dim)
    if wide:
        line.add(f"{row.allocations or '':>9}{row.collectives or '':>13}", dim)
    if measured.peak == top:
        line.add(f"  {theme.glyphs.back} peak", theme.style("peak"))
    return line
