"""From records of every format to messages, and what is refused."""

from typing import Any

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.trainer.recipe.config.schema import Data
from ftmon.trainer.recipe.data import formats
from ftmon.trainer.recipe.data.messages import Conversation, RefusedError, Text

LLAMA2 = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST] Goodbye. </s>"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def convert(record: Any, **data: Any) -> "tuple[str, list[tuple[str, str | None]]]":
    settings = Data(**data)
    form = formats.detect(record, settings)
    made = formats.convert(record, form, settings)
    if isinstance(made, Text):
        return form, [("text", made.text)]
    return form, [(message.role, message.content) for message in made.messages]


@pytest.mark.parametrize(
    ("record", "form", "messages"),
    [
        ({"messages": CHAT}, "chat", [("user", "Hi"), ("assistant", "Hello.")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]},
            "chat",
            [("user", "Hi"), ("assistant", "Hello.")],
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "system": "S"},
            "sharegpt",
            [("system", "S"), ("user", "Hi"), ("assistant", "Hello.")],
        ),
        ({"conversations": CHAT}, "chat", [("user", "Hi"), ("assistant", "Hello.")]),
        (
            {"messages": CHAT, "system": "S"},
            "chat",
            [("system", "S"), ("user", "Hi"), ("assistant", "Hello.")],
        ),
        ({"prompt": "Hi", "response": "Hello."}, "instruction", [("user", "Hi"), ("assistant", "Hello.")]),
        ({"prompt": "Hi", "completion": "Hello."}, "instruction", [("user", "Hi"), ("assistant", "Hello.")]),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "instruction", [("user", "Hi"), ("assistant", "Hello.")]),
        (
            {"instruction": "Add", "input": "1 and 2", "output": "3"},
            "alpaca",
            [("user", "Add\n\n1 and 2"), ("assistant", "3")],
        ),
        ({"instruction": "Hi", "input": "", "output": "Hello."}, "alpaca", [("user", "Hi"), ("assistant", "Hello.")]),
        (
            {"instruction": "Bye", "output": "Goodbye.", "history": [["Hi", "Hello."]]},
            "alpaca",
            [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Goodbye.")],
        ),
        ({"text": "hello world"}, "text", [("text", "hello world")]),
        ({"text": "### Human: hello"}, "text", [("text", "### Human: hello")]),
        (
            {"text": "### Human: Hi### Assistant: Hello.\n### Human: Bye### Assistant: Goodbye."},
            "markers",
            [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Goodbye.")],
        ),
        (
            {"text": "\n\nHuman: Hi\n\nAssistant: Hello."},
            "markers",
            [("user", "Hi"), ("assistant", "Hello.")],
        ),
        (
            {"text": LLAMA2},
            "markers",
            [
                ("system", "Be brief."),
                ("user", "Hi"),
                ("assistant", "Hello."),
                ("user", "Bye"),
                ("assistant", "Goodbye."),
            ],
        ),
        (
            {"text": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"},
            "markers",
            [("user", "Hi"), ("assistant", "Hello.")],
        ),
    ],
)
def test_each_format_is_recognised_and_converted(record: Any, form: str, messages: "list[tuple[str, str]]") -> None:
    assert convert(record) == (form, messages)


def test_tool_calls_tools_and_reasoning_are_kept() -> None:
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    record = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "4", "name": "f", "tool_call_id": "7"},
            {"role": "assistant", "content": "Four."},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    made = formats.convert(record, "chat", Data())
    assert isinstance(made, Conversation)
    asked = made.messages[1]
    assert asked.content is None
    assert asked.reasoning == "hm"
    assert asked.tool_calls == [{"id": "7", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert (made.messages[2].name, made.messages[2].tool_call_id) == ("f", "7")
    assert made.tools == [{"type": "function", "function": {"name": "f"}}]
    assert made.prompt == 1


def test_a_sharegpt_function_call_is_a_tool_call() -> None:
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "Four."},
    ]
    made = formats.convert({"conversations": turns}, "sharegpt", Data())
    assert isinstance(made, Conversation)
    assert [message.role for message in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[1].tool_calls[0]["function"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("record", "form", "reason"),
    [
        ("error: rate limit", "chat", "is text, not an object"),
        (None, "text", "is null, not an object"),
        ({"text": None}, "text", "text is null"),
        ({"text": 7}, "text", "text is a number, not text"),
        ({"text": "  \n"}, "text", "text is empty"),
        ({"other": ""}, "text", "has no text"),
        ({"messages": None}, "chat", "messages is null"),
        ({"messages": "hello"}, "chat", "messages is text, not a list of messages"),
        ({"messages": []}, "chat", "messages is empty"),
        ({"messages": ["hi"]}, "chat", "message 1 is text, not an object with role and content"),
        ({"messages": [{"content": "hi"}]}, "chat", "message 1 has no role"),
        ({"messages": [{"role": "user", "content": None}, CHAT[1]]}, "chat", "message 1 (user) has no content"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": None}]},
            "chat",
            "message 2: the assistant's content is empty",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": 3}]},
            "chat",
            "message 2: content is a number, not text",
        ),
        ({"messages": [{**CHAT[0], "content": []}, CHAT[1]]}, "chat", "message 1: content is an empty list, not text"),
        ({"messages": CHAT[:1]}, "chat", "has no assistant message (roles: user)"),
        (
            {"messages": [CHAT[0], {"role": "bot", "content": "Hello."}]},
            "chat",
            "has no assistant message (roles: bot, user)",
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "chat", "message 2: weight is 0.5, not 0 or 1"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": "0"}]}, "chat", 'message 2: weight is "0", not 0 or 1'),
        ({"messages": [CHAT[0], {**CHAT[1], "train": 0}]}, "chat", "message 2: train is 0, not true or false"),
        (
            {"messages": [{"role": "user", "content": "a \ud83d"}, CHAT[1]]},
            "chat",
            "holds \\ud83d, half of a surrogate",
        ),
        ({"messages": CHAT, "tools": [{"name": "\udc00"}]}, "chat", "holds \\udc00, half of a surrogate"),
        ({"prompt": "a", "response": "\ude00"}, "instruction", "holds \\ude00, half of a surrogate"),
        ({"text": "a \ud83d"}, "text", "holds \\ud83d, half of a surrogate"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, CHAT[1]]},
            "chat",
            "message 1 holds a part of type image_url; only text is trained on",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]},
            "chat",
            "message 2: a tool call has no function name",
        ),
        ({"messages": CHAT, "tools": "no JSON"}, "chat", "tools is text that is not JSON"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "sharegpt", 'message 1: from is "alien", not one of'),
        ({"prompt": "a", "response": ""}, "instruction", "response is empty"),
        ({"instruction": "a", "output": None}, "alpaca", "output is null"),
        ({"text": "just a text"}, "markers", "has no markers such as ### Human: and ### Assistant:"),
        ({"text": "### Human: Hi"}, "markers", "has no assistant message"),
    ],
)
def test_a_record_that_does_not_match_is_refused_with_the_reason(record: Any, form: str, reason: str) -> None:
    with pytest.raises(RefusedError) as raised:
        formats.convert(record, form, Data())
    assert str(raised.value).startswith(reason)


def test_a_system_beside_lists_of_messages_belongs_to_the_prompt() -> None:
    for before in (CHAT[:1], [{"role": "system", "content": "S"}, *CHAT[:1]]):
        record = {"prompt": before, "completion": CHAT[1:] * 2, "system": "S"}
        made = formats.convert(record, "instruction", Data())
        assert isinstance(made, Conversation)
        assert [message.role for message in made.messages] == ["system", "user", "assistant", "assistant"]
        assert (made.messages[0].content, made.prompt) == ("S", 2)


def test_columns_that_fit_no_format_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"cannot be determined from the columns \(question, answer\): name them"):
        formats.detect({"question": "", "answer": ""}, Data())
    assert convert({"question": "Hi", "answer": "Hello."}, prompt_column="question", response_column="answer")[1] == [
        ("user", "Hi"),
        ("assistant", "Hello."),
    ]
