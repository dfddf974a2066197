"""The lines of an out-of-memory report, in one column and in two."""

import msgspec
from ftmon.protocol.messages.memory import OomReport
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model import RunModel
from ftmon.tui.widgets.oom import report_lines
from ftmon.tui.widgets.theme import Theme
from oomscenes import messages

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
