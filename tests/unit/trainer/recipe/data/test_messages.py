"""From records of every format to messages, and what is refused."""

import json
from typing import Any

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.trainer.recipe.config.schema import Data
from ftmon.trainer.recipe.data import messages
from ftmon.trainer.recipe.data.messages import Conversation, RefusedError, Text
from places import DATA

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def convert(record: Any, **data: Any) -> "tuple[str, list[tuple[str, str | None]]]":
    settings = Data(**data)
    form = messages.detect(record, settings)
    made = messages.convert(record, form, settings)
    if isinstance(made, Text):
        return form, [("text", made.text)]
    return form, [(message.role, message.content) for message in made.messages]


CASES = [json.loads(line) for line in (DATA / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", [case for case in CASES if "messages" in case])
def test_each_format_is_recognised_and_converted(case: Any) -> None:
    assert convert(case["record"]) == (case["form"], [tuple(message) for message in case["messages"]])


@pytest.mark.parametrize("case", [case for case in CASES if "refused" in case])
def test_a_record_that_does_not_match_is_refused_with_the_reason(case: Any) -> None:
    with pytest.raises(RefusedError) as raised:
        messages.convert(case["record"], case["form"], Data())
    assert str(raised.value).startswith(case["refused"])


CALL = {"name": "f", "arguments": {"a": 1}}


def test_tool_calls_tools_and_reasoning_are_kept() -> None:
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    record = {
        "messages": [
            CHAT[0],
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "4", "name": "f", "tool_call_id": "7"},
            {"role": "assistant", "content": "Four."},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    made = messages.convert(record, "chat", Data())
    assert isinstance(made, Conversation)
    _, asked, tool, _ = made.messages
    assert (asked.content, asked.reasoning) == (None, "hm")
    assert asked.tool_calls == [{"id": "7", "type": "function", "function": CALL}]
    assert (tool.name, tool.tool_call_id) == ("f", "7")
    assert (made.tools, made.prompt) == ([{"type": "function", "function": {"name": "f"}}], 1)
    turns = [("human", "Hi"), ("function_call", json.dumps(CALL)), ("observation", "4"), ("gpt", "Four.")]
    shared = {"conversations": [{"from": sender, "value": value} for sender, value in turns]}
    made = messages.convert(shared, "sharegpt", Data())
    assert isinstance(made, Conversation)
    assert [message.role for message in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[1].tool_calls[0]["function"] == CALL


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["list", "text", "texts"])
def test_tools_and_their_calls_may_be_json_text_as_tables_hold_them(tools: Any) -> None:
    call = {"type": "function", "function": CALL}
    for calls in ([call], json.dumps([call]), [json.dumps(call)]):
        record = {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": calls}], "tools": tools}
        made = messages.convert(record, "chat", Data())
        assert isinstance(made, Conversation)
        assert (made.tools, made.messages[1].tool_calls) == ([TOOL], [call])


def test_a_system_beside_lists_of_messages_belongs_to_the_prompt() -> None:
    for before in (CHAT[:1], [{"role": "system", "content": "S"}, *CHAT[:1]]):
        record = {"prompt": before, "completion": CHAT[1:] * 2, "system": "S"}
        made = messages.convert(record, "instruction", Data())
        assert isinstance(made, Conversation)
        assert [message.role for message in made.messages] == ["system", "user", "assistant", "assistant"]
        assert (made.messages[0].content, made.prompt) == ("S", 2)


def test_columns_that_fit_no_format_are_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"cannot be determined from the columns \(question, answer\): name them"
    ) as told:
        messages.detect({"question": "", "answer": ""}, Data())
    assert str(told.value).endswith("as in: data.prompt_column=question data.response_column=answer")
    renamed = convert({"question": "Hi", "answer": "Hello."}, prompt_column="question", response_column="answer")
    assert renamed[1] == [("user", "Hi"), ("assistant", "Hello.")]
