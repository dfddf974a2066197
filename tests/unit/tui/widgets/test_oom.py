"""The lines of an out-of-memory report, in one column and in two."""

import msgspec
import pytest
from ftmon.protocol.messages.memory import OomReport
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model import RunModel
from ftmon.tui.model.peaks import Answer, Change, CurrentPoint, WhatIf, capacity_of, length_of
from ftmon.tui.widgets.drawing import Theme
from ftmon.tui.widgets.oom import report_lines, what_if_lines
from oomscenes import messages, oom_of

GIB = 2**30
EVIL = "\x1b[2J\u202e" + "x" * 300
CHANGES = [
    Change("checkpointing", "model.gradient_checkpointing=layers", True, 61 * GIB, 1.5, 1.31),
    Change("ZeRO 3", "zero.stage=3", False, 140 * GIB, 1.2, 1.05),
    Change("fused loss", "model.fused_loss=auto", False, 0, refused="no fake kernel"),
]


def lines(found: WhatIf, width: int = 80) -> list[str]:
    return [line.plain for line in what_if_lines(found, width, Theme())]


def done(changes: list[Change], fits: bool = False) -> WhatIf:
    answer = Answer([CurrentPoint(4736, 150 * GIB, fits, "forward")], changes, 136 * GIB)
    return WhatIf("done", answer=answer)


def test_the_cheapest_change_that_fits_is_first_and_none_or_a_job_that_should_have_fitted_is_told():
    shown = lines(done(CHANGES), 100)
    assert "verified by dry runs of this job" in shown[1]
    assert shown[3].split() == ["as", "it", "is,", "4,736", "tokens", "no", "150.00", "GiB", "x", "1.00"]
    assert shown[4].split()[1:] == ["yes", "61.00", "GiB", "x", "1.31", "model.gradient_checkpointing=layers"]
    assert shown[6].split() == ["fused", "loss", "no", "fake", "kernel"]
    assert "136.00 GiB that PyTorch could have" in shown[-1]
    assert "none of them fits" in lines(done(CHANGES[1:]))[-1]
    assert any("should have fitted" in line for line in lines(done(CHANGES, fits=True)))


def test_progress_names_the_dry_run_and_its_key_and_the_job_gets_that_gpu_and_that_batch_s_length():
    (_, _, line) = lines(WhatIf("running", 0.0, ["the run as it is", "checkpointing"]))
    assert "checkpointing, 1 done, " in line
    assert "w: cancel" in line
    assert lines(WhatIf()) == []
    assert "no prediction: no fake kernel" in lines(WhatIf("failed", text="no fake kernel"))[-1]
    oom = oom_of()
    assert (capacity_of(oom), length_of(oom)) == (oom.reserved_bytes + oom.room_bytes, 4736)
    assert length_of(msgspec.structs.replace(oom, batch_shape=[])) == 0


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_asked_whatever_a_process_says(width: int) -> None:
    hostile = [Change(EVIL, EVIL, True, 1, 1.0, 1.0), Change(EVIL, EVIL, False, 1, refused=EVIL)]
    for found in (done(hostile), WhatIf("running", 0.0, [EVIL])):
        for line in what_if_lines(found, width, Theme())[2:]:
            assert "\x1b" not in line.plain
            assert line.width <= width


START = 1_700_000_000.0
STACK = [f"model.py:{line} forward" for line in range(40)]


def test_two_columns_have_what_one_has() -> None:
    model = RunModel()
    for index, message in enumerate(messages(START, held=False)):
        if isinstance(message, OomReport):  # without remedies: the right column is the longer one
            message = msgspec.structs.replace(
                message, remedies=[], oom=msgspec.structs.replace(message.oom, stack=STACK)
            )
        model.apply(Frame(index + 1, START, message))
    (case,) = model.ooms
    theme = Theme()
    one = [line.plain.strip() for line in report_lines(case, model, "THE-PLACE", False, 78, theme)]
    two = "\n".join(line.plain for line in report_lines(case, model, "THE-PLACE", False, 200, theme))
    heads = [text for text in one if text in ("all ranks at that moment", "who held most", "snapshot")]
    assert len(heads) == 3
    assert [head for head in heads if two.count(head) != 1] == []
    assert two.count("THE-PLACE") == 1
