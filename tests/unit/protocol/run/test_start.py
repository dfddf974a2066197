"""What cannot be started is refused in one line before anything is made."""

import io
import socket
from importlib import util
from importlib.machinery import ModuleSpec
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.errors import UsageError
from ftmon.protocol.run import exits, rundir
from ftmon.protocol.run.notices import Notify
from ftmon.protocol.run.rundir import RunOptions
from ftmon.protocol.run.start import StartRequest, bytecode_environment, spawn_start
from ftmon.trainer.host.sockets import Listen, check_free, parse_listen, parse_metrics
from ftmon.trainer.launch import start

pytestmark = pytest.mark.usefixtures("private_home")


@pytest.fixture
def start_with(monkeypatch):
    """Has the process that starts runs read a request, or any other bytes; returns its exit status."""

    def status(request):
        written = request if isinstance(request, bytes) else msgspec.json.encode(request)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(written)))
        return start.main([])

    return status


def run_of(*command, **options):
    return StartRequest("run", options=RunOptions(**options), command=list(command))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (run_of(), "no command"),
        (run_of("no-such-program-here"), "no-such-program-here: command not found"),
        (run_of("true", listen="nonsense"), "must be HOST:PORT"),
        (run_of("true", listen="127.0.0.1:99999"), "must be HOST:PORT"),
        (run_of("true", metrics="localhost:web"), "--metrics localhost:web: must be [HOST:]PORT"),
        (run_of("true", metrics="70000"), "--metrics 70000: must be [HOST:]PORT"),
        (run_of("true", metrics="/no/such/folder/run.prom"), "/no/such/folder is not a folder that you can write to"),
        (run_of("true", metrics="192.0.2.1:9400"), "port 9400 cannot be used"),
        (run_of("true", report_to=["otel", "foo"]), "--report-to foo: must be one of otel"),
        (run_of("true", allow_console=True), "need --on-oom hold"),
        (run_of("true", hold_timeout=5.0), "need --on-oom hold"),
        (run_of("true", on_oom="hold", hold_timeout=-1.0), "--hold-timeout must be seconds"),
        (run_of("true", stop_grace=-1.0), "--stop-grace must be seconds"),
        (run_of("true", probe_budget=101.0), "--probe-budget must be a percentage"),
        (run_of("true", on_oom="hold", allow_console=True, read_only=True), "runs no code from outside"),
        (run_of("true", exit_timeout=5.0, read_only=True), "--exit-timeout need a run that is not --read-only"),
        (StartRequest("run", command=["true"], notify=Notify([" "], ["hang"])), "--notify needs a command"),
        (StartRequest("run", command=["true"], line=987), "descriptor 987, which is not open"),
        (b'{"kind": "run", "options": {"on_hang": "pray"}}', "$.options.on_hang"),
        (b"", "must be a request to start a run"),
    ],
)
def test_wrong_usage_is_one_line_with_a_status_of_its_own_and_no_run(request_, said, private_home, start_with, capsys):
    assert start_with(request_) == (exits.NOT_STARTED if "not found" in said else exits.RUN_USAGE)
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert rundir.all_runs() == []


def test_no_number_of_seconds_and_a_word_that_is_not_utf_8_are_refused_before_anything_starts():
    with pytest.raises(UsageError, match="--hang-grace must be seconds"):
        RunOptions(hang_grace=float("nan")).check()
    with pytest.raises(UsageError, match="not UTF-8"):
        spawn_start(run_of("python", b"caf\xe9.py".decode("utf-8", "surrogateescape")), environ={})


def test_how_to_run_a_script_that_is_not_executable_and_a_taken_port_are_named(
    private_home, tmp_path, start_with, capsys
):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    assert start_with(run_of(str(script))) == exits.NOT_STARTED
    assert f"python {script}" in capsys.readouterr().err
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert start_with(run_of("true", listen=f"127.0.0.1:{port}")) == exits.RUN_USAGE
    assert f"port {port} cannot be used" in capsys.readouterr().err


def test_metrics_without_the_client_library_name_its_extra(private_home, start_with, capsys, monkeypatch):
    monkeypatch.setattr("ftmon.trainer.host.sockets.find_spec", lambda _: None)
    assert start_with(run_of("true", metrics="9400")) == exits.RUN_USAGE
    assert "pip install 'ftmon[metrics]'" in capsys.readouterr().err


def test_a_run_is_named_after_its_script():
    commands = ("deepspeed --num_gpus 2 dir/train.py --x", "bash go.sh", "/usr/bin/env")
    assert [start.default_name(command.split()) for command in commands] == ["train", "go", "env"]


def test_listen_gives_every_channel_a_port_of_its_own_and_metrics_are_for_this_host_unless_addressed():
    addresses = parse_listen("127.0.0.1:7420").addresses()
    assert addresses["ranks"] == "tcp://127.0.0.1:7421"
    assert sorted(addresses.values()) == [f"tcp://127.0.0.1:{port}" for port in range(7421, 7426)]
    assert parse_listen(":7420").host == "0.0.0.0"
    assert parse_listen("[::1]:7420").addresses()["agents"] == "tcp://[::1]:7425"
    with pytest.raises(UsageError, match="cannot be used"):  # an address of another host
        check_free(parse_listen("192.0.2.1:7420"))
    assert parse_metrics("9400") == Listen("127.0.0.1", 9400)
    assert parse_metrics("0.0.0.0:9400").host == "0.0.0.0"
    assert parse_metrics("[::1]:9400") == Listen("::1", 9400)
    assert parse_metrics("x/run.prom") == Path("x/run.prom")


def test_bytecode_is_kept_in_the_home_where_it_is_not_kept_beside_the_libraries(tmp_path, monkeypatch):
    source = tmp_path / "torch.py"
    source.touch()
    monkeypatch.setattr(util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(source)))
    own = {"PYTHONPYCACHEPREFIX": str(rundir.home() / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    assert bytecode_environment({}) == {}
    assert bytecode_environment({"PYTHONDONTWRITEBYTECODE": "1"}) == own
    assert bytecode_environment({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/tmp"}) == {}
    kept = Path(util.cache_from_source(str(source)))
    kept.parent.mkdir()
    kept.touch()
    assert bytecode_environment({"PYTHONDONTWRITEBYTECODE": "1"}) == {}
