"""The grammar of the command line, and what importing it costs."""

import pytest
from ftmon.tui.cli.arguments import COMMANDS, INTERNAL, SHELLS, build_parser
from ftmon.tui.cli.main import main, parse


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_learns_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("demo", "attach", "replay", "completion", "print-config"))


def test_help_names_every_command_but_internal_ones_and_the_probe_s_budget_is_a_percentage(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    names = [command.name for commands in COMMANDS.values() for command in commands]
    (parsers,) = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    assert sorted(names) == sorted(parsers)
    assert {name for name in names if f"\n  {name} " not in text} == set(INTERNAL)
    assert parse(["run", "--probe-budget", "0", "--", "true"]).probe_budget == 0.0
    for given in ("-1", "101", "half"):
        with pytest.raises(SystemExit):
            parse(["run", f"--probe-budget={given}", "--", "true"])
        assert "--probe-budget: must be a percentage, 0 to 100" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["predict", "c.yaml"], ["report", "r"], ["sweep", "s.yaml"]])
def test_a_price_is_that_of_one_gpu_hour_wherever_it_is_given(given, capsys):
    assert parse([*given, "--price", "2.5"]).price == 2.5
    with pytest.raises(SystemExit):
        parse([given[0], "--help"])
    assert "price of one GPU for one hour, any currency: costs are hours x GPUs x P" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("command", ["demo", "train"])
def test_overrides_may_stand_between_options(command):
    config = [] if command == "demo" else ["mine.yaml"]
    arguments = parse([command, *config, "zero.stage=2", "--plain", "steps=3", "--detach", "data.path=a=b"])
    assert arguments.overrides == ["zero.stage=2", "steps=3", "data.path=a=b"]
    assert arguments.plain
    assert arguments.detach
    assert command == "demo" or arguments.config == "mine.yaml"


def test_the_watched_command_keeps_its_options_ascii_stands_anywhere_and_ftmon_alone_opens_the_list():
    arguments = parse(["run", "--name", "x", "--", "deepspeed", "--num_gpus", "2", "train.py", "--", "--name", "y"])
    assert arguments.name == "x"
    assert arguments.command == ["deepspeed", "--num_gpus", "2", "train.py", "--", "--name", "y"]
    arguments = parse(["run", "--plain", "torchrun", "--nproc-per-node", "2", "train.py", "--plain"])
    assert arguments.plain
    assert arguments.command == ["torchrun", "--nproc-per-node", "2", "train.py", "--plain"]
    for command, name in (("ls", "runs"), ("logs", "run"), ("report", "targets")):
        assert "run" in getattr(parse([command, "run", "--"]), name), "a run called run"
    arguments = parse(["kill", "x", "--rank", "1", "--rank", "3", "--signal", "TERM", "--yes"])
    assert (arguments.rank, arguments.signal, arguments.yes) == ([1, 3], "TERM", True)
    assert all(parse(words).ascii for words in (["--ascii"], ["--ascii", "attach"], ["attach", "--ascii"]))
    assert parse([]).handler == "watch:choose"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["frobnicate"], "there is no command 'frobnicate'; ftmon --help lists them"),
        (["run", "deepspeed", "--", "train.py"], "unexpected 'deepspeed' before '--'"),
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["kill"], "the following arguments are required: RUN"),
        (["kill", "x", "--signal", "HUP"], "invalid choice: 'HUP'"),
        (["kill", "x", "--rank", "one"], "must be a rank's number, not 'one'"),
        (["kill", "x", "--rank", "9" * 23], "must be a rank's number, not '999"),
        (["kill", "x", "--rank", "16384"], "must be a rank's number, not '16384'"),
        (["demo", "--steps", "0"], "must be a whole number of 1 or more, not '0'"),
        (["demo", "--stepz", "4"], "unrecognized arguments: --stepz"),
        (["attach", "x", "--plane"], "unrecognized arguments: --plane"),
        (["completion", "fish"], "invalid choice: 'fish'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "a.yaml"], ["data", "check", "a.yaml"], ["attach"]])
def test_an_unknown_option_is_refused_with_the_usage_of_its_command(words, capsys):
    name = " ".join(["ftmon", *(word for word in words if word != "a.yaml")])
    with pytest.raises(SystemExit):
        parse([*words, "--nope"])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {name} ")
    assert error.endswith(f"{name}: error: unrecognized arguments: --nope\n")


@pytest.mark.parametrize("command", ["replay", "report", "memory", "logs", "events", "oom"])
def test_a_recording_that_is_not_there_is_wrong_usage(command, capsys):
    assert main([command, "nope.sqlite"]) == 2
    assert capsys.readouterr().err == "ftmon: nope.sqlite: no such file\n"


@pytest.mark.parametrize(
    ("words", "complaint", "status"),
    [(["run"], "run needs a command after '--'", 195), (["train"], "train needs MODEL DATA or CONFIG.yaml", 2)],
)
def test_what_names_nothing_to_start_is_wrong_usage(words, complaint, status, capsys):
    assert main(words) == status
    error = capsys.readouterr().err
    assert error.startswith(f"ftmon: {complaint}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["attach", "status", "logs", "kill", "stop", "replay"])
def test_an_unknown_run_is_one_line_and_status_2(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    assert main([command, "nosuch"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ftmon: no ")
    assert error.count("\n") == 1
