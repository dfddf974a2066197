"""Who the kernel killed for memory: told from its own log and counters, and never from a SIGKILL alone."""

import time
from pathlib import Path

import pytest
from ftmon.protocol.messages.hosts import KernelKill
from ftmon.trainer.host.hardware.host import RECENT_SECONDS, KernelKills, kill_count, memory_groups, read_kill

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
    kill = kills[2]
    assert kill is not None
    assert (kill.pid, kill.name, kill.resident_bytes, kill.of_group) == (PID, "python", 419692 * 1024, True)
    assert kill.at == pytest.approx(12730.465446)
    of_host = (
        "3,9,1,-;Out of memory: Killed process 12 (python3) total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB"
    )
    kill = read_kill(of_host)
    assert kill is not None
    assert not kill.of_group


def test_a_process_that_the_log_names_was_surely_killed_by_the_kernel(root: Path, kills: KernelKills) -> None:
    log(root)
    found = kills.find(PID, 1.0)
    assert found is not None
    assert (found.sure, found.exhausted, found.name) == (True, "group", "python")
    assert found.killed_bytes == 419692 * 1024
    assert found.limits_bytes == [201326592]
    assert found.resident_bytes > 0


def test_a_count_that_rose_just_before_makes_it_probable_and_no_more(root: Path, kills: KernelKills) -> None:
    count(root, 1)
    kills.record(PID, 1.0)  # large processes still live for a moment after the kernel killed them
    found = kills.find(PID, 2.0)
    assert found is not None
    assert (found.sure, found.exhausted, found.kills, found.recent_kills) == (False, "group", 1, 1)


def test_a_kill_long_ago_explains_nothing(root: Path, kills: KernelKills) -> None:
    count(root, 3)
    kills.record(PID, 5.0)
    for second in range(6, int(RECENT_SECONDS) + 40):
        kills.record(PID, float(second))
    assert kills.find(PID, RECENT_SECONDS + 40.0) is None


def test_a_sigkill_without_evidence_is_not_the_kernels(root: Path, kills: KernelKills) -> None:
    assert kills.find(PID, 1.0) is None
    (root / "dev/kmsg").write_text("6,1,1,-;something else\n")
    found = kills.find(PID, 1.0)
    assert found is not None
    assert found == KernelKill(False)


def test_a_log_with_pids_of_another_namespace_is_not_read(root: Path) -> None:
    (root / "proc/self/ns/pid").unlink()
    (root / "proc/self/ns/pid").symlink_to("pid:[4026532201]")
    log(root)
    assert KernelKills(root).find(PID, 1.0) is None


def test_an_old_record_of_a_pid_that_is_used_again_is_passed_over(root: Path) -> None:
    # Half an hour away from now, on a host that was started when you like.
    log(root, at=str(int((time.clock_gettime(time.CLOCK_BOOTTIME) + 1800) * 1e6)))
    found = KernelKills(root).find(PID, 1.0)
    assert found is not None
    assert not found.exhausted


def test_version_1_of_control_groups_counts_in_memory_oom_control(tmp_path: Path) -> None:
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text("9:name=systemd:/\n4:memory:/job\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory_groups(5, tmp_path) == [group]
    assert kill_count(group) == 2
