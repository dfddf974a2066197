"""What a job's output says of its end: exceptions, refusals, aborts, SLURM's notice; and who holds a port."""

import os
import pwd
import socket
import sysconfig
from pathlib import Path

import pytest
from ftmon.protocol.analysis.deaths.logs import AbortReader, RaisedException, address_in_use, cancelled, last_exception
from ftmon.trainer.host.sockets import holder_of
from ftmon.trainer.launch.launcher import cancelled_in


def exception(lines: list[str]) -> RaisedException:
    found = last_exception(lines)
    assert found is not None
    return found


IN_USE = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


def test_the_exception_of_a_rank_counts_before_its_launcher_s_and_two_at_once_are_told_apart():
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "    import nosuchmodule",
        "ModuleNotFoundError: No module named 'nosuchmodule'",
        "Traceback (most recent call last):",
        '  File "/lib/torchrun", line 8, in <module>',
        "    sys.exit(main())",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "====",
    ]
    found = exception(lines)
    assert found.words == "ModuleNotFoundError: No module named 'nosuchmodule'"
    assert found.place == "train.py:3 in <module>"
    lines = [
        "[rank1]: Traceback (most recent call last):", "[rank0]: Traceback (most recent call last):",
        '[rank1]:   File "a.py", line 1, in one', '[rank0]:   File "b.py", line 2, in two',
        "[rank1]: ValueError: of rank 1", "[rank0]: KeyError: 'of rank 0'",
    ]  # fmt: skip
    found = exception(lines)
    assert (found.rank, found.words) in ((1, "ValueError: of rank 1"), (0, "KeyError: 'of rank 0'"))


def test_an_exception_of_a_library_is_told_with_the_line_of_the_script_that_called_it() -> None:
    lines = [
        "Traceback (most recent call last):",
        f'  File "{sysconfig.get_path("scripts")}/axolotl", line 8, in <module>',
        '  File "/home/me/datasets/train.py", line 31, in main',
        "    load_dataset(name)",
        '  File "/venv/lib/python3.12/site-packages/datasets/load.py", line 1397, in load_dataset',
        '  File "/usr/lib/python3.12/pathlib.py", line 9, in open',
        "FileNotFoundError: no such data set",
    ]
    found = exception(lines)
    assert found.place == "/usr/lib/python3.12/pathlib.py:9 in open, called from /home/me/datasets/train.py:31 in main"
    library = exception([*lines[:2], *lines[4:]])
    assert "called from" not in library.place, "a console script is not user code"
    own = exception([*lines[:4], lines[-1]])
    assert own.place == "/home/me/datasets/train.py:31 in main", "raised there itself"


def test_native_code_that_a_wrapper_of_the_probe_called_was_called_by_the_code_around_the_wrapper() -> None:
    packages = "/venv/lib/python3.12/site-packages"
    lines = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/home/me/train.py", line 10, in <module>',
        f'[rank0]:   File "{packages}/torch/distributed/distributed_c10d.py", line 9, in all_reduce',
        f'[rank0]:   File "{packages}/ftmon/trainer/probe/hooks/collectives.py", line 89, in call',
        "[rank0]: RuntimeError: Timed out waiting 8000ms for recv operation to complete",
    ]
    found = exception(lines)
    assert found.place.endswith("/distributed_c10d.py:9 in all_reduce, called from /home/me/train.py:10 in <module>")
    assert exception([*lines[:2], *lines[3:]]).place == "/home/me/train.py:10 in <module>"
    alone = exception([lines[0], *lines[3:]])
    assert alone.place.endswith("collectives.py:89 in call"), "an error of the probe's own"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("RuntimeError: \n\nA guard:\n  main()\n\nlater", "RuntimeError: A guard:", "A guard:\n  main()"),
        ("RuntimeError:\nNeeds a guard:", "RuntimeError: Needs a guard:", "Needs a guard:"),
        ("lib.OwnError: no: such\nof this\n\nlater", "OwnError: no: such", "no: such\nof this"),
        ("AssertionError\nlaunching again", "AssertionError", ""),
        ("KeyboardInterrupt\n\nlater", "KeyboardInterrupt", ""),
    ],
)
def test_a_message_may_begin_with_blank_lines_or_be_missing(text: str, words: str, message: str) -> None:
    found = exception([*LAUNCHER[:2], *text.split("\n")])
    assert (found.words, found.message) == (words, message)


LAUNCHER = [
    "Traceback (most recent call last):",
    '  File "/lib/accelerate", line 8, in <module>',
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "=========",
    "train.py FAILED",
]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/venv/bin/python3: can't open file '/a/trian.py': [Errno 2] No such file", "python3: can't open file "),
        ("/usr/bin/python: No module named axolotl", "python: No module named axolotl"),
        ("python: Error while finding module specification for 'a.b' (Mod", "python: Error while finding module spec"),
        ("train.py: error: unrecognized arguments: --lr", "train.py: error: unrecognized arguments: "),
        ("./start.sh: line 3: torchrn: command not found", "start.sh: line 3: torchrn: command not found"),
        ("sh: 1: torchrn: not found", "sh: 1: torchrn: not found"),
        ("Error: No such option: --foo", "Error: No such option: --foo"),
    ],
)
def test_a_program_that_refuses_to_begin_is_the_cause_and_not_that_its_launcher_failed_for_it(line: str, words: str):
    for output in ([line], ["usage: train.py [-h]", line, *LAUNCHER]):
        found = exception(output)
        assert found.words.startswith(words)
        assert not found.place


def test_a_launcher_s_own_exception_is_told_where_nothing_else_is_and_half_a_traceback_names_none() -> None:
    lines = ["loading: done", "an error: no such thing", *LAUNCHER]
    assert exception(lines).words == "ChildFailedError: train.py FAILED"
    assert last_exception(["step 1", *LAUNCHER[:2]]) is None


WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out"
)


THROWN = "terminate called after throwing an instance of"
ASSERT = "ring.cc:12: reduce: Assertion `size > 0' failed"
CUDA = "/aten/Indexing.cu:1553: select: block: [0,0,0], thread: [1,0,0] Assertion `i < size` failed"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{THROWN} 'std::system_error'\n  what():  Not permitted", "std::system_error: Not permitted"),
        (f"{THROWN} 'int'\nmore", "an uncaught C++ exception: int"),
        (f"python3: {ASSERT}.", ASSERT),
        (f"{CUDA}.", CUDA),
        ("F1128 10:00:00.1 7 a.cc:12] Check failed: peer >= 0 (-1 vs. 0)", "Check failed: peer >= 0 (-1 vs. 0)"),
        ("free(): invalid pointer", "free(): invalid pointer"),
        ("double free or corruption (out)", "double free or corruption (out)"),
        ("*** stack smashing detected ***: terminated", "*** stack smashing detected ***: terminated"),
        (
            f"[rank1]:[E1128 10:00:00.123 ProcessGroupNCCL.cpp:682] {WATCHDOG}.\n{THROWN} 'c10::DistBackendError'\n"
            f"  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: {WATCHDOG}.\n"
            "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in /x/libc10.so)",
            WATCHDOG,
        ),
        ("AssertionError: Assertion failed\n  what():  nothing was thrown\nmalloc() is fine: yes", ""),
    ],
)
def test_the_reason_of_an_abort_is_what_the_library_wrote(text: str, reason: str) -> None:
    reader = AbortReader()
    for line in text.splitlines():
        reader.read(line)
    assert reader.reason == reason


@pytest.mark.parametrize(
    ("text", "port"),
    [
        (IN_USE, 29500),
        ("RuntimeError: failed to bind to [::]:29511 (errno: 98 - Address already in use).", 29511),
        ("OSError: [Errno 98] Address already in use", 0),
        ("ValueError: port: 29500", None),
    ],
)
def test_an_address_in_use_names_its_port_where_the_error_does(text: str, port: int | None) -> None:
    assert address_in_use(text) == port


def test_the_process_that_listens_on_a_port_is_named_and_a_free_one_is_held_by_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = holder_of(server.getsockname()[1])
    assert (found.pid, found.user) == (os.getpid(), pwd.getpwuid(os.getuid()).pw_name)
    with socket.socket() as bound:  # not listening; no other process can bind the port
        bound.bind(("127.0.0.1", 0))
        assert holder_of(bound.getsockname()[1]) is None


ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
CANCELLED = "slurmstepd: error: *** STEP 5.0 ON nodea CANCELLED AT 2026-11-21T12:00:00{why} ***"
FAILED_TASK = "srun: error: nodeb: task 1: Exited with exit code 1"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (CANCELLED.format(why=""), "cancelled by SLURM"),
        (CANCELLED.format(why="").replace("slurmstepd:", "slurmstepd-nodea:"), "cancelled by SLURM"),
        (CANCELLED.format(why=" DUE TO TIME LIMIT"), "cancelled by SLURM: time limit"),
        (CANCELLED.format(why=" DUE TO PREEMPTION"), "cancelled by SLURM: preemption"),
        (CANCELLED.format(why=" DUE TO JOB REQUEUE"), "cancelled by SLURM: job requeue"),
        (CANCELLED.format(why=" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), ""),
        # Old versions name no node.
        (
            "srun: error: *** STEP 5.0 CANCELLED AT 2010-01-01T12:00:00 DUE TO TIME LIMIT ***",
            "cancelled by SLURM: time limit",
        ),
        ("*** STEP 5.0 ON nodea CANCELLED AT noon ***", ""),
        ("srun: error: nothing", ""),
    ],
)
def test_a_job_that_slurm_cancelled_is_reported_with_the_reason(line, words):
    assert cancelled(["step 7", ABORTED, line, "srun: error: nodea: task 0: Terminated"]) == words


@pytest.mark.parametrize(
    "trouble",
    [
        FAILED_TASK,
        "srun: error: nodea: tasks 0-1,3: Segmentation fault (core dumped)",
        "srun: launch/slurm: _step_signal: Terminating StepId=5.0",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Exceeded job memory limit",
    ],
)
def test_a_step_that_is_ended_because_a_task_failed_was_not_cancelled_by_anybody(trouble):
    assert cancelled([trouble, ABORTED, CANCELLED.format(why="")]) == ""
    assert cancelled([trouble, CANCELLED.format(why=" DUE TO TIME LIMIT")]) == "cancelled by SLURM: time limit"


def test_a_log_is_read_at_its_end(tmp_path: Path):
    log = tmp_path / "launcher.log"
    assert cancelled_in(log) == ""
    log.write_text("x\n" * 100_000 + CANCELLED.format(why="") + "\n")
    assert cancelled_in(log) == "cancelled by SLURM"
    log.write_text(CANCELLED.format(why="") + "\n" + "x\n" * 100_000)
    assert cancelled_in(log) == ""
