"""The report of a real snapshot from an H200 that ran out of memory at its loss."""

from caching_allocator import MIB, CachingAllocator
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.protocol.analysis.oom_report import report_of
from snapshot_files import DATA, compact, read_snapshot

OOM = DATA / "oom_backward.pickle.gz"


def test_a_real_failure_at_the_loss_is_reported_as_logits_with_who_held_most() -> None:
    snapshot = read_snapshot(OOM)
    report = report_of(snapshot, [Replay(snapshot, 0)])
    assert (report.phase, report.verdict.kind, report.verdict.sure) == ("forward", "logits", True)
    oom, first = report.oom, report.remedies[0]
    assert (first.kind, first.frees_bytes) == ("chunked_loss", oom.requested_bytes)
    assert oom.stack[-1].endswith("functional.py:3504 cross_entropy")
    assert oom.device_free_bytes > oom.requested_bytes, "a limit was set on that process"
    assert sum(segment.size_bytes for segment in oom.segments) == oom.reserved_bytes
    assert sum(segment.free_blocks for segment in oom.segments) == oom.free_blocks
    assert oom.holders[0].frames[-1].endswith("loss_utils.py:59 ForCausalLMLoss")
    assert oom.holders == sorted(oom.holders, key=lambda group: -group.bytes)


def test_free_memory_of_another_stream_serves_no_request() -> None:
    allocator = CachingAllocator()
    held = [allocator.alloc(20 * MIB) for _ in range(8)]
    for address in (*held[::2], allocator.alloc(60 * MIB, stream=1)):
        allocator.free(address)
    allocator.fail(40 * MIB, 0)
    snapshot = compact(allocator.snapshot(), "made")
    report = report_of(snapshot, [Replay(snapshot, 0)])
    assert (report.oom.usable_free_bytes, report.oom.largest_free_bytes) == (80 * MIB, 20 * MIB)
    assert report.verdict.kind == "fragmentation"
