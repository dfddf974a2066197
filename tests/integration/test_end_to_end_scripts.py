"""``ftmon run`` on scripts that know nothing of ftmon, what ends a job before its first step, and wrong commands."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import start_ranks
from eventually import eventually
from ftmon.protocol.messages.memory import Composition, OomReport
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import exits
from ftmon_process import Ftmon, ftmon_home, lines_with, wait_until_nothing_is_left

LATE_HUB = """
import pathlib, sys, time

def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith(("run.json", "exit.json")):
        run = pathlib.Path(str(arguments[0])).parent
        if (run / "exit.json").exists():
            (run / "looked").touch()  # whoever follows finds a job that is over and no hub

if "ftmon.trainer.hub" in sys.orig_argv:
    run = pathlib.Path(sys.orig_argv[-1])
    while not (run / "looked").exists():
        time.sleep(0.05)
elif "ftmon" in [pathlib.Path(word).name for word in sys.orig_argv[:2]]:
    sys.addaudithook(note)
"""


GENERATES = """
import os, sys, time
import torch, torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

class Aborts(LogitsProcessor):
    def __call__(self, ids, scores):
        if dist.get_rank() == 1 and ids.shape[1] == 12:
            time.sleep(1.5)  # its phase is reported ten times a second
            print("terminate called after throwing an instance of 'c10::DistBackendError'", file=sys.stderr)
            print("  what():  collective mismatch: 2048 vs 1024 bytes", file=sys.stderr, flush=True)
            os.abort()
        return scores

dist.init_process_group("gloo")
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, pad_token_id=0, eos_token_id=None))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.ones(1, 8, dtype=torch.long)
for step in range(8):
    model(input_ids=ids, labels=ids).loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if step == 3:
        model.generate(ids, max_new_tokens=16, do_sample=False, logits_processor=[Aborts()])
"""
"""A rank that aborts in its generation, with the words of a C++ library."""


def test_an_abort_in_generate_is_told_with_the_library_s_own_words(home: Ftmon, tmp_path: Path) -> None:
    script = tmp_path / "generates.py"
    script.write_text(GENERATES)
    done = home.run("run", "--plain", "--", *start_ranks.command(2, script))
    assert done.returncode == 1, done.stdout + done.stderr
    (why,) = lines_with(done.stdout, ["why:"])
    assert "rank 1 aborted in generate: c10::DistBackendError: collective mismatch: 2048 vs 1024 bytes" in why
    wait_until_nothing_is_left(home.newest())
    (alert,) = (alert for alert in Reader(home.newest().recording).alerts() if alert.kind == "died")
    assert "synced_gpus=True" in alert.text
    assert alert.evidence["reason"] in why


def test_the_words_of_a_script_that_was_over_before_its_hub_was_up_are_told(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(LATE_HUB)
    script = tmp_path / "early.py"
    script.write_text("raise SystemExit('no data at /nowhere')\n")
    with ftmon_home(tmp_path / "home", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(slow)) as late:
        done = late.run("run", "--", sys.executable, str(script))
        wait_until_nothing_is_left(late.newest())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "launcher| no data at /nowhere" in done.stdout, "as the hub tells it"


@pytest.mark.parametrize("words", [["demo"], ["run", "--", "true"]])
def test_a_run_without_a_place_for_its_directory_is_not_started(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").touch()
    with ftmon_home(tmp_path / "home", FTMON_HOME=str(tmp_path / "file")) as home:
        done = home.run(*words)
    assert done.returncode == exits.NOT_STARTED
    assert "is not a directory" in done.stderr


@pytest.mark.parametrize(
    ("words", "complaint", "status"),
    [
        (["run", "--", "nosuchprogram", "x"], "nosuchprogram: command not found", 196),
        (["train", "nosuch.yaml"], "nosuch.yaml", 2),
        (["demo", "--fault", "earthquake"], "earthquake", 2),
        (["demo", "zero.stag=2"], "zero.stag", 2),
    ],
)
def test_what_cannot_start_is_refused_in_one_line(home: Ftmon, words: list[str], complaint: str, status: int) -> None:
    done = home.run(*words)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.startswith("ftmon: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert home.runs() == []


def test_a_model_type_that_is_not_one_is_told_on_the_terminal_as_wrong_usage(home: Ftmon, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "name a colour", "response": "blue"}\n' * 8)
    words = ["model.config={model_type: lama, hidden_size: 32}", f"data.path={tmp_path / 'data.jsonl'}", "run.ranks=1"]
    ended = home.run("train", *words, "--plain", seconds=480)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "model.config.model_type: Unrecognized model identifier: lama; did you mean llama?" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    why = next(line for line in ended.stdout.splitlines() if line.startswith("why:"))
    assert "Unrecognized model identifier: lama" in why
    wait_until_nothing_is_left(home.newest())  # the hub has recorded the end
    with Reader(home.newest().recording) as reader:
        (failure,) = [alert for alert in reader.alerts() if alert.kind == "failure"]
        assert not [alert for alert in reader.alerts() if alert.kind == "exit"], "it is said once"
    assert failure.evidence["error"] in why


SCRIPT = Path(__file__).parent / "scripts" / "short_loop.py"


def test_a_master_port_that_is_taken_is_named_with_who_holds_it(home: Ftmon) -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen()
        port = server.getsockname()[1]
        launcher = ["torch.distributed.run", f"--master-port={port}", str(SCRIPT), "1", "1", "ok"]
        done = home.run("run", "--plain", "--", sys.executable, "-m", *launcher, seconds=480)
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines_with(done.stdout, ["failure:", f"port {port} is taken by", f"pid {os.getpid()}"]), done.stdout
    assert lines_with(done.stdout, ["why:", f"port {port} is taken"])
    assert not lines_with(done.stdout, ["ended before its first step"]), "it is said once"
    alert = next(alert for alert in home.status(home.newest().id)["alerts"] if "is taken" in alert["title"])
    assert alert["evidence"]["pid"] == os.getpid()
    assert "--master_port" in alert["text"]


def test_a_script_that_is_missing_or_gives_up_is_named_with_its_own_words(home: Ftmon, tmp_path: Path) -> None:
    missing = home.run("run", "--plain", "--", *start_ranks.command(1, tmp_path / "trian.py"))
    assert missing.returncode == 1, missing.stdout + missing.stderr
    assert lines_with(missing.stdout, ["why:", "can't open file", "trian.py'"]), missing.stdout
    (tmp_path / "gives_up.py").write_text("raise SystemExit('no data at /nowhere')\n")
    gave_up = home.run("run", "--plain", "--", *start_ranks.command(1, tmp_path / "gives_up.py"))
    assert lines_with(gave_up.stdout, ["why:", "the last line that rank 0 wrote: no data at /nowhere"]), gave_up.stdout


CELLS = (
    "import torch",
    "model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))",
    "loss = model(torch.randn(2048, 1024)).mean()",
    "loss.backward()",
)
NOTEBOOK = """
import pathlib, sys, time
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in sys.argv[2:]:
    shell.run_cell(cell).raise_error()
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


def is_composed(home: Ftmon) -> bool:
    """Return whether ``ftmon memory`` shows the parts of a forward and backward of those cells."""
    found = [each.message for each in Reader(home.newest().recording).frames(0, 10_000)]
    composed = [each for each in found if isinstance(each, Composition)]
    if not composed:
        return False
    assert [each.step for each in composed] == [1]
    (forward, backward) = composed[0].phases
    parameters = 4 * (2 * 1024 * 4096 + 4096 + 1024)
    for phase in (forward, backward):
        assert phase.parts["parameters"] == pytest.approx(parameters, rel=0.01)
        # The input, and the output of the first layer after the ReLU: what autograd keeps of this forward.
        assert phase.parts["activations"] == pytest.approx(4 * 2048 * (1024 + 4096), rel=0.25)
    shown = home.run("memory", home.newest().id)
    assert "rank 0, step 1, without an update so far: " in shown.stdout
    assert lines_with(shown.stdout, ["parameters", "32.0 MiB"])
    return True


def test_a_forward_and_backward_without_an_optimizer_are_composed(home: Ftmon, tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text("\n".join(CELLS))
    done = home.run("run", "--plain", "--", sys.executable, str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_composed(home)


def has_recording(home: Ftmon) -> bool:
    """Return whether the newest run has a recording with a header: it is an empty file at first."""
    return bool(home.runs()) and (path := home.newest().recording).exists() and path.stat().st_size > 0


def test_cells_of_a_notebook_are_composed_before_it_ends(home: Ftmon, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cells = ["%load_ext ftmon", *CELLS[:2], "\n".join(CELLS[2:]), "1 + 1"]
    command = [sys.executable, "-c", NOTEBOOK, str(tmp_path / "over"), *cells]
    notebook = subprocess.Popen(command, env=home.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        eventually(lambda: notebook.poll() is not None or has_recording(home), "a run")
        eventually(lambda: is_composed(home), "the composition of the cell")
    finally:
        (tmp_path / "over").touch()
        output, _ = notebook.communicate(timeout=60)
    assert notebook.returncode == 0, output


def test_a_failed_cuda_allocation_before_the_first_step_has_its_report(home: Ftmon) -> None:
    done = home.run("run", "--plain", "--", *start_ranks.command(1, SCRIPT, 1, 1, "oom"), seconds=480)
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines_with(done.stdout, ["oom: rank 0 out of memory", "20.00 GiB", "3.25 GiB free"]), done.stdout
    wait_until_nothing_is_left(home.newest())  # the hub has recorded the end
    with Reader(home.newest().recording) as reader:
        frames = reader.frames(0, 10_000)
    reports = [frame.message for frame in frames if isinstance(frame.message, OomReport)]
    assert len(reports) == 1
    oom = reports[0].oom
    assert (oom.requested_bytes, oom.measure) == (20 * 2**30, "cuda")
    assert (oom.allocated_bytes, oom.step) == (int(70.10 * 2**30), 1)
    assert any("short_loop.py" in frame for frame in oom.stack)
