"""Who the kernel killed for memory: told from its own log and counters, and never from a SIGKILL alone."""

import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.machine import Disks
from ftmon.protocol.messages.hosts import KernelKill
from ftmon.protocol.messages.telemetry import DiskSpace, Volume
from ftmon.trainer.host.hardware import host as looked
from ftmon.trainer.host.hardware.host import RECENT_SECONDS, KernelKills, kill_count, memory_groups, read_kill

MIB, GIB = 2**20, 2**30


def fed(samples: Iterable[tuple[float, float]], total: int = 100 * GIB) -> list[tuple[float, Finding]]:
    disks = Disks()
    return [
        (t, found)
        for t, free in samples
        for found in disks.space(DiskSpace("node-1", t, [Volume("/scratch/run", "output", int(free), total)]))
    ]


def falling(free: int, times: Iterable[int], change: Callable[[int], int]) -> list[tuple[float, float]]:
    return [(t, free := free + change(t)) for t in times]


def states(found: list[tuple[float, Finding]]) -> list[str]:
    return [one.state for _, one in found if one.state != "updated"]


def test_a_disk_that_fills_steadily_is_told_with_the_time_that_is_left():
    rate = 310 * MIB / 60
    found = fed((t, 5 * GIB - rate * max(0, t - 100)) for t in range(0, 800, 2))
    assert states(found) == ["raised"]
    t, first = found[0]
    facts = first.facts
    assert (first.kind, first.severity, first.key) == ("disk_filling", "warning", "node-1:/scratch/run")
    assert (facts.host, facts.path, facts.use, facts.why) == ("node-1", "/scratch/run", "output", "rate")
    assert facts.total_bytes == 100 * GIB
    assert facts.bytes_per_s == pytest.approx(rate, rel=0.05)
    assert facts.full_in_s == pytest.approx(facts.free_bytes / rate, rel=0.1)
    assert t < 450, "long before it is full, at 1091"
    samples = [(t, 5 * GIB - 10 * MIB * t) for t in range(0, 300, 2)]
    assert states(fed([*samples, *((t, 40 * GIB) for t in range(300, 400, 2))])) == ["raised", "resolved"]
    small = fed(((t, 64 * MIB - 2 * MIB * t) for t in range(0, 30, 2)), total=64 * MIB)
    assert small[0][0] <= 16, "a small disk within half a minute"


def test_the_first_of_a_few_checkpoints_are_no_rate_and_one_that_will_not_fit_next_time_is_told():
    # 60 GiB in two of every five minutes, three times
    samples = falling(400 * GIB, range(0, 3000, 2), lambda at: -GIB if at % 300 < 120 and at < 900 else 0)
    assert fed(samples, 2000 * GIB) == []
    steady = [(float(at), 400.0 * GIB - at * 0.2 * GIB) for at in range(0, 1990, 2)]
    assert states(fed(steady, 2000 * GIB))[0] == "raised", "the same rate all the time"
    samples = falling(36 * GIB, range(0, 1500, 2), lambda t: -GIB if t % 400 < 20 and t < 1200 else 0)  # 3 x 10 GiB
    found = [one for _, one in fed(samples, total=1000 * GIB) if one.facts.why == "next write"]
    assert found[0].facts.burst_bytes == pytest.approx(10 * GIB, rel=0.15)
    assert (found[0].kind, found[0].facts.free_bytes, found[0].facts.full_in_s) == ("disk_filling", 6 * GIB, None)


def test_what_was_written_before_a_pause_does_not_delay_a_steady_fall():
    def change(at: int) -> int:  # a checkpoint, a pause, 50 MiB/s
        return -GIB // 2 if at < 20 else -20_000 if at < 300 else -100 * MIB

    samples = falling(60 * GIB, range(0, 900, 2), change)
    raised = [t for t, found in fed(samples, 500 * GIB) if found.state == "raised"]
    assert 300 < raised[0] < 720, "of some 1,100 s that it takes"
    slow_before = [
        (float(at), 60 * GIB - (20_000 * at if at < 600 else 50 * MIB * (at - 600))) for at in range(0, 1300, 2)
    ]
    raised = [t for t, found in fed(slow_before, 500 * GIB) if found.state == "raised"]
    assert 600 < raised[0] < 1100


def test_little_left_is_told_at_once_and_a_checkpoint_written_and_removed_again_is_no_finding():
    assert [one.severity for _, one in fed([(0, GIB), (2, GIB)])] == ["warning"]
    assert fed([(0, MIB)])[0][1].severity == "error"

    def change(t: int) -> int:
        return (8 * 4 * GIB if t % 600 == 20 and t > 600 else 0) - (2 * GIB * 2 if t % 600 < 15 else 0)

    noise = [random.Random(t).randint(0, 2**20) for t in range(0, 3000, 2)]
    samples = falling(300 * GIB, range(0, 3000, 2), change)
    assert fed([(t, free - more) for (t, free), more in zip(samples, noise, strict=True)], total=1000 * GIB) == []
    # Logs that grow for hours, twice 19.5 GiB, 20 MiB every 30 s.
    logs = falling(50 * GIB, range(2100), lambda at: -20 * MIB if at % 1050 < 1000 else 0)
    assert fed((30.0 * at, free) for at, free in logs) == []


def place(tmp_path: Path, pid: int, **links: Path) -> Path:
    process = tmp_path / f"proc/{pid}"
    (process / "fd").mkdir(parents=True)
    (process / "environ").write_bytes(b"A=b\0TMPDIR=" + os.fsencode(links["tmp"]) + b"\0")
    (process / "cwd").symlink_to(links["cwd"])
    return process


def test_the_run_the_ranks_and_their_open_files_say_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = {name: tmp_path / name for name in ("run", "work", "tmp", "checkpoints", "read", "out")}
    for folder in folders.values():
        folder.mkdir()
    real = os.stat
    devices = {str(folder): number for number, folder in enumerate(folders.values(), 100)}

    def stat(path, *words, **options):
        known = devices.get(str(path))
        return SimpleNamespace(st_dev=known) if known else real(path, *words, **options)

    monkeypatch.setattr(looked.os, "stat", stat)
    process = place(tmp_path, 7, cwd=folders["work"], tmp=folders["tmp"])
    (process / "fd/3").symlink_to(folders["checkpoints"] / "shard.pt")
    (process / "fd/4").symlink_to(folders["read"] / "data.bin")
    os_lstat = os.lstat

    def lstat(path, *words, **options):
        found = os_lstat(path, *words, **options)
        return SimpleNamespace(st_mode=0o120500) if str(path).endswith("fd/4") else found

    monkeypatch.setattr(looked.os, "lstat", lstat)
    free = {"now": 50}

    def statvfs(_: str) -> SimpleNamespace:
        return SimpleNamespace(f_frsize=4096, f_bsize=4096, f_blocks=1000, f_bavail=free["now"])

    disks = looked.Disks("h", folders["run"], lambda: {0: 7}, statvfs, tmp_path)
    disks.note_output(0, "../out/not-yet")
    message = disks.measure(0.0)
    found = {volume.path: volume.use for volume in message.volumes if volume.path.startswith(str(tmp_path))}
    assert found.pop(f"{folders['work']}/../out") == "output"
    expected = {"run": "run directory", "work": "working directory", "tmp": "TMPDIR", "checkpoints": "output"}
    assert found == {str(folders[name]): use for name, use in expected.items()}, "and not what is only read"
    assert message.volumes[0].free_bytes == 50 * 4096
    assert disks.measure(2.0) is None, "nothing changed"
    free["now"] = 40
    assert disks.measure(4.0) is not None
    assert disks.measure(40.0) is not None, "and once in a while all the same"


PID = 7894
RECORDS = (
    "4,1200,12730463342,-;python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
    "6,1270,12730465371,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
    "oom_memcg=/limited,task_memcg=/limited,task=python,pid=7894,uid=0\n"
    "3,1271,{at},-;Memory cgroup out of memory: Killed process 7894 (python) total-vm:1256644kB, anon-rss:419692kB, "
    "file-rss:94504kB, shmem-rss:0kB, UID:0 pgtables:1364kB oom_score_adj:0\n"
)
"""As Linux 6.18 wrote them; the second one is another process's on a full host."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a process in a control group of version 2, limited to 192 MiB, and pids that are the kernel's."""
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    (tmp_path / f"proc/{PID}").mkdir()
    (tmp_path / f"proc/{PID}/cgroup").write_text("0::/limited\n")
    (tmp_path / f"proc/{PID}/statm").write_text("314161 104923 23626 1 0 200000 0\n")
    (tmp_path / "dev").mkdir()
    group = tmp_path / "sys/fs/cgroup/limited"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("201326592\n")
    count(tmp_path, 0)
    return tmp_path


@pytest.fixture
def kills(root: Path) -> KernelKills:
    """Kills of a host where the process was recorded once."""
    found = KernelKills(root)
    found.record(PID, 0.0)
    return found


def count(root: Path, kills: int) -> None:
    text = f"low 0\nhigh 0\nmax 49\noom {kills}\noom_kill {kills}\noom_group_kill 0\n"
    (root / "sys/fs/cgroup/limited/memory.events").write_text(text)


def log(root: Path, at: str = "0") -> None:
    (root / "dev/kmsg").write_text(RECORDS.format(at=at))


def test_a_record_of_the_kernels_log_says_who_was_killed_and_for_whose_limit() -> None:
    kills = [read_kill(line) for line in RECORDS.format(at="12730465446").splitlines()]
    assert kills[:2] == [None, None]
    assert kills[2] == (PID, "python", 419692 * 1024, True, pytest.approx(12730.465446))
    of_host = "3,9,1,-;Out of memory: Killed process 12 (python3) total-vm:9kB, anon-rss:8kB, file-rss:0kB"
    assert read_kill(of_host) == (12, "python3", 8 * 1024, False, pytest.approx(1e-6))


def test_a_process_that_the_log_names_was_surely_killed_by_the_kernel(root: Path, kills: KernelKills) -> None:
    log(root)
    found = kills.find(PID, 1.0)
    assert found == KernelKill(True, "group", "python", 419692 * 1024, [201326592], resident_bytes=found.resident_bytes)
    assert found.resident_bytes > 0


def test_a_count_that_rose_just_before_makes_a_kill_probable_and_one_long_ago_explains_nothing(root, kills):
    count(root, 1)
    kills.record(PID, 1.0)  # large processes still live for a moment after the kernel killed them
    found = kills.find(PID, 2.0)
    assert (found.sure, found.exhausted, found.kills, found.recent_kills) == (False, "group", 1, 1)
    count(root, 3)
    kills.record(PID, 5.0)
    for second in range(6, int(RECENT_SECONDS) + 40):
        kills.record(PID, float(second))
    assert kills.find(PID, RECENT_SECONDS + 40.0) is None


def test_without_evidence_the_log_decides_unless_it_is_of_other_pids_or_old(root: Path, kills: KernelKills) -> None:
    assert kills.find(PID, 1.0) is None
    (root / "dev/kmsg").write_text("6,1,1,-;something else\n")
    assert kills.find(PID, 1.0) == KernelKill(False)
    # Half an hour away from now, on a host that was started when you like: of a pid that is used again.
    log(root, at=str(int((time.clock_gettime(time.CLOCK_BOOTTIME) + 1800) * 1e6)))
    assert kills.find(PID, 1.0) == KernelKill(False)
    log(root)
    (root / "proc/self/ns/pid").unlink()
    (root / "proc/self/ns/pid").symlink_to("pid:[4026532201]")
    assert kills.find(PID, 1.0) is None, "pids of another namespace"


def test_version_1_of_control_groups_counts_in_memory_oom_control(tmp_path: Path) -> None:
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text("9:name=systemd:/\n4:memory:/job\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory_groups(5, tmp_path) == [group]
    assert kill_count(group) == 2
