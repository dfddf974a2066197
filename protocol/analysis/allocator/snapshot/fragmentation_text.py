"""Text about fragmentation: the meaning of the figures, and remedies if there are any."""

from ....text import counted, gib
from .layout import Fragmentation, matters


def _percent(part: int, whole: int) -> str:
    return f"{part / whole * 100:.1f} %" if whole else "0 %"


def fragmentation_words(found: Fragmentation) -> list[str]:
    """Return the use of reserved memory, one sentence per line."""
    if not found.reserved:
        return ["nothing is reserved"]
    lines = [
        f"{gib(found.allocated)} of {gib(found.reserved)} reserved is allocated "
        f"({_percent(found.allocated, found.reserved)}) in {found.segments:,} segments",
    ]
    if found.free:
        lines.append(
            f"{gib(found.free)} is reserved but free, in {found.free_blocks:,} blocks; the largest is "
            f"{gib(found.largest_free)} ({_percent(found.largest_free, found.free)} of it)"
        )
        scattered = found.free - found.largest_free
        if scattered > found.reserved * 0.1 and found.largest_free < found.free / 2:
            lines.append("much of the free memory lies in pieces: fragmentation can fail a large request")
            if not found.expandable:
                lines.append(
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets segments grow instead of lying apart"
                )
        elif not matters(found.free, found.reserved):
            lines.append("fragmentation is not a problem here: little is reserved beyond what is allocated")
        else:
            lines.append("most of the free memory lies in few pieces: fragmentation is not a problem here")
    else:
        lines.append("no reserved memory is free")
    lines.append(
        f"rounding takes {gib(found.rounding)} ({_percent(found.rounding, found.requested)} over what was asked)"
    )
    if found.pending:
        lines.append(f"{gib(found.pending)} is freed but waits for a stream that used it (record_stream)")
    if found.free_small:
        lines.append(f"{gib(found.free_small)} is free in segments of small blocks, for requests up to 1 MiB only")
    if found.free_private:
        lines.append(f"{gib(found.free_private)} is free in {counted(found.pools, 'private pool')}, of no use outside")
    if found.streams > 1:
        lines.append(f"{found.streams} streams have segments of their own: what one has free, another cannot use")
    if found.expandable:
        lines.append(f"{gib(found.expandable)} is in expandable segments")
    return lines
