"""What an optimizer still had to allocate decides whether free memory in pieces is why its first step failed."""

from typing import Any

import pytest
from caching_allocator import MIB, CachingAllocator
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay, pending_bytes, pending_states
from ftmon.protocol.analysis.allocator.snapshot_views import find_oom
from ftmon.protocol.analysis.oom_report import report_of
from ftmon.protocol.snapshot.columns import compact

SIZES = [(8 + number % 5) * MIB for number in range(201)]
ASKED = 24 * MIB


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": f"lib/{name}.py", "line": 7} for name in names]


STATES = frames("zeros_like", "_init_group", "step", "initialize_optimizer_states", "main")


def failed(made: int) -> CachingAllocator:
    """Parameters, what a forward pass freed in pieces, then ``made`` of the states, and a request that fails."""
    allocator = CachingAllocator()
    activations: list[int] = []
    for number, size in enumerate(SIZES):
        allocator.alloc(size, frames=frames("convert", "_apply", "main"))
        if number % 12 == 0:
            activations.append(allocator.alloc(20 * MIB, frames=frames("linear", "forward")))
    for size in SIZES[:made]:
        allocator.alloc(size, frames=STATES)
    for address in activations:
        allocator.free(address)
    allocator.fail(ASKED, 10 * MIB, STATES)
    return allocator


@pytest.mark.parametrize(
    ("made", "kind", "verdict"), [(73, "too_large", "optimizer_states"), (195, "fragmentation", "fragmentation")]
)
def test_free_memory_in_pieces_is_to_blame_only_where_it_would_have_sufficed_for_the_states_to_come(
    made: int, kind: str, verdict: str
) -> None:
    snapshot = compact(failed(made).snapshot(), "made")
    replay = Replay(snapshot, 0)
    oom = find_oom(replay)
    assert oom is not None
    assert oom.usable_free_bytes > ASKED > oom.largest_free_block_bytes
    assert oom.usable_free_bytes > 0.05 * oom.reserved_bytes
    assert pending_states(replay, oom.entry) == sum(SIZES[made:])
    report = report_of(snapshot, [replay])
    assert report is not None
    assert (oom.kind, report.verdict.kind) == (kind, verdict)
    assert ("missing optimizer states" in oom.verdict) == (made == 73)
    assert (report.remedies[0].kind == "expandable_segments") == (made == 195)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_states_are_told_by_the_sizes_of_what_they_are_made_after(width: int, count: int) -> None:
    parameters = [1000 * number for number in range(1, 41)]
    all_states = [size * width for size in parameters for _ in range(count)]
    made = all_states[:30]
    least = sum(all_states) - sum(made)
    assert pending_bytes([*made, 4, 4], [*parameters, 8]) == least
    assert pending_bytes(made, [size + 1 for size in parameters]) == 0
    assert pending_bytes(made[:2], parameters) == 0
    assert pending_bytes(all_states, parameters) == 0
    reverse = all_states[::-1][:30]
    assert pending_bytes(reverse, parameters) == sum(all_states) - sum(reverse)
