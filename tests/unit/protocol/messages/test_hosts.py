"""The other hosts of a run, as the screens see them."""

from ftmon.protocol.messages.hosts import HostState
from ftmon.protocol.messages.telemetry import DeviceInfo, Heartbeat, Hello
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model.run import RunModel, status

T = 1_780_000_000.0


def test_a_host_is_kept_as_last_told_and_a_rank_whose_hosts_clock_is_off_is_drawn_by_the_hubs():
    model = RunModel()
    for seq, state in enumerate(("reachable", "cut off"), 1):
        model.apply(Frame(seq, T + seq, HostState("nodeb", state, T + seq, since=T)))
    assert [host.state for host in model.hosts.values()] == ["cut off"]
    model = RunModel()
    model.apply(Frame(1, T, Hello(1, 0, 2, "nodeb", 5, 6, DeviceInfo("cpu", 0, "x", 1), "glibc", T - 90)))
    model.apply(Frame(2, T, HostState("nodeb", "reachable", T, 1, [1, 99], clock_offset=90.0)))
    model.apply(Frame(3, T + 1, Heartbeat(1, 1, "forward", T - 89, 3, T - 89, allocated=10, reserved=20)))
    assert list(model.ranks) == [1], "a host's list makes no ranks"
    assert (model.rank(1).timeline.start, status(model)["hosts"][0]["host"]) == (T + 1, "nodeb")
