"""A job's environment carries the mark of its run, the import hook, and what DeepSpeed passes to other hosts."""

import pwd
from pathlib import Path

from ftmon.protocol.run.rundir import monitor_environment
from ftmon.trainer.host.processes import INJECT_DIR
from ftmon.trainer.launch.environment import flight_recorder, job_environment

MARKS = ("FTMON_RUN", "FTMON_RANK_PID", "FTMON_JOIN", "FTMON_PLACE")


def test_a_job_is_marked_and_hooked_and_keeps_its_own_python_path(run):
    outer = {"FTMON_RUN": "/outer", "FTMON_RANK_PID": "3", "FTMON_JOIN": "/outer/join.json", "FTMON_PLACE": "/place"}
    found = job_environment(run, {**outer, "PYTHONPATH": "/mine", "X": "1"})
    assert found["FTMON_RUN"] == str(run.path)
    assert found["PYTHONPATH"] == f"{INJECT_DIR}:/mine"
    assert found["PYTHONUNBUFFERED"] == "1"
    assert "2000" in (found.get("TORCH_FR_BUFFER_SIZE"), found.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    assert found["X"] == "1"
    assert not {"FTMON_RANK_PID", "FTMON_JOIN", "FTMON_PLACE"} & set(found), "marks of the run that this one is in"


def test_no_empty_entry_is_put_on_the_python_path(run):
    assert job_environment(run, {})["PYTHONPATH"] == str(INJECT_DIR)


def test_what_the_person_set_is_left_alone(run):
    found = job_environment(run, {"TORCH_FR_BUFFER_SIZE": "9", "PYTHONUNBUFFERED": ""})
    assert found["TORCH_FR_BUFFER_SIZE"] == "9"
    assert found["PYTHONUNBUFFERED"] == ""


def test_deepspeed_exports_our_marks_after_the_persons_own_lines(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(run.path)
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n")
    lines = Path(job_environment(run, {})["DS_ENV_FILE"]).read_text().splitlines()
    assert lines[0] == "MINE=1"
    assert f"FTMON_RUN={run.path}" in lines
    assert all(line.count("=") >= 1 for line in lines)


def test_a_user_without_a_home_directory_can_start_a_job(run, monkeypatch):
    def unknown(_uid: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(run.path)
    (run.path / ".deepspeed_env").write_text("MINE=1\n")
    lines = Path(job_environment(run, {})["DS_ENV_FILE"]).read_text().splitlines()
    assert lines[:2] == ["MINE=1", f"FTMON_RUN={run.path}"]


def test_hub_and_launcher_carry_no_mark():
    assert monitor_environment({**dict.fromkeys(MARKS, "x"), "A": "b"}) == {"A": "b"}


def test_the_flight_recorder_goes_by_the_name_that_this_torch_knows():
    assert flight_recorder((2, 13)) == {"TORCH_FR_BUFFER_SIZE": "2000"}
    assert flight_recorder((2, 6)) == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    assert len(flight_recorder(None)) == 2
