"""What ``ftmon run`` owes to whoever starts it: the script's exit status, signals, input, and no run left over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from eventually import eventually
from ftmon.protocol.run import exits
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import LONG_SECONDS, PROGRAM, Ftmon, command_line, follow_to_end, processes_of

PRINTS_SIGNALS = str(Path(__file__).parent / "scripts" / "prints_signals.py")
ENDS = {"abrupt": ("import os; os._exit(2)", 2), "killed": ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)}


def launch(home: Ftmon, *words: str, **options: object) -> "subprocess.Popen[str]":
    return home.start("run", "--plain", *words, **options)


def printed(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


def sleeping(run: RunDir) -> list[psutil.Process]:
    """List the run's living ``sleep``; its launcher and hub may end while this looks at them."""
    return [process for process in processes_of(run) if command_line(process)[:1] == ["sleep"]]


def test_the_exit_status_is_the_scripts_own_and_no_outcome_of_ftmons_is_taken_for_it(home):
    started = {name: launch(home, "--", sys.executable, "-c", script) for name, (script, _) in ENDS.items()}
    refused = home.run("run", "--no-such-option", "--", "true")
    absent = home.run("run", "--", "no-such-program")
    found = {name: follow_to_end(process)[0] for name, process in started.items()}
    assert found == {name: status for name, (_, status) in ENDS.items()}
    assert (refused.returncode, absent.returncode) == (exits.RUN_USAGE, exits.NOT_STARTED)


def test_a_script_of_an_environment_whose_path_has_a_space_is_started_by_its_interpreter(home, tmp_path):
    folder = tmp_path / "my venv"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    script = folder / "deepspeed"
    script.write_text(f"#!{folder}/python3\nimport sys\nprint(sys.argv[1:])\n")
    script.chmod(0o755)
    home.environ["PATH"] = f"{folder}:{home.environ['PATH']}"
    begun = [launch(home, "--", word, "a b", cwd=tmp_path) for word in ("deepspeed", "./my venv/deepspeed")]
    for process in begun:
        status, output, errors = follow_to_end(process)
        assert status == 0, output + errors
        assert "['a b']" in output


def test_a_command_that_ends_before_what_it_started_is_the_alert_and_its_processes_are_ended(home):
    status, output, errors = follow_to_end(launch(home, "--", "sh", "-c", "sleep 300 & exit 3"))
    assert status == 3, errors
    assert "the job's command ended (exit code 3) before its ranks" in output
    run = home.newest()
    left, end = run.read_leftovers(), run.read_exit()
    assert (left.exit_code, left.count, end.left) == (3, 1, [])
    assert sleeping(run) == []


def test_what_a_job_left_is_ended_and_its_end_recorded_where_the_connection_file_cannot_be_read(home):
    damage = "until test -s $FTMON_RUN/hub.json; do sleep 0.05; done; echo '{' > $FTMON_RUN/hub.json"
    follow_to_end(launch(home, "--", "sh", "-c", f"{damage}; sleep 300 & exit 3"))
    run = home.newest()
    end = eventually(run.read_exit, "the recorded end")
    assert (end.exit_code, end.left) == (3, [])
    assert sleeping(run) == []


def test_signals_reach_the_script_its_answer_is_the_status_and_it_reads_the_commands_input(home):
    begun = [PROGRAM, "run", "--plain", "--", sys.executable, PRINTS_SIGNALS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(begun, text=True, env=home.environ, **pipes)  # pyright: ignore
    process.stdin.write("a line\n")
    process.stdin.flush()
    printed(process, r"read 'a line\n'")
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        printed(process, f"got {number.name}")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # timeout(1) signals its child, and then its group
    status, output, errors = follow_to_end(process)
    assert status == 5, output + errors
    assert output.count("got SIGTERM") == 1
    assert "stopped by SIGTERM (exit code 5)" in output


def test_a_command_that_was_killed_and_one_under_timeout_leave_no_process_and_a_detached_run_lives(home, tmp_path):
    stubborn = [sys.executable, PRINTS_SIGNALS, "stubborn"]
    kept = home.run("run", "--detach", "--name", "kept", "--", *stubborn)
    assert kept.returncode == 0, kept.stderr
    killed = launch(home, "--name", "killed", "--stop-grace", "1", "--", *stubborn)
    printed(killed, "read ''")
    killed.kill()
    words = ["timeout", "600", PROGRAM, "run", "--plain", "--name", "limited", "--stop-grace", "1", "--", *stubborn]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    limited = subprocess.Popen(words, text=True, env=home.environ, **pipes)  # pyright: ignore
    printed(limited, "read ''")
    limited.send_signal(signal.SIGALRM)  # timeout(1)'s own alarm: its time is up
    assert follow_to_end(limited)[0] == 124, "timeout's own status: it waited for the end"
    runs = {run.id.split("-")[0]: run for run in home.runs()}
    for name in ("killed", "limited"):
        run = runs[name]
        eventually(lambda run=run: not processes_of(run), "nothing of it alive")
        end = run.read_exit()
        assert (end.state, end.exit_code) == ("stopped", -signal.SIGKILL), end
        shown = home.run("status", run.id).stdout
        assert shown.startswith(f"{run.id}  stopped, killed by SIGKILL"), shown
    end = runs["killed"].read_exit()
    assert "the command that started it is gone" in end.text
    assert processes_of(runs["kept"])


def test_a_reader_that_goes_away_ends_the_printing_and_not_the_run(home, tmp_path):
    go, lines = tmp_path / "go", tmp_path / "lines"
    lines.touch()
    script = f"import time, pathlib; go, lines = pathlib.Path({str(go)!r}), open({str(lines)!r}, 'a', 1)\n"
    script += "print('up', flush=True)\n"
    script += "while not go.exists(): print('more', flush=True); print('more', file=lines); time.sleep(0.1)\nexit(7)"
    process = launch(home, "--", sys.executable, "-c", script)
    printed(process, "up")
    process.stdout.close()
    printed_before = lines.stat().st_size
    eventually(lambda: lines.stat().st_size > printed_before + 10 * len("more\n"), "lines into the closed pipe")
    go.touch()
    assert process.wait(LONG_SECONDS) == 7


def test_a_hangup_under_nohup_is_nobodys(home, tmp_path):
    go = tmp_path / "go"
    script = f"import os, time; print('up', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
    process = launch(
        home, "--", sys.executable, "-c", script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    printed(process, "up")
    process.send_signal(signal.SIGHUP)
    lines = {process.pid: command_line(process) for process in processes_of(home.newest())}
    job = next(pid for pid, words in lines.items() if str(go) in " ".join(words) and "run" not in words)
    os.kill(job, signal.SIGHUP)
    go.touch()
    assert follow_to_end(process)[0] == 0
