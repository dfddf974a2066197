"""Which processes of a host are the ranks of a run that ftmon did not start."""

import os

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.trainer.host import foreign
from ftmon.trainer.host.foreign import all_jobs, find_jobs, jobs_of
from ftmon.trainer.host.processes import Process

NONE = 1_000_000
"""Above any pid: nothing in /proc belongs to these processes."""


def table(**parents: int) -> dict[int, Process]:
    """Return processes by pid, each started after the ones before it."""
    found = {NONE + int(name[1:]): NONE + parent for name, parent in parents.items()}
    return {
        pid: Process(pid, parent, pid, pid, "S", start, 0, "python")
        for start, (pid, parent) in enumerate(found.items(), 1)
    }


def ranked(rank: int, port: int = 29500, local: int | None = None, **more: str) -> dict[str, str]:
    place = {} if local is None else {"LOCAL_RANK": str(local)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port), **place, **more}


def test_ranks_of_one_port_are_a_run_with_their_children_but_no_shell_or_compiler_around_them(monkeypatch):
    processes = table(p10=1, p11=10, p12=10, p13=11, p20=1)
    first, second = ranked(0, local=0), ranked(1, local=1)
    environments = {NONE + 10: {}, NONE + 11: first, NONE + 12: second, NONE + 13: first, NONE + 20: ranked(0, 29501)}
    jobs = find_jobs(processes, environments)
    found = {job.key: {rank: process.pid - NONE for rank, process in job.ranks.items()} for job in jobs}
    assert found == {"29500": {0: 11, 1: 12}, "29501": {0: 20}}
    processes = table(p10=1, p11=10, p20=1)
    programs = {f"/proc/{NONE + pid}/maps": b"0-1 r-xp /bin/" + name for pid, name in ((10, b"bash"), (20, b"cc1plus"))}
    programs[f"/proc/{NONE + 11}/maps"] = b"0-1 r-xp /usr/bin/python3.12"
    monkeypatch.setattr(foreign, "proc_bytes", programs.__getitem__)
    jobs = find_jobs(processes, {NONE + 10: ranked(0), NONE + 11: ranked(0), NONE + 20: ranked(1)})
    assert [{rank: process.pid - NONE for rank, process in job.ranks.items()} for job in jobs] == [{0: 11}]


def test_a_run_id_of_torchrun_counts_before_the_port_and_all_leaves_out_what_ftmon_started():
    processes = table(p10=1, p11=1)
    environments = {NONE + pid: ranked(pid - 10, pid, TORCHELASTIC_RUN_ID="job-7") for pid in (10, 11)}
    assert [job.key for job in find_jobs(processes, environments)] == ["job-7"]
    processes = table(p10=1, p11=1)
    environments = {NONE + 10: ranked(0, FTMON_RUN="/runs/a"), NONE + 11: ranked(0, 29501)}
    assert [job.key for job in all_jobs(processes, environments)] == ["29501"]


def test_a_launcher_with_the_rank_of_its_host_is_no_rank_and_the_command_s_own_shell_is_refused(monkeypatch):
    jobs = find_jobs(table(p10=1, p11=10), {NONE + 10: ranked(0), NONE + 11: ranked(0, local=0)})
    assert [job.ranks[0].pid - NONE for job in jobs] == [11]
    monkeypatch.setattr(os, "getpid", lambda: NONE + 11)
    with pytest.raises(UsageError, match="runs this command"):
        jobs_of(NONE + 10, table(p10=1, p11=10), {})


@pytest.mark.parametrize("asked", [10, 11, 12, 13], ids=["launcher", "rank", "other rank", "worker"])
def test_any_process_of_a_run_leads_to_all_its_ranks(asked: int) -> None:
    processes = table(p10=1, p11=10, p12=10, p13=11, p20=1)
    first = ranked(0, local=0)
    environments = {NONE + 11: first, NONE + 12: ranked(1, local=1), NONE + 13: first, NONE + 20: ranked(0, 29501)}
    (job,) = jobs_of(NONE + asked, processes, {NONE + 10: {}, **environments})
    assert {rank: process.pid - NONE for rank, process in job.ranks.items()} == {0: 11, 1: 12}


@pytest.mark.parametrize(
    ("pid", "environments", "words"),
    [
        (99, {}, "there is no process"),
        (10, {}, "belongs to another user"),
        (10, {NONE + 10: {}}, "neither a rank nor a launcher"),
        (10, {NONE + 10: {"FTMON_RUN": "/runs/train-1"}}, "ftmon attach train-1"),
    ],
)
def test_a_process_that_cannot_be_watched_is_refused_with_the_reason(pid, environments, words) -> None:
    with pytest.raises(UsageError, match=words):
        jobs_of(NONE + pid, table(p10=1), environments)
