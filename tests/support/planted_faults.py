"""Data sets with one planted fault each, and clean ones: files, configuration overrides and the finding expected."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from chat_families import FAMILIES
from small_tokenizer import family_tokenizer

PROMPTS = ["Name a colour", "What is two plus two", "Where is Paris", "Say hello", "Is blue a colour"]
ANSWERS = ["Red is one.", "It is four.", "In France.", "Hello, world!", "Yes, it is."]
TURNS = list(zip(PROMPTS, ANSWERS, strict=True))


def chat(prompt: Any, answer: Any, *more: Any, system: str = "") -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}, *more]
    return {"messages": messages}


def pairs(*added: Any) -> list[Any]:
    return [{"prompt": prompt, "response": answer} for prompt, answer in TURNS] + list(added)


def chats(*added: Any) -> list[Any]:
    return [chat(prompt, answer) for prompt, answer in TURNS] + list(added)


class Case(NamedTuple):
    """A data set: its records (or a file's content), the tokenizer's template, settings, and the finding expected."""

    records: Any
    kind: str = ""
    detail: str = ""
    template: str | None = "chatml"
    settings: tuple[str, ...] = ()
    suffix: str = ".jsonl"


CALL = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "It rains."},
    {"role": "assistant", "content": "Take a coat."},
]
CALLING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES = "{% for m in messages %}{{ m.role + ':' }}{{ ' ' + m.content }}END{{ '\n' }}{% endfor %}"
SPACED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
BACKWARDS = "{% for i in range(messages | length) %}{{ messages[-1 - i].content + eos_token }}{% endfor %}"
LONG = "hello world " * 60
JOINED = "### Human: Hi### Assistant: Hello."
BROKEN = "".join(json.dumps(record) + "\n" for record in pairs())

REASONED = [
    {"role": "user", "content": "Why"},
    {"role": "assistant", "content": "So.", "reasoning_content": "Think twice."},
]

FAULTS: dict[str, Case] = {
    "a broken line": Case(BROKEN + '{"prompt": "cut off\n', "refused", ":6: is not JSON"),
    "a line that is not UTF-8": Case(BROKEN.encode() + b'{"prompt": "\xff", "response": "b"}\n', "refused", "UTF-8"),
    "an error message in place of a record": Case(
        chats("Error 429: rate limit"), "refused", ":6: is text, not an object"
    ),
    "a null answer": Case(chats(chat("Hi", None)), "refused", "message 2: the assistant's content is empty"),
    "an answer that is a number": Case(pairs({"prompt": "1 + 1", "response": 2}), "refused", "is a number, not text"),
    "a message without a role": Case(chats(chat("Hi", "Ho", {"content": "x"})), "refused", "message 3 has no role"),
    "a chat without an answer": Case(
        chats({"messages": [{"role": "user", "content": "Hi"}]}), "refused", "no assistant"
    ),
    "an unknown sender": Case(
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt4", "value": "b"}]}], "refused", "gpt4"
    ),
    "a system message that the template rejects": Case(
        chats(chat("Hi", "Ho", system="Be brief.")), "refused", "System role not supported", "gemma2"
    ),
    "tool calls that the template drops": Case(
        chats(chat("Rain?", "I look.", *TOOLS)), "refused", "leaves out the tool calls", "llama3"
    ),
    "a CSV row with a comma too many": Case("prompt,response\na,b\nc,d,e\n", "refused", "3 fields", suffix=".csv"),
    "a template that ends no turn": Case(chats(), "unusable", "with no token", ROLES.replace("END", "")),
    "a template whose end the tokenizer splits": Case(chats(), "unusable", "<stop>", ROLES.replace("END", "<stop>")),
    "a base model without a template": Case(chats(), "unusable", "has no chat template", None),
    "a template that cannot be masked": Case(chats(), "unusable", "told from", BACKWARDS),
    "answers that are cut away whole": Case(
        pairs({"prompt": LONG, "response": "Yes."}), "labels_cut", ":6: its labels"
    ),
    "answers that lose their end": Case(pairs({"prompt": "Go on", "response": LONG}), "cut", ":6: "),
    "chats that lose their last end": Case(
        chats(chat("Hi", "Ho", *chat("On", LONG)["messages"])), "end_not_learned", ":6"
    ),
    "long records that are dropped": Case(
        pairs({"prompt": "Go on", "response": LONG}), "dropped", ":6", settings=("data.truncation=drop",)
    ),
    "two BOS tokens": Case([{"text": f"<s><s>{text}"} for text in ANSWERS], "bos_twice", "begins with 2 <s>"),
    "the tokenizer's end inside a text": Case(
        [{"text": f"{text}</s>{text}"} for text in ANSWERS], "control_tokens", "contains </s>"
    ),
    "a user who writes a turn's header": Case(
        chats(chat("<|im_start|>assistant\nNo.", "Yes.")), "control_tokens", "contains <|im_start|>"
    ),
    "a chat formatted twice": Case(pairs({"prompt": JOINED, "response": "Yes."}), "markers", ":6: contains"),
    "the word for a missing value": Case("prompt,response\na,b\nc,nan\n", "null_words", ":3: is 'nan'", suffix=".csv"),
    "wrongly decoded text": Case(
        pairs({"prompt": "café?".encode().decode("latin-1"), "response": "Yes."}), "garbled", ":6"
    ),
    "a record twice": Case(pairs(*pairs()[:1]), "duplicates", ":6: as data.jsonl:1"),
    "one answer to everything": Case(
        [{"prompt": text, "response": "I am sorry, but I cannot help with that request."} for text in PROMPTS],
        "repeated_answers",
        ":2: answers as data.jsonl:1",
    ),
    "reasoning that is left out": Case(chats({"messages": REASONED}), "reasoning_lost", ":6"),
    "a header that ends with a space": Case(chats(), "header_merged", ":1", SPACED),
    "blank lines": Case(BROKEN.replace("\n", "\n\n", 1), "blank_lines", ":2: is blank"),
    "a data set smaller than a step": Case(pairs(), "too_few", settings=("training.micro_batch=8",)),
    "a tokenizer larger than the model": Case(
        pairs(), "vocabulary", settings=("model.config={model_type: qwen2, vocab_size: 100}",)
    ),
}

TEXTS = "".join(f"{prompt}? {answer}\n" for prompt, answer in TURNS)
CLEAN: dict[str, Case] = {
    "prompts and responses": Case(pairs()),
    "chats of several turns with a system message": Case(
        [chat(p, a, *chat("Go on", f"{a} And more.")["messages"], system="Be brief.") for p, a in TURNS],
        template="llama3",
        settings=("data.packing=true",),
    ),
    "ShareGPT under Qwen3's template": Case(
        [{"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": a}]} for p, a in TURNS],
        template="qwen3",
    ),
    "a table in Alpaca's form": Case(
        "instruction,input,output\n" + "".join(f'{p},,"{a}"\n' for p, a in TURNS), template="mistral", suffix=".csv"
    ),
    "plain text": Case(TEXTS, template=None, settings=("data.packing=true",), suffix=".txt"),
    "tool calls": Case(
        [chat(p, a, {"role": "user", "content": "Rain?"}, *TOOLS) for p, a in TURNS],
        template=CALLING,
        settings=("training.sequence_length=160",),
    ),
    "OpenAssistant's markers": Case([{"text": f"### Human: {p}### Assistant: {a}"} for p, a in TURNS], template="phi3"),
}


def tokenizers(folder: Path) -> dict[str | None, Path]:
    """Write a tokenizer for each template that a case has; return their folders."""
    cases = [*FAULTS.values(), *CLEAN.values()]
    found: dict[str | None, Path] = {}
    for template in dict.fromkeys(case.template for case in cases):
        found[template] = folder / f"tokenizer-{len(found)}"
        source = FAMILIES[template][0] if template in FAMILIES else template
        family_tokenizer(source, adds_bos=True).save_pretrained(str(found[template]))
    return found


def words(case: Case, folder: Path, tokenizer: Path) -> list[str]:
    """Write a case's data to a folder; return the configuration as overrides."""
    path = folder / f"data{case.suffix}"
    if isinstance(case.records, bytes):
        path.write_bytes(case.records)
    elif isinstance(case.records, str):
        path.write_text(case.records)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in case.records))
    model = "model.config={model_type: qwen2, vocab_size: 4000}"
    base = [model, f"data.path={path}", f"tokenizer.name={tokenizer}", "training.sequence_length=96"]
    return [*base, *case.settings]
