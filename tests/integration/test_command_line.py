"""What the command line does as a process of its own: completion, pipes, imports, JSON."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.errors import UsageError
from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.messages import control
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run import exits, rundir
from ftmon.protocol.run.rundir import HubFile, RunDir
from ftmon.trainer.launch.environment import prepare
from ftmon.trainer.recipe.config.load import decode, parse
from ftmon.trainer.recipe.config.schema import Config
from ftmon.tui.cli.access import ask
from ftmon.tui.cli.main import main
from hostile import HOSTILE, TRACES, examples
from streams import RUN, STARTED

pytestmark = pytest.mark.usefixtures("private_home")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_options_and_run_names(tmp_path, capsys):
    file = tmp_path / "ftmon.bash"
    file.write_text(script("bash", capsys))
    (tmp_path / "runs" / "demo-20250101-000000").mkdir(parents=True)

    def complete(*words: str) -> list[str]:
        code = (
            f". {file}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1};"
            ' _shtab_ftmon; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        environment = {**os.environ, "FTMON_HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, env=environment, timeout=200, check=True
        )
        return done.stdout.split()

    assert complete("ftmon", "att") == ["attach"]
    assert complete("ftmon", "attach", "de") == ["demo-20250101-000000"]
    assert "--signal" in complete("ftmon", "kill", "--s")
    for command in ("oom", "report", "compare"):
        assert complete("ftmon", command, "de") == ["demo-20250101-000000"]


def test_nothing_that_is_piped_moves_a_cursor_and_json_keeps_every_character(tmp_path, capfdbinary):
    """One recording full of hostile text: of each kind of output one through a process's real pipes."""
    path = tmp_path / "evil.sqlite"
    writer = Writer(path, RUN)
    for number, message in enumerate(examples(), 1):
        writer.append(number, STARTED + number, message)
    writer.close()
    name = f"evil{HOSTILE}".replace("/", "").replace("\0", "")
    for words in (["status", path], ["status", "--json", path], ["logs", path], ["memory", "--json", path],
                  ["oom", path], ["oom", "--json", path], ["stacks", path], ["events", "--json", path],
                  ["status", name], ["replay", f"./{name}"], ["keys", f"--remove={name}"], ["ls", name],
                  ["snapshot", name], ["train", name], [name]):  # fmt: skip
        given = list(map(str, words))
        if words[0] in ("logs", "memory") or given == ["status", name]:
            command = [sys.executable, "-m", "ftmon.tui.cli", *given]
            done = subprocess.run(command, capture_output=True, timeout=120, check=False)
            out, err = done.stdout, done.stderr
        else:
            with contextlib.suppress(SystemExit):
                main(given)
            out, err = capfdbinary.readouterr()
        printed = out + err
        assert b"Traceback" not in printed, printed[-2000:]
        assert not [trace for trace in TRACES if trace in printed], (words, printed)
        if "--json" in words and words[0] != "events":
            assert "PWNED" in json.dumps(json.loads(out))


HEAVY = {"torch", "textual", "zmq", "deepspeed", "rich"}


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (["--help"], HEAVY | {"msgspec", "sqlite3"}),
        (["--version"], HEAVY | {"msgspec", "sqlite3"}),
        (["run", "--help"], HEAVY | {"msgspec", "sqlite3"}),
        (["ls"], HEAVY),
        (["status", "none"], HEAVY),
    ],
)
def test_short_commands_import_neither_torch_nor_textual_nor_zmq(words, forbidden):
    code = (
        "import sys\nfrom ftmon.tui.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        f"heavy = {forbidden!r} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["ls", "--json"], ["--help"]])
def test_output_that_cannot_be_written_is_one_line_and_without_a_reader_none(words):
    command = [sys.executable, "-m", "ftmon.tui.cli", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ftmon: the output cannot be written: ")
    assert len(done.stderr.splitlines()) == 1
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_command_that_is_not_utf_8_is_wrong_usage():
    hub = HubFile(ProcessId(1, 1), {}, "0", "here", 0.0)
    with pytest.raises(UsageError):
        ask(hub, control.Console(os.fsdecode(b"print('\xff')"), 0))


def read(text: str) -> Config:
    return decode(parse(text, "train.yaml"), "train.yaml").config


def test_print_config_needs_no_torch():
    program = (
        "import sys; from ftmon.trainer.recipe import start; status = start.main(['print-config'])\n"
        "assert not {'torch', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules), 'imported torch'\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert read(done.stdout) == Config()


def test_its_json_is_json_alone_whatever_libraries_print():
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "ftmon.trainer.doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    checks = json.loads(done.stdout)
    assert all(set(check) == {"name", "state", "text", "remedy"} for check in checks)
    assert done.returncode == int(any(check["state"] == "error" for check in checks))


@pytest.fixture
def run() -> RunDir:
    return rundir.create("two", ["deepspeed", "train.py"], "run", {"logs": True, "listen": "0.0.0.0:7420"})


def test_a_further_host_becomes_its_command_as_a_part_of_the_run(run, tmp_path):
    path = prepare(run, "0.0.0.0:7420")
    join = f"-P -m ftmon.trainer.launch.start join {shlex.quote(str(path))} -- sh -c 'env; exit 7'"
    words = [sys.executable, *shlex.split(join)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert f"FTMON_RUN={run.path}" in done.stdout.splitlines()
    assert f"joining {run.id}" in done.stderr
    words[5] = str(tmp_path / "none.json")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (exits.RUN_USAGE, 1)


@pytest.mark.parametrize("words", [["ls"], ["completion", "bash"], ["train", "--print-config"], ["keys"]])
def test_closed_standard_streams_are_no_error(words):
    closed = f"{shlex.quote(sys.executable)} -m ftmon.tui.cli {' '.join(words)} <&- >&-"
    done = subprocess.run(["bash", "-c", closed], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_a_prediction_without_a_word(tmp_path):
    (tmp_path / "train.yaml").write_text("model: {config: {model_type: llama}}\ndata: {path: rows.jsonl}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "ftmon.tui.cli", "predict", "train.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    command = Path(f"/proc/{process.pid}/cmdline")
    # While PyTorch is being imported, which takes a second.
    eventually(
        lambda: b"ftmon.trainer.foreground" in command.read_bytes() and "libtorch" in maps_of(process.pid),
        "the command to import PyTorch",
    )
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=200)
    assert (process.returncode, output, errors) == (exits.INTERRUPTED, b"", b"")


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()
