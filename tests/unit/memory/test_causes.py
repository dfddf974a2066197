"""Which blocks made up a phase's peak, by the allocator's trace."""

from ftmon.protocol.analysis.memory.causes import Entry, Span, blocks_at_peak

MIB = 2**20


def entry(time_us: int, action: str, address: int, mib: int) -> Entry:
    return {"action": action, "addr": address, "size": mib * MIB, "time_us": time_us, "frames": []}


GATHERED = [
    entry(1, "alloc", 1, 2000),
    entry(2, "free_requested", 1, 2000),
    # The phase begins. Another stream used the gathered parameters: their memory comes back only now.
    entry(11, "free_completed", 1, 2000),
    entry(12, "alloc", 2, 1500),
    entry(13, "free_requested", 2, 1500),
    entry(14, "free_completed", 2, 1500),
]


def test_a_block_whose_free_was_requested_before_the_phase_does_not_lower_the_peak() -> None:
    blocks = blocks_at_peak(GATHERED, [Span(10, 20, 500 * MIB)])
    assert blocks.total_bytes == 2000 * MIB, "as the allocator's counter, which followed the request"
    assert blocks.found == [3]
    assert blocks.kept == frozenset()


def test_a_trace_without_requests_is_read_by_its_completed_frees() -> None:
    fewer = [each for each in GATHERED[3:] if each["action"] != "free_requested"]
    blocks = blocks_at_peak(fewer, [Span(10, 20, 500 * MIB)])
    assert (blocks.total_bytes, blocks.found, blocks.kept) == (2000 * MIB, [0], frozenset())
