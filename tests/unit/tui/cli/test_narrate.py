"""The plain lines a run is told in."""

from collections.abc import Sequence

import msgspec
import pytest
from ftmon.protocol.messages import control, telemetry, wire
from ftmon.protocol.messages.memory import OomReport, OomVerdict, Remedy
from ftmon.protocol.run import exits
from ftmon.protocol.run.rundir import ExitFile, RunDir, RunFile
from ftmon.tui.cli import arguments, narrate
from ftmon.tui.cli.narrate import Narrator
from ftmon.tui.model.run import RunModel
from models import model_of
from places import DOCS


def test_the_exit_status_is_the_trainings_own_as_a_shell_gives_it_or_that_of_what_ended_it():
    for code, status in ((0, 0), (1, 1), (2, 2), (3, 3), (255, 255), (-9, 137)):
        assert exits.of_run(ExitFile(code, 0.0, "failed" if code else "finished")) == status
    for code, status in ((-2, 130), (5, 5), (0, 0)):
        assert exits.of_run(ExitFile(code, 0.0, "stopped")) == status
    for cause, status in exits.CAUSES.items():
        assert exits.of_run(ExitFile(-9, 1.0, "failed", "", cause)) == status


def test_the_codes_for_ftmons_own_outcomes_are_those_of_nobody_else_and_stand_in_the_help_and_the_guide():
    assert set(exits.CAUSES.values()) | {exits.RUN_USAGE, exits.LEFT} == set(exits.OWN)
    assert not set(exits.OWN) & {0, 1, 2, 120, *range(64, 79), *range(124, 193), *range(200, 256)}
    guide = (DOCS / "guide.md").read_text()
    for code, meaning in exits.OWN.items():
        assert f"| {code} | {meaning} |" in guide
        assert f"  {code}  {meaning}\n" in arguments._RUN_EPILOG


def closing(run: RunDir, code: int, *messages: wire.Message, state: str = "", **options: bool) -> list[str]:
    """Return the last lines of a run that ended with a status, of which these messages were received."""
    end = ExitFile(code, 12.0, state or ("failed" if code else "finished"), f"exit code {code}")
    return list(narrate.closing_lines(run, end, model_of(*messages, t=0.0, every=1.0), **options))


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "demo-1")
    run.logs.mkdir(parents=True)
    return run


def test_closing_lines_say_where_everything_is(run, tmp_path):
    run.recording.touch()
    output = tmp_path / "out"
    for file, text in (("model/config.json", "{}"), ("checkpoints/latest", "step-8\n")):
        (output / file).parent.mkdir(parents=True)
        (output / file).write_text(text)
    assert closing(run, 0, telemetry.Plan(0, 8, output_dir=str(output)), state="stopped") == [
        "demo-1 stopped: exit code 0",
        f"model:      {output}/model",
        f"chat:       ftmon chat {output}/model",
        f"checkpoint: {output}/checkpoints/step-8",
        f"resume it:  ftmon train CONFIG.yaml checkpoint.resume={output}/checkpoints/step-8",
        f"recording:  {run.recording}",
        "replay it:  ftmon replay demo-1",
    ]


def test_a_run_of_the_trainer_is_resumed_with_its_own_configuration(run):
    latest = run.path / "output" / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("step-8\n")
    run.config.touch()
    run.write_run(RunFile("tuned-1", "tuned", 0.0, ["deepspeed"], "/", "here", "train"))
    resume = "resume it:  ftmon resume demo-1"
    assert resume in closing(run, 1)
    lines = closing(run, 0)
    assert f"checkpoint: {latest.parent}/step-8" in lines
    assert resume not in lines, "nothing is left to train"


def test_a_failed_run_shows_the_last_words_of_the_rank_that_failed_first(run):
    run.rank_log(0, "err").write_text("Traceback\nConnectionError: peer\n")
    run.rank_log(1, "err").write_text("data.path: line 7 is not JSON\n" + "x" * 5000 + "\n")
    alerts = (
        control.Alert(1, "failure", "error", 12.0, "rank 0 failed", rank=0),
        control.Alert(2, "died", "error", 11.0, "rank 1 ended", rank=1),
        control.Alert(3, "died", "info", 10.0, "rank 2 killed, as asked", rank=2),
    )
    lines = closing(run, 2, *alerts)
    assert lines[:2] == ["  rank 1| data.path: line 7 is not JSON", f"  rank 1| {'x' * 400}..."]
    assert not any("rank 0|" in line for line in lines)
    assert closing(run, 2, *alerts, output_printed=True)[0] == "demo-1 failed: exit code 2"


def test_a_run_that_ran_out_of_memory_names_what_to_try_first_and_the_command_that_explains_it(run):
    error = telemetry.Oom(1, 7, "forward", 11.0, 2**30, 0, 2**33, 2**32, 2**32)
    halved = Remedy("micro_batch", "halve the micro-batch", "micro_batch=1", 2**30, "about")
    verdict = OomVerdict("activations", "activations", "text")
    report = OomReport(1, 7, "forward", 11.0, error, verdict, [halved, Remedy("zero", "shard")])
    alert = control.Alert(1, "oom", "error", 11.0, "rank 1 out of memory", rank=1)
    assert closing(run, 1, report, alert)[1:4] == [
        "why:        rank 1 out of memory",
        "try first:  halve the micro-batch (frees about 1.00 GiB) micro_batch=1.",
        "details:    ftmon oom demo-1",
    ]
    assert closing(run, 1, alert)[1:] == ["why:        rank 1 out of memory", f"logs:       {run.logs}"], (
        "ftmon oom knows no more"
    )


def test_a_run_directory_that_is_gone_is_reported_and_a_failed_run_shows_its_last_words(tmp_path, run):
    missing = RunDir(tmp_path / "runs" / "demo-1")
    gone = f"directory:  {missing.path} was moved or removed during the run: no recording and no logs are there"
    assert closing(missing, 0) == ["demo-1 finished: exit code 0", gone]
    assert closing(missing, 1) == ["demo-1 failed: exit code 1", gone]
    (run.logs / "launcher.log").write_text("".join(f"line {n}\n" for n in range(100)) + "ValueError: \x1b[1mno\n\n")
    assert closing(run, 1)[14:] == ["  ValueError: no", "demo-1 failed: exit code 1", f"logs:       {run.logs}"]


START = 1_700_000_000.0
SPAN = telemetry.Span(2**30, 2**30, 3 * 2**30)
GPU = telemetry.DeviceInfo("cuda", 0, "NVIDIA H200", 140 * 2**30)
CPU = telemetry.DeviceInfo("cpu", 0, "Intel Xeon", 2**40)


def hello(rank: int, world: int = 2, device: telemetry.DeviceInfo = GPU, model: str = "Qwen2") -> telemetry.Hello:
    return telemetry.Hello(
        rank, rank, world, "host", 100 + rank, 1, device, "cuda", START, zero_stage=2, precision="bf16", model=model
    )


def step(rank: int, number: int, t: float) -> telemetry.Step:
    phase = telemetry.PhaseRecord("optimizer", 0, 500_000, SPAN, SPAN)
    return telemetry.Step(rank, number, t - 0.5, 500_000, [phase], loss=2.5, tokens=1000)


def new_lines(messages: Sequence[tuple[float, wire.Message]], **options: bool) -> list[str]:
    model = RunModel()
    narrator = Narrator(**options)
    lines: list[str] = []
    for seq, (t, message) in enumerate(messages, 1):
        model.apply(wire.Frame(seq, START + t, message))
        lines += [line[9:] for line in narrator.new_lines(model)]  # without the local time of day
    return lines


def test_ranks_are_introduced_once_when_all_have_said_hello_on_the_cpu_with_the_first_step():
    told = new_lines([(0, hello(0)), (1, hello(1)), (2, hello(1))])
    assert told == ["2 ranks on NVIDIA H200, Qwen2, ZeRO-2, bf16"]
    before = [(0, hello(0, 1, CPU, "")), (1, hello(0, 1, CPU))]
    assert new_lines(before) == []
    first = (3, step(0, 1, START + 3))
    assert new_lines([*before, (2, hello(0, 1)), first])[0] == "1 rank on NVIDIA H200, Qwen2, ZeRO-2, bf16"
    told = new_lines([*before, first])
    assert told[0] == "1 rank on Intel Xeon, Qwen2, ZeRO-2, bf16"
    assert told[1].startswith("step 1 ")
    adapted = msgspec.structs.replace(hello(0, 1), parameters=8000, trainable_parameters=50)
    assert new_lines([(0, adapted)]) == ["1 rank on NVIDIA H200, Qwen2 (0.62% of its parameters trained), ZeRO-2, bf16"]
    told = new_lines([(0, hello(0)), (0, hello(1)), (1, step(0, 1, START + 1)), (1.2, step(1, 1, START + 1))])
    (progress,) = told[1:]
    assert progress.startswith("step 1  loss 2.5000  "), "when every rank has finished it"
    assert "peak 3.00 GiB" in progress


def test_lines_keep_their_distance_but_the_last_step_is_told_and_its_line_waits_for_its_figures():
    plan = (0.0, telemetry.Plan(0, 40))
    steps = [(n * 0.5, step(0, n, START + n * 0.5)) for n in range(1, 41)]
    told = new_lines([(0, hello(0, 1)), plan, *steps])
    numbers = [int(line.split()[1].split("/")[0]) for line in told if line.startswith("step")]
    assert (numbers[0], numbers[-1]) == (1, 40)
    assert 8 <= len(numbers) <= 12
    begun = telemetry.Heartbeat(0, 3, "idle", START + 1, 1, START + 1.1)  # sent before step 2 has been
    last = msgspec.structs.replace(step(0, 2, START + 1.1), loss=1.5)
    before = [(0, hello(0, 1)), (0, telemetry.Plan(0, 2)), (1, step(0, 1, START + 1))]
    told = new_lines([*before, (1.1, begun), (1.2, last)])
    assert [line[:22] for line in told[1:]] == ["step 1/2  loss 2.5000 ", "step 2/2  loss 1.5000 "]


def test_an_alert_is_told_when_it_is_raised_and_over_and_an_early_stop_after_the_last_step():
    raised = control.Alert(7, "hang", "error", START, "rank 1 has not entered all_reduce #12", rank=1)
    over = control.Alert(7, "hang", "error", START, raised.title, rank=1, resolved=START + 9)
    again = control.Alert(7, "hang", "error", START, raised.title, rank=1, count=2)
    told = new_lines([(0, raised), (1, raised), (9, over), (10, over), (19, again), (20, again)])
    assert told[:2] == [f"✖ hang: {raised.title}", f"  over: {raised.title}"]
    assert [line.strip()[:6] for line in told[2:]] == ["✖ hang"]
    stop = telemetry.EarlyStop(0, 3, START + 1.3, 1, 2.25, 2)
    steps = [(1 + n / 10, step(0, n, START + 1)) for n in (1, 2, 3)]
    told = new_lines([(0, hello(0, 1)), *steps, (1.4, stop), (2, stop)])
    assert [line[:7] for line in told[1:-1]] == ["step 1 ", "step 3 "]
    assert told[-1] == "stopped early at step 3: no lower loss in 1 evaluation; best 2.2500 at step 2"
    told = new_lines([(0, hello(0, 1)), *steps[:2], (2, control.RunState("failed", START + 2, "exit code 1"))])
    assert told[-2].startswith("step 2 ")
    assert told[-1] == "failed: exit code 1"


def test_what_an_alert_says_to_do_follows_it_once_in_lines_of_80_columns():
    remedy = "Use deepspeed.utils.safe_set_full_fp32_param, or modifier_rank before the engine is made."
    evidence = {"remedy": remedy, "frame": "train.py:52 main"}
    raised = control.Alert(7, "health", "warning", START, "a change of 1 parameter is lost", evidence=evidence)
    spike = control.Alert(8, "spike", "warning", START, "rank 1 optimizer +0.9 GiB")
    explained = msgspec.structs.replace(
        spike, evidence={"remedy": "fused AdamW", "cause_where": "train.py:60 step", "saves_bytes": 2**30}
    )
    told = new_lines([(START, message) for message in (raised, spike, raised, explained, explained)])
    assert told[1:3] == [
        "  try: train.py:52 main: Use deepspeed.utils.safe_set_full_fp32_param,",
        "       or modifier_rank before the engine is made.",
    ]
    assert all(len(line) <= 80 - 9 for line in told)
    assert [line for line in told if "fused" in line] == ["  try: train.py:60 step: fused AdamW (saves 1.00 GiB)"]
    assert sum("before the engine is made." in line for line in told) == 1


def test_output_is_ascii_where_wanted_and_that_of_the_ranks_on_request_and_cannot_steer_the_terminal():
    raised = control.Alert(7, "spike", "warning", START, "rank 1 optimizer +0.9 GiB – temporaries")
    assert new_lines([(0, raised)], ascii_only=True) == ["! spike: rank 1 optimizer +0.9 GiB ? temporaries"]
    log = telemetry.LogLine(1, START, "err", "\x1b[2Jboom\x07")
    assert new_lines([(0, log)]) == []
    model = RunModel()
    model.apply(wire.Frame(1, START, log))
    (line,) = Narrator(with_output=True).new_lines(model)
    assert line == "rank 1| boom\N{REPLACEMENT CHARACTER}"


def test_evaluations_checkpoints_and_a_rehearsal_are_told_once():
    first = telemetry.Evaluation(0, 10, START + 3, "validation", 2.0, 7.389, seconds=1.5, metrics={"accuracy": 0.5})
    second = telemetry.Evaluation(0, 20, START + 5, "validation", 2.5)
    saved = telemetry.Checkpoint(0, 20, START + 6, "out/step-20", 3 * 2**30, 2.5, best=True)
    begun = telemetry.Activity(0, START, "rehearsal", text="the longest batch, 4 x 2,048")
    under_way = msgspec.structs.replace(begun, time=START + 1, done=1, total=4)
    over = telemetry.Activity(0, START + 2, "rehearsal", over=True)
    assert new_lines(list(enumerate([begun, under_way, over, first, first, second, saved]))) == [
        "rehearsal: the longest batch, 4 x 2,048",
        "validation at step 10: loss 2.0000  perplexity 7.389  accuracy 0.5  in 1.5 s",
        "validation at step 20: loss 2.5000  perplexity 12.18  (best 2.0000 at step 10)",
        "checkpoint of step 20: out/step-20, 3.00 GiB in 2.5 s, the best so far",
    ]
    later, earlier = (telemetry.Evaluation(0, step, START + step, "validation", 2.0) for step in (20, 10))
    told = new_lines([(0, later), (1, earlier)])
    assert [line[:24] for line in told] == ["validation at step 20: l"], "not one from before a late join"
    model, narrator = RunModel(), Narrator()
    for seq, message in enumerate((hello(0, 1), begun, over, step(0, 1, START + 1)), 1):
        model.apply(wire.Frame(seq, START + seq, message))
    told = [line[9:] for line in narrator.new_lines(model)]
    assert told[1] == "rehearsal: the longest batch, 4 x 2,048", "over before the first look"
    assert told[2].startswith("step 1 ")
    assert not list(narrator.new_lines(model))
