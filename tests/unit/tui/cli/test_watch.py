"""The table of ``ftmon ls`` in narrow and wide terminals, and in pipes."""

from argparse import Namespace

import msgspec
import pytest
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import ExitFile
from ftmon.protocol.text import cells_of
from ftmon.tui.cli.watch import show_status, table
from ftmon.tui.model.runs import RunEntry

pytestmark = pytest.mark.usefixtures("private_home")


def test_a_run_that_a_signal_ended_is_shown_with_its_name_and_columns_are_aligned(capsys):
    for code, ending in (
        (-1, "stopped, killed by SIGHUP"),
        (-9, "failed, killed by SIGKILL"),
        (1, "failed, exit code 1"),
    ):
        run = rundir.create("done", ["train.py"], "run")
        run.write_exit(ExitFile(code, 1.0, ending.partition(",")[0]))
        show_status(Namespace(run=run.id, json=False))
        assert capsys.readouterr().out.splitlines()[0] == f"{run.id}  {ending}"
    young = msgspec.structs.replace(ENTRY, id="a", loss=None, evaluation_loss=None, reason="", step=1_234_567)
    head, *lines = (line for line in table([ENTRY, young], 80) if not line.startswith(" "))
    assert {line[: head.index("EVAL") + 9].rstrip()[-1] for line in lines} == {"0", "-"}
    assert len({len(line) for line in lines}) == 1
    many = msgspec.structs.replace(ENTRY, overrides=[f"model.config.key_{n}={n}" for n in range(12)], reason="")
    head, first, second = list(table([many], 200))[:3]
    assert head.endswith("SCRIPT")
    assert "Llama" not in first
    assert second.startswith("    meta-llama/Llama-3.1-8B")


ENTRY = RunEntry(
    id="llama3-20260528-202640",
    name="llama3",
    kind="train",
    state="failed",
    live=False,
    created=1_780_000_000.0,
    ended=1_780_000_095.0,
    host="node-1",
    command=["python", "-m", "deepspeed.launcher.launch"],
    ranks=2,
    step=12,
    exit_code=1,
    recording="/runs/llama3/recording.sqlite",
    recording_bytes=1 << 20,
    problem="",
    missing="",
    model="meta-llama/Llama-3.1-8B",
    data=["/data/chats.jsonl"],
    config="llama3.yaml",
    overrides=["zero.stage=3", "optimizer.lr=1e-5"],
    loss=1.25,
    evaluation_loss=1.5,
    reason="rank 1: CUDA out of memory in the backward pass of step 12 " * 3,
)


@pytest.mark.parametrize("width", [80, 200, None])
def test_each_run_has_model_data_overrides_losses_and_reason_at_every_width(width):
    lines = list(table([ENTRY], width))
    text = " ".join(" ".join(lines).split())
    for words in ("Llama-3.1-8B chats.jsonl llama3.yaml zero.stage=3", "1.2500", "1.5000", ENTRY.reason.strip()):
        assert words in text
    assert "deepspeed" not in text
    assert width is None or max(map(cells_of, lines)) <= width
