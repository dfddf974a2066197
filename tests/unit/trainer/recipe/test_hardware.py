"""What this machine has, found out without torch."""

import os
import socket
from types import SimpleNamespace

import pytest
from ftmon.trainer.recipe import hardware

UUIDS = ["GPU-aaaa", "GPU-bbbb", "GPU-bbcc"]


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        (None, ["0", "1", "2"]), ("", []), ("-1", []), ("2,0", ["2", "0"]), ("1,7,0", ["1"]), ("0,0", ["0"]),
        ("GPU-aa", ["GPU-aa"]), ("GPU-bb", []), ("MIG-1234", ["MIG-1234"]),
    ],
)  # fmt: skip
def test_cuda_visible_devices_is_obeyed_as_cuda_does(setting, visible):
    assert hardware.select_visible(UUIDS, setting) == visible


def test_a_free_port_can_be_bound_and_none_is_given_to_two_launches(monkeypatch):
    port = hardware.free_port()
    assert 20000 <= port < 32768
    with socket.create_server(("127.0.0.1", port)):
        assert not hardware.port_is_free(port)
    taken, ended = hardware.free_port(), hardware.free_port()
    hardware._claims.pop().close()  # a launch whose process has ended
    draws = iter([taken, taken, ended])
    monkeypatch.setattr(hardware, "random", SimpleNamespace(randrange=lambda *_: next(draws)))
    assert hardware.free_port() == ended


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "800000 100000"}, 8),
        ({"job/cpu.max": "max 100000"}, 64),
        ({"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, 4),
        ({"job/cpu.max": "400000 100000", "job/step/cpu.max": "250000 50000"}, 4),
        ({"job/step/cpu.max": "5000 100000"}, 1),
        ({"elsewhere/cpu.max": "100000 100000"}, 64),
        ({"cpu/slurm/cpu.cfs_quota_us": "600000", "cpu/slurm/cpu.cfs_period_us": "100000"}, 6),
        ({"cpu/slurm/cpu.cfs_quota_us": "-1", "cpu/slurm/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_the_quotas_of_all_groups_above_the_process_limit_its_cores(files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)  # pyright: ignore
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": "3:cpu,cpuacct:/slurm\n0::/job/step\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hardware.cores(tmp_path) == cores
