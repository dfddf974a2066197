"""Which tokens of a chat carry loss, against a reference that writes each family's format by hand."""

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_families import FAMILIES, Messages, Written
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.chat.session import Prompts
from ftmon.trainer.recipe.config.schema import Config, Data, Training
from ftmon.trainer.recipe.data.batches import Collate
from ftmon.trainer.recipe.data.encode import Encoded, Encoder
from ftmon.trainer.recipe.data.messages import RefusedError, shipped
from ftmon.trainer.recipe.evaluation import evaluate
from ftmon.trainer.recipe.export import export
from ftmon.trainer.recipe.model.loss import IGNORED
from ftmon.trainer.recipe.model.tokenizer import end_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from small_shape import SMALL_SHAPE
from small_tokenizer import family_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

ENDS = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Red."}]


def small_model(tokenizer: Any) -> Any:
    """A model that knows no end but EOS, as base models do."""
    sizes = {**SMALL_SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, *(f"shipped {name}" for name in shipped())])
def test_chat_sends_the_tokens_that_training_saw_before_an_answer_and_stops_at_its_end(name, adds_bos):
    by_name = name.removeprefix("shipped ") if name.startswith("shipped ") else ""
    tokenizer = family_tokenizer(None if by_name else FAMILIES[name][0], adds_bos=adds_bos)
    document = one(encoder(tokenizer, chat_template=by_name), {"messages": ENDS})
    ids = document.ids
    prompts = Prompts(small_model(tokenizer), tokenizer)
    given = prompts.encode(ENDS[:1])
    # Templates of some families write another header before an answer than in a turn.
    same = len(given) if by_name else 3
    assert ids[:same] == given[:same]
    assert not adds_bos or (ids[0], ids.count(ids[0])) == (tokenizer.bos_token_id, 1)
    assert given.count(tokenizer.bos_token_id) == ids.count(tokenizer.bos_token_id)
    answer = [token for token, wanted in zip(ids, document.learned, strict=True) if wanted]
    assert answer[-1] in prompts.stops
    assert not set(answer[:-1]) & prompts.stops
    assert tokenizer.eos_token_id in prompts.stops


def test_the_exported_model_and_a_sample_stop_at_the_templates_end_too():
    tokenizer = family_tokenizer(FAMILIES["chatml"][0])
    model = small_model(tokenizer)
    export._settle_config(model, tokenizer, Config())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, end]
    with torch.no_grad():  # the most likely token, whatever came before
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(end), len(tokenizer)).float())
    row = row_of(one(encoder(tokenizer), {"messages": ENDS}))
    engine = SimpleNamespace(module=model, eval=model.eval, train=model.train)
    world: Any = SimpleNamespace(is_first=True, device=torch.device("cpu"))
    ((_, answer),) = evaluate.generate(engine, tokenizer, [row], 8, 64, world, together=False)
    assert answer == "<|im_end|>"


def test_a_template_that_refuses_the_probe_adds_no_end_and_bos_is_added_to_those_of_several_without():
    tokenizer = family_tokenizer("{{ raise_exception('no') }}")
    assert end_tokens(None, tokenizer) == [tokenizer.eos_token_id]
    tools = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    tokenizer = family_tokenizer({"default": FAMILIES["chatml"][0], "tool_use": tools}, adds_bos=True)
    assert one(encoder(tokenizer), {"messages": CHAT[1:]}).ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.chat_template == {"default": "{{ bos_token }}" + FAMILIES["chatml"][0], "tool_use": tools}


CHAT: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": "Another one?"},
    {"role": "assistant", "content": "Blue is another."},
]


def encoder(tokenizer: Any, form: str = "chat", length: int = 512, **data: Any) -> Encoder:
    return Encoder(tokenizer, Config(data=Data(**data), training=Training(sequence_length=length)), [form])


@cache
def family(name: str) -> Any:
    return family_tokenizer(FAMILIES[name][0])


def one(made: Encoder, record: Any) -> Encoded:
    (result,) = made.encode([(record, 0)])
    assert not isinstance(result, RefusedError), result
    (document,) = result
    return document


def refusal(made: Encoder, record: Any) -> str:
    (result,) = made.encode([(record, 0)])
    assert isinstance(result, RefusedError), result
    return str(result)


def learned(tokenizer: Any, document: Encoded) -> str:
    return tokenizer.decode([token for token, wanted in zip(document.ids, document.learned, strict=True) if wanted])


def answers(tokenizer: Any, chat: Any, **data: Any) -> str:
    return learned(tokenizer, one(encoder(tokenizer, **data), {"messages": chat}))


def row_of(document: Encoded) -> dict[str, list[int]]:
    pairs = zip(document.ids, document.learned, strict=True)
    return {"input_ids": document.ids, "labels": [token if wanted else IGNORED for token, wanted in pairs]}


def reference(tokenizer: Any, written: Written) -> tuple[list[int], list[bool]]:
    """Label each token by the character that it begins with."""
    text = "".join(text for text, _ in written)
    flags = [flag for text, flag in written for _ in text]
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoding["input_ids"], [flags[start] for start, _ in encoding["offset_mapping"]]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_masked_as_it_writes_its_turns(name):
    tokenizer = family(name)
    _, written, takes_system = FAMILIES[name]
    chat = CHAT if takes_system else CHAT[1:]
    document = one(encoder(tokenizer), {"messages": chat})
    ids, wanted = reference(tokenizer, written(chat))
    assert tokenizer.decode(document.ids) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert (document.ids, document.learned) == (ids, wanted)
    assert (document.turns, document.ends_learned) == (2, 2)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[\0\ufdd0\ufdd1"), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(FAMILIES)), st.lists(TEXT.filter(lambda text: bool(text.strip())), min_size=1, max_size=6)
)
def test_labels_equal_the_slow_reference_for_any_content(name, contents):
    tokenizer = family(name)
    if len(contents) % 2:
        contents = [*contents, "yes"]
    chat = [
        {"role": ("user", "assistant")[index % 2], "content": content.strip()} for index, content in enumerate(contents)
    ]
    document = one(encoder(tokenizer, length=4096), {"messages": chat})
    ids, wanted = reference(tokenizer, FAMILIES[name][1](chat))
    assert (document.ids, document.learned) == (ids, wanted)


def test_one_turn_and_two_turn_records_of_qwen3_keep_its_own_format():
    tokenizer = family("qwen3")
    thought = "<think>\n\n</think>\n\n"
    for chat, wanted in (
        (CHAT[1:3], thought + "Red.<|im_end|>"),
        (CHAT[1:], f"Red.<|im_end|>{thought}Blue is another.<|im_end|>"),
    ):
        document = one(encoder(tokenizer), {"messages": chat})
        assert tokenizer.decode(document.ids).startswith("<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>")
        assert learned(tokenizer, document) == wanted


@pytest.mark.parametrize("adds_bos", [False, True])
def test_values_of_the_template_s_own_variables_are_those_that_transformers_passes(adds_bos):
    closed = "{% if add_generation_prompt and not enable_thinking|default(true) %}<think>\n\n</think>\n\n{% endif %}"
    source = "\n{% if style %}{{ style.name }}{% endif %}" + FAMILIES["chatml"][0] + closed
    plain = family_tokenizer(source)
    values = {"enable_thinking": False, "style": {"name": "é'\n%}"}}
    tokenizer = family_tokenizer(source, adds_bos=adds_bos)
    document = one(encoder(tokenizer, chat_template_kwargs=values), {"messages": CHAT[1:]})
    bos = tokenizer.bos_token if adds_bos else ""
    assert tokenizer.decode(document.ids) == bos + plain.apply_chat_template(CHAT[1:], tokenize=False, **values)
    kept = tokenizer.chat_template
    encoder(tokenizer, chat_template_kwargs=values)
    assert tokenizer.chat_template == kept
    # The exported tokenizer asks in the same way, and can still be asked in another.
    for other in ({}, {"enable_thinking": True}):
        asked = {"tokenize": False, "add_generation_prompt": True}
        wanted = plain.apply_chat_template(CHAT[:2], **asked, **{**values, **other})
        assert tokenizer.apply_chat_template(CHAT[:2], **asked, **other) == bos + wanted


def test_a_variable_or_a_token_that_template_or_tokenizer_lacks_is_refused_with_what_to_give():
    tokenizer = family_tokenizer(FAMILIES["chatml"][0] + "{% if enable_thinking %}{% endif %}")
    words = "data.chat_template_kwargs.enable_thought: the tokenizer's template reads no such variable; it reads "
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}enable_thinking$"):
        encoder(tokenizer, chat_template_kwargs={"enable_thought": False})
    tokenizer = family_tokenizer(None)
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="'bos_token' is undefined; the tokenizer has none: give another template"):
        encoder(tokenizer, chat_template="llama2")


def test_reasoning_that_the_template_leaves_out_is_counted():
    tokenizer = family("qwen3")
    chat = [{**message} for message in CHAT[1:]]
    chat[3]["content"] = "<think>\nhello rank\n</think>\n\nBlue."
    assert answers(tokenizer, chat).endswith("<think>\nhello rank\n</think>\n\nBlue.<|im_end|>")
    for changed, lost in (
        ({"reasoning_content": "Red is a colour of France"}, 1),
        ({"content": "<think>\nRed is a colour of France\n</think>\n\nRed."}, 1),
        ({"content": "<think>\n\n</think>\n\nRed."}, 0),
    ):
        chat[1] = {**CHAT[2], **changed}
        assert one(encoder(tokenizer), {"messages": chat}).reasoning_lost == lost


def test_train_on_chooses_the_turns_that_carry_loss():
    tokenizer, last = family("chatml"), "Blue is another.<|im_end|>"
    for train_on, wanted in (("assistant", "Red.<|im_end|>" + last), ("last", last), ("completion", last)):
        assert answers(tokenizer, CHAT, train_on=train_on) == wanted
    document = one(encoder(tokenizer, train_on="all"), {"messages": CHAT})
    assert all(document.learned)
    assert document.label_tokens == len(document.ids) - 1
    without_red = [{**message, "weight": 0} if message["content"] == "Red." else message for message in CHAT]
    assert answers(tokenizer, without_red) == last


BY_PREFIX = (
    "{% for i in range(messages | length) %}{{ '<|im_start|>' + messages[i].role + '\n' + messages[i].content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}",
        BY_PREFIX,
    ],
    ids=["its own marks, the end behind them", "without a loop variable, by its stable prefixes"],
)
def test_turns_are_found_by_marks_and_by_prefixes(template):
    assert answers(family_tokenizer(template), CHAT) == "Red.<|im_end|>Blue is another.<|im_end|>"


UNMASKED = "does not let the assistant's turns be told from the others"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the tokenizer has no chat template, and the data are chats; give one of chatml"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}", "with no token, so the model would"),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content }}<|stop|>\n{% endfor %}",
            "with '<|stop|>', which is no token of this tokenizer",
        ),
        ("{% for m in messages %}", "is not valid Jinja"),
        ("{{ raise_exception('no') }}", "cannot render a chat of user and assistant: no"),
        (
            "{% for i in range(messages | length) %}{{ messages[-1 - i].content + eos_token }}{% endfor %}",
            UNMASKED + "; give another one",
        ),
        (
            "{% for m in messages %}{{ messages | map(attribute='content') | join(' ') + eos_token }}{% endfor %}",
            UNMASKED,
        ),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused_with_what_to_do(template, words):
    with pytest.raises(ConfigError) as raised:
        encoder(family_tokenizer(template))
    assert words in str(raised.value)
    assert str(raised.value).startswith("data.chat_template: ")


def test_a_chat_that_the_template_rejects_or_cuts_is_a_refused_record():
    tool = {"role": "tool", "content": "the weather is fine"}
    weather = [*CALLS, {"role": "user", "content": "weather?"}, {"role": "assistant", "content": "weather, Paris."}]
    for name, chat, words in (
        ("gemma2", CHAT, "the chat template rejects it: System role not supported"),
        ("mistral", CHAT[1:2] + CHAT[1:3], "the chat template rejects it: .*roles must alternate.*"),
        ("phi3", [*CHAT[:3], tool, CHAT[4]], r"the chat template leaves out message 4 \(tool\)"),
        ("llama3", CALLS, "the chat template leaves out the tool calls of message 2"),
        # A tool call is looked for in its place and not in the whole text.
        ("llama3", weather, "the chat template leaves out the tool calls of message 2"),
    ):
        assert re.fullmatch(words, refusal(encoder(family(name)), {"messages": chat}))
    given = {"messages": [CALLS[0], {"role": "assistant", "content": "Yes."}], "tools": TOOLS}
    assert refusal(encoder(family("llama3")), given) == "the chat template leaves out the tool weather"


@pytest.mark.parametrize("name", shipped())
def test_the_shipped_templates_can_be_used_by_name(name):
    tokenizer = family_tokenizer(None)
    document = one(encoder(tokenizer, chat_template=name), {"messages": CHAT[1:]})
    assert (document.turns, document.ends_learned) == (2, 2)
    assert "Red." in learned(tokenizer, document)
    assert "Name" not in learned(tokenizer, document)
    assert tokenizer.chat_template


CALL = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "Is it fine?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "tool", "content": "yes", "name": "weather", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is."},
]
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}CONTENT"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}{{ ARGUMENTS }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTENTS = {
    "as it is": "{{ m.content }}",
    "trimmed": "{{ m.content | trim }}",
    "joined": "{{ '' + m.content }}",
    "asks for none": "{% if m.content is not none %}{{ m.content }}{% endif %}",
}


@pytest.mark.parametrize("arguments", ["call.function.arguments | tojson", "'' + call.function.arguments"])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_and_tools_reach_the_template_and_null_is_never_a_word(content, arguments, as_text):
    template = TOOL_TEMPLATE.replace("CONTENT", CONTENTS[content]).replace("ARGUMENTS", arguments)
    tokenizer = family_tokenizer(template)
    record: Any = {"messages": CALLS, "tools": TOOLS}
    if as_text:
        text = '{"city": "Paris", "days": 2}'
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": text}}
        record = {"messages": [CALLS[0], {**CALLS[1], "tool_calls": [call]}, *CALLS[2:]], "tools": TOOLS}
    document = one(encoder(tokenizer), record)
    assert learned(tokenizer, document) == ('<tool_call>weather{"city": "Paris", "days": 2}<|im_end|>It is.<|im_end|>')
    assert '"name": "weather"' in tokenizer.decode(document.ids)
    assert "None" not in tokenizer.decode(document.ids)


def test_a_text_is_learned_whole_with_its_end_also_where_that_is_the_padding():
    tokenizer = family_tokenizer(None, adds_bos=True)
    for text in ("hello world", "<s>hello world", "hello world</s>"):
        document = one(encoder(tokenizer, "text"), {"text": text})
        assert tokenizer.decode(document.ids) == "<s>hello world</s>"
        assert document.ids.count(tokenizer.bos_token_id) == 1
        assert learned(tokenizer, document).endswith("hello world</s>")
    tokenizer = family_tokenizer(FAMILIES["mistral"][0])
    tokenizer.pad_token = tokenizer.eos_token
    row = row_of(one(encoder(tokenizer), {"messages": CHAT[1:]}))
    batch = Collate(tokenizer.pad_token_id, 512)([row] * 2)
    assert batch["labels"][0].tolist().count(tokenizer.eos_token_id) == 2


def test_without_a_template_prompt_and_response_are_joined_as_they_stand_when_asked():
    tokenizer = family_tokenizer(None)
    record = {"prompt": "2 + 2 =", "completion": " 4"}
    document = one(encoder(tokenizer, "instruction", chat_template="none"), record)
    assert tokenizer.decode(document.ids) == "2 + 2 = 4</s>"
    assert learned(tokenizer, document) == " 4</s>"
    with pytest.raises(ConfigError, match="none joins a prompt and a response"):
        encoder(tokenizer, "chat", chat_template="none")


@pytest.mark.parametrize(
    ("policy", "text", "ends"), [("keep_start", r"<s>\[INST\] Name.*", 0), ("keep_end", r"<s>.*colour\.</s>", 1)]
)
def test_long_chats_are_cut_as_configured(policy, text, ends):
    tokenizer = family_tokenizer(FAMILIES["mistral"][0], adds_bos=True)
    chat = [CHAT[1], {"role": "assistant", "content": "Red is " * 20 + "a colour."}]
    document = one(encoder(tokenizer, length=8, truncation=policy), {"messages": chat})
    assert len(document.ids) == len(document.learned) == 8
    assert document.ends_learned == ends
    assert document.cut > 20
    assert re.fullmatch(text, tokenizer.decode(document.ids))


def test_long_records_are_dropped_or_split_as_configured():
    tokenizer = family_tokenizer(None, adds_bos=True)
    text = "hello world, hello rank; " * 9
    assert encoder(tokenizer, "text", 16, truncation="drop").encode([({"text": text}, 0)]) == [[]]
    whole = one(encoder(tokenizer, "text", 4096), {"text": text})
    for length in (8, 16, len(whole.ids) - 1):
        (pieces,) = encoder(tokenizer, "text", length).encode([({"text": text}, 0)])
        assert not isinstance(pieces, RefusedError)
        assert [token for piece in pieces for token in piece.ids] == whole.ids
        assert all(2 <= len(piece.ids) <= length for piece in pieces)
        assert sum(piece.ends_learned for piece in pieces) == 1
    with pytest.raises(ConfigError, match="split is for text"):
        encoder(family("chatml"), truncation="split")


def segments(tokenizer: Any, document: Encoded) -> list[str]:
    """Return the learned texts, one for each run of learned tokens."""
    found: list[list[int]] = []
    for index, token in enumerate(document.ids):
        if document.learned[index]:
            if not (index and document.learned[index - 1]):
                found.append([])
            found[-1].append(token)
    return [tokenizer.decode(run) for run in found]


def marked_tokenizer(template: str) -> Any:
    made = family_tokenizer(template)
    names = "|tool_call tool_call| |tool_response tool_response| |turn turn| |observation| |call| "
    names = [*names.split(), "|start|", "|channel|", "|message|", "|return|"]
    made.add_special_tokens({"additional_special_tokens": [f"<{name}>" for name in names]})
    return made


# Gemma 4 writes the output of a tool into the message that calls it.
GEMMA4 = (
    "{% macro output(tool) %}{{ '<|tool_response>response:' + tool.name + '{' + VALUE + '}<tool_response|>' }}"
    "{% endmacro %}{% macro outputs(start) %}SCAN{% endmacro %}"
    "{% set listed = namespace(all='') %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% set listed.all = listed.all + output(m) %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'tool' %}{% if HEADED %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<|tool_call>call:' + call.function.name + (call.function.arguments | tojson) + '<tool_call|>' }}{% endfor %}"
    "{% set answered = m.tool_calls and loop.nextitem is defined and loop.nextitem.role == 'tool' %}"
    "{% if answered %}OUTPUTS{% endif %}{{ (m.content or '') | trim }}END{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ASKS %}{{ '<|turn>model\n' }}{% endif %}"
)
BY_INDEX = (
    "{% set going = namespace(on=true) %}{% for k in range(start, messages | length) %}{% set tool = messages[k] %}"
    "{% if tool.role != 'tool' %}{% set going.on = false %}{% elif going.on %}{{ output(tool) }}{% endif %}{% endfor %}"
)
BY_SLICE = (
    "{% set going = namespace(on=true) %}{% for tool in messages[start:] %}{% if tool.role != 'tool' %}"
    "{% set going.on = false %}{% elif going.on %}{{ output(tool) }}{% endif %}{% endfor %}"
)
SCANS = {
    "by index": ("", BY_INDEX.replace("start", "loop.index"), "tool.content"),
    "by slice": ("", BY_SLICE.replace("start", "loop.index"), "tool.content"),
    "by index in a macro, as JSON": (BY_INDEX, "{{ outputs(loop.index) }}", "tool.content | tojson"),
    "by slice in a macro, as JSON": (BY_SLICE, "{{ outputs(loop.index) }}", "tool.content | tojson"),
    "from a list": ("", "{{ listed.all }}", "tool.content"),
}
HEADERS = {
    "each": ("true", "true"),
    "none for an answer to a tool": (
        "m.role != 'assistant' or messages[loop.index0 - 1].role != 'tool'",
        "messages[-1].role != 'tool'",
    ),
}
ENDS_OF_TURN = {
    "always": "{{ '<turn|>\n' }}",
    "unless a tool has answered": "{% if m.tool_calls and not answered %}{{ '<|tool_response>' }}"
    "{% elif m.content %}{{ '<turn|>\n' }}{% endif %}",
}
CALLED = '<|tool_call>call:weather{"city": "Paris", "days": 2}<tool_call|>'
TWO_TOOLS = [*CALLS[:3], {"role": "tool", "content": "It is.", "name": "weather"}, CALLS[3]]
"""The output of the second tool equals the answer."""


def gemma4(scan: str, header: str, end: str) -> str:
    template = GEMMA4
    for place, text in zip(
        ("SCAN", "OUTPUTS", "VALUE", "HEADED", "ASKS", "END"),
        (*SCANS[scan], *HEADERS[header], ENDS_OF_TURN[end]),
        strict=True,
    ):
        template = template.replace(place, text)
    return template


SIMILAR = st.text(st.sampled_from('nr1{}[]" '), min_size=1, max_size=5).filter(lambda text: bool(text.strip()))
"""Short texts that are parts of each other, of the template's marks, and of JSON."""


@cache
def gemma4_tokenizer(scan: str) -> Any:
    return marked_tokenizer(gemma4(scan, "each", "always"))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCANS)), st.lists(SIMILAR, min_size=4, max_size=4))
def test_no_output_of_a_tool_is_learned_whatever_it_has_in_common_with_other_messages(scan, contents):
    asked, looking, output, answer = (content.strip() for content in contents)
    tokenizer = gemma4_tokenizer(scan)
    chat = [{**CALLS[0], "content": asked}, {**CALLS[1], "content": looking}, {**CALLS[2], "content": output}]
    document = one(encoder(tokenizer), {"messages": [*chat, {"role": "assistant", "content": answer}]})
    called = CALLED + "<|tool_response>"
    assert "".join(segments(tokenizer, document)) == f"{called}{looking}<turn|>{answer}<turn|>"


@pytest.mark.parametrize("end", ENDS_OF_TURN)
@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("scan", SCANS)
def test_the_output_of_a_tool_inside_the_turn_that_calls_it_is_not_learned(scan, header, end):
    tokenizer = marked_tokenizer(gemma4(scan, header, end))
    made = encoder(tokenizer)
    called, answer = CALLED + "<|tool_response>", "It is.<turn|>"
    looking = [CALLS[0], {**CALLS[1], "content": "Let me look."}, *CALLS[2:]]
    further = [*CALLS, {"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Red."}]
    for chat, wanted in (
        (CALLS, [called, answer]),
        (TWO_TOOLS, [called, answer]),
        (looking, [called, "Let me look.<turn|>", answer]),
        (further, [called, answer, "Red.<turn|>"]),
        (CALLS[:2], [CALLED + ("<turn|>" if end == "always" else "<|tool_response>")]),
    ):
        document = one(made, {"messages": chat})
        assert segments(tokenizer, document) == wanted
        assert document.ends_learned == document.turns
        assert tokenizer.decode(document.ids).strip() == tokenizer.apply_chat_template(chat, tokenize=False).strip()


@pytest.mark.parametrize(
    ("written", "last"),
    [
        ("m.content | trim + ('<s>' + messages[0].contentIF)", "Blue is another.<s>"),
        ("(messages[0].contentIF) + m.content | trim", "Blue is another.<|im_end|>"),
        ("(messages[0].content | tojsonIF) + m.content | trim", "Blue is another.<|im_end|>"),
    ],
)
def test_the_system_message_is_not_learned_where_a_template_writes_it_into_an_answer(written, last):
    written = written.replace("IF", " if loop.last and messages[0].role == 'system' else ''")
    tokenizer = family_tokenizer(FAMILIES["chatml"][0].replace("m.content | trim", written))
    assert "Be brief" in tokenizer.decode(one(encoder(tokenizer), {"messages": CHAT[:3]}).ids)
    assert answers(tokenizer, CHAT) == "Red.<|im_end|>" + last


END_OUTSIDE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}BETWEEN<|im_end|>\n{% endfor %}"
)
GREETING = [{"role": "assistant", "content": "Hello."}, *CHAT[1:3]]
INSIDE = "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("asked", ["", INSIDE], ids=["prompt behind the loop", "prompt inside the loop"])
def test_what_a_template_writes_before_a_conversation_that_the_assistant_begins_is_not_learned(asked):
    preamble = "{% if loop.first and m.role != 'system' %}<|im_start|>system\nhello rank<|im_end|>\n{% endif %}"
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    outside = "" if asked else "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    tokenizer = family_tokenizer(f"{{% for m in messages %}}{preamble}{turn}{asked}{{% endfor %}}{outside}")
    assert answers(tokenizer, GREETING) == "Hello.<|im_end|>Red.<|im_end|>"


@pytest.mark.parametrize("between", ["", "\n"], ids=["end next", "end on a new line"])
@pytest.mark.parametrize("space", ["", " ", "\n", " \n\n", "\t "])
def test_an_answer_that_ends_in_white_space_keeps_its_end_behind_the_generation_marks(space, between):
    tokenizer = family_tokenizer(END_OUTSIDE.replace("BETWEEN", between and "{{ '\n' }}"))
    chat = [{**message, "content": message["content"] + space} for message in CHAT]
    document = one(encoder(tokenizer), {"messages": chat})
    wanted = [f"{text}{space}{between}<|im_end|>" for text in ("Red.", "Blue is another.")]
    assert segments(tokenizer, document) == wanted
    assert (document.turns, document.ends_learned) == (2, 2)


def test_a_special_token_that_ends_an_answer_s_text_is_not_taken_for_the_turn_s_end():
    tokenizer = family_tokenizer(END_OUTSIDE.replace("BETWEEN", ""))
    chat = [CHAT[1], {"role": "assistant", "content": "It ends with <|eot_id|>"}]
    assert answers(tokenizer, chat) == "It ends with <|eot_id|><|im_end|>"


GLM4 = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|assistant|>\n{{ (m.content or '').strip() }}{% for call in m.tool_calls or [] %}"
    "{{ '\n' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_an_answer_ends_with_the_token_of_the_next_role_where_the_template_writes_no_other():
    tokenizer = marked_tokenizer(GLM4)
    made = encoder(tokenizer)
    called = '\n\nweather{"city": "Paris", "days": 2}<|observation|>'
    for chat, wanted in (
        (CHAT[1:3], ["\nRed.<|user|>"]),
        (CHAT[1:], ["\nRed.<|user|>", "\nBlue is another.<|user|>"]),
        (CALLS, [called, "\nIt is.<|user|>"]),
        (TWO_TOOLS, [called, "\nIt is.<|user|>"]),
        (CALLS[:2], [called]),
    ):
        document = one(made, {"messages": chat})
        assert segments(tokenizer, document) == wanted
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        assert tokenizer.decode(document.ids).removesuffix("<|user|>").removesuffix("<|observation|>") == text
    assert tokenizer.convert_tokens_to_ids("<|user|>") in end_tokens(None, tokenizer)


CLOSED_LATER = (
    "<s>{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% else %}{% if ns.open %}<|end|>{% endif %}<|user|>{% endif %}{% set ns.open = m.role == 'assistant' %}"
    "{{ m.content }}{% if not ns.open %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% elif ns.open %}<|end|>{% endif %}"
)


def test_an_answer_s_end_is_learned_where_the_next_message_or_the_end_of_the_chat_writes_it():
    tokenizer = family_tokenizer(CLOSED_LATER)  # as Apertus writes them
    made = encoder(tokenizer)
    for chat in (CHAT[1:], CHAT[1:3], [*CHAT[1:], CHAT[1]]):
        document = one(made, {"messages": chat})
        answers = [message["content"] + "<|end|>" for message in chat if message["role"] == "assistant"]
        assert segments(tokenizer, document) == answers
        assert document.turns == document.ends_learned == len(answers)
    assert tokenizer.convert_tokens_to_ids("<|end|>") in end_tokens(None, tokenizer)


@pytest.mark.parametrize(
    "unended",
    [
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}"
        "{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}{% endif %}{{ m.role + ': ' + m.content }}"
        "{% endfor %}",
    ],
    ids=["an end but for the last", "BOS before each question"],
)
def test_no_token_of_another_role_is_taken_for_an_end_that_is_missing(unended):
    with pytest.raises(ConfigError, match="ends the assistant's turn with no token"):
        encoder(family_tokenizer(unended))


READS = {
    "thinking": "m.thinking",
    "reasoning_content": "m['reasoning_content']",
    "reasoning": "m.get('reasoning')",
    "thought": "(m.thought if 'thought' in m else '')",
    "either": "(m.get('reasoning') or m.get('reasoning_content'))",
    "with calls alone": "(m.reasoning if m.tool_calls else '')",
}


@pytest.mark.parametrize("given", ["thinking", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("name", READS)
def test_the_reasoning_of_a_record_reaches_the_template_under_the_name_that_it_reads(name, given):
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}{% set thought_of = READ %}{% if thought_of %}"
        "<|channel|>analysis<|message|>{{ thought_of }}<|end|><|start|>assistant{% endif %}<|message|>"
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}{% endfor %}<|return|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tokenizer = marked_tokenizer(template.replace("READ", READS[name]))
    chat = [CALLS[0], {**CALLS[1], given: "I think so."}]
    document = one(encoder(tokenizer), {"messages": chat})
    analysis = "<|channel|>analysis<|message|>I think so.<|end|><|start|>assistant<|message|>"
    assert segments(tokenizer, document) == [analysis + 'weather{"city": "Paris", "days": 2}<|return|>']
    assert document.reasoning_lost == 0


def test_a_message_of_weight_0_is_not_learned_where_all_tokens_are():
    tokenizer = family("chatml")
    chat = [{**message, "weight": int(number not in (2, 3))} for number, message in enumerate(CHAT)]
    assert segments(tokenizer, one(encoder(tokenizer, train_on="all"), {"messages": chat})) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n",
        "<|im_start|>assistant\nBlue is another.<|im_end|>\n",
    ]
    words = "message 4 has weight 0, and the chat template does not show which text is its own"
    assert refusal(encoder(family_tokenizer(BY_PREFIX), train_on="all"), {"messages": chat}) == words
    tokenizer = marked_tokenizer(GLM4)  # the token that ends the last answer is not in its text
    chat = [*CHAT[1:4], {**CHAT[4], "weight": 0}]
    learned = segments(tokenizer, one(encoder(tokenizer, train_on="all"), {"messages": chat}))
    assert "".join(learned).endswith("Red.<|user|>\nAnother one?")


DEEPSEEK3 = (
    "{% set seen = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'tool' %}{% set seen.tool = true %}{{ '<|header_start|>' + m.content + '<|header_end|>' }}"
    "{% elif m.tool_calls %}{{ '<|Assistant|>' + (m.content or '') }}{% for call in m.tool_calls %}"
    "{{ call.type + '<|tool_call>' + call.function.name + '\n' + call.function.arguments + '<|end_of_sentence|>' }}"
    "{% endfor %}{% else %}{{ ('<|eot|>' if seen.tool else '<|Assistant|>') + m.content + '<|end_of_sentence|>' }}"
    "{% set seen.tool = false %}{% endif %}{% endfor %}{% if seen.tool %}<|eot|>{% endif %}"
    "{% if add_generation_prompt and not seen.tool %}<|Assistant|>{% endif %}"
)


def test_records_with_tools_of_deepseek_are_right_or_say_what_the_template_lacks():
    tokenizer = marked_tokenizer(DEEPSEEK3)
    called = 'function<|tool_call>weather\n{"city": "Paris", "days": 2}<|end_of_sentence|>'
    assert segments(tokenizer, one(encoder(tokenizer), {"messages": CALLS})) == [called, "It is.<|end_of_sentence|>"]
    left_out = "the chat template leaves out the tool weather"
    assert refusal(encoder(tokenizer), {"messages": CALLS, "tools": TOOLS}) == left_out


KIMI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.role == 'tool' %}"
    "{{ '## Return of ' + m.tool_call_id }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ '<|tool_call>' + call.id }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_call_that_is_written_by_its_identifier_alone_is_learned_if_that_holds_the_function_s_name():
    tokenizer = marked_tokenizer(KIMI)

    def called(identifier: str, name: str = "weather") -> Messages:
        function = {"name": name, "arguments": {"city": "Paris"}}
        asking = {**CALLS[1], "tool_calls": [{"id": identifier, "type": "function", "function": function}]}
        return [CALLS[0], asking, {**CALLS[2], "tool_call_id": identifier}, CALLS[3]]

    document = one(encoder(tokenizer), {"messages": called("functions.weather:0")})
    wanted = ['<|tool_call>functions.weather:0{"city": "Paris"}<|im_end|>', "It is.<|im_end|>"]
    assert segments(tokenizer, document) == wanted
    assert "Return of functions.weather:0" in tokenizer.decode(document.ids)
    left_out = "the chat template leaves out the tool calls of message 2"
    assert refusal(encoder(tokenizer), {"messages": called("call_1")}) == left_out
    assert refusal(encoder(tokenizer), {"messages": called("call_1", "c")}) == left_out
