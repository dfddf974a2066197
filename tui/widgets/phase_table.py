"""The phase table of a rank's last step: time, memory at start, end and peak, what stayed, what came and went."""

from collections.abc import Sequence

from ..model.phases import PhaseRow
from .figures import gib, gib_signed, milliseconds
from .line import Line
from .look import Look


def phase_table(table: Sequence[PhaseRow], width: int, look: Look) -> list[Line]:
    """Draw the table: a head and a line a phase; the phase that makes the step's peak is marked."""
    dim = look.style("dim")
    resident = any(row.resident is not None for row in table)
    device = any(row.device_ms is not None for row in table)
    wide = width >= 100
    head = Line(f" {'phase, GiB':<12}{'device ms' if device else 'host ms':>9}", dim)
    if wide:
        head.add(f"{'host ms' if device else '':>10}{'wait ms':>10}", dim)
    head.add(
        f"{'start':>9}{'end':>9}{'peak':>9}{'growth':>9}{'transient':>10}{'resident' if resident else 'reserved':>10}",
        dim,
    )
    if wide:
        head.add(f"{'allocs':>9}{'collectives':>13}", dim)
    lines = [head]
    top = max((row.peak for row in table), default=0)
    for row in table:
        lines.append(_line(row, top, resident, device, wide, look))
    return lines


def _line(row: PhaseRow, top: int, resident: bool, device: bool, wide: bool, look: Look) -> Line:
    span = row.resident if row.resident is not None else row.allocated
    behind = row.resident.end if row.resident is not None else row.reserved.end
    base, dim = look.base, look.style("dim")
    line = (
        Line(" ", base)
        .add(" ", look.style("text", look.phase(row.name)))
        .add(f" {row.name:<10}", look.style(bold=True))
    )
    main = row.device_ms if device and row.device_ms is not None else row.host_ms
    line.add(f"{milliseconds(main * 1e3):>9}", base)
    if wide:
        line.add(f"{milliseconds(row.host_ms * 1e3) if device else '':>10}", dim)
        line.add(f"{milliseconds(row.collective_ms * 1e3) if row.collectives else '':>10}", dim)
    line.add(f"{gib(span.start):>9}{gib(span.end):>9}", base)
    line.add(f"{gib(row.peak):>9}", look.style("peak", bold=row.peak == top))
    line.add(f"{gib_signed(row.growth):>9}", base if abs(row.growth) >= 2**20 else dim)
    line.add(f"{gib_signed(row.transient):>10}", look.style("warning") if row.transient >= top * 0.02 else dim)
    line.add(f"{gib(behind):>10}", dim)
    if wide:
        line.add(f"{row.allocations or '':>9}{row.collectives or '':>13}", dim)
    if row.peak == top:
        line.add(f"  {look.glyphs.back} peak", look.style("peak"))
    return line
