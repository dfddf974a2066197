"""What this machine has, found out without torch."""

import socket

import pytest
from ftmon.trainer.recipe import hardware

UUIDS = ["GPU-aaaa", "GPU-bbbb", "GPU-bbcc"]


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["2", "0"]),
        ("1,7,0", ["1"]),
        ("0,0", ["0"]),
        ("GPU-aa", ["GPU-aa"]),
        ("GPU-bb", []),
        ("MIG-1234", ["MIG-1234"]),
    ],
)
def test_cuda_visible_devices_is_obeyed_as_cuda_does(setting: str | None, visible: list[str]) -> None:
    assert hardware.select_visible(UUIDS, setting) == visible


def test_a_free_port_can_be_bound_and_is_then_no_longer_free() -> None:
    port = hardware.free_port()
    assert 20000 <= port < 32768
    with socket.create_server(("127.0.0.1", port)):
        assert not hardware.port_is_free(port)


def test_there_is_a_core() -> None:
    assert hardware.cores() >= 1
