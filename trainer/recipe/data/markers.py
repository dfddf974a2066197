"""Chats written as one text with markers: ``### Human:``, ``Human:``, Llama 2's ``[INST]``, ``<|im_start|>``.

``parse`` raises ``RefusedError`` for a text without markers.
"""

import re

from .messages import ASSISTANT, SYSTEM, USER, Message, RefusedError

_HASHES = re.compile(r"### ?(Human|User|Instruction|System|Assistant|Response|Bot) ?: ?", re.IGNORECASE)
_TURNS = re.compile(r"(?:\A|\n\n)(Human|User|Assistant): ?")
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)
_INST = re.compile(r"\[INST\](.*?)\[/INST\](.*?)(?=(?:<s>\s*)?\[INST\]|\Z)", re.DOTALL)
_SYSTEM = re.compile(r"\A\s*<<SYS>>(.*?)<</SYS>>(.*)\Z", re.DOTALL)

_ROLES = {
    **dict.fromkeys(("human", "user", "instruction"), USER),
    **dict.fromkeys(("assistant", "response", "bot"), ASSISTANT),
    "system": SYSTEM,
}


def recognise(text: str) -> bool:
    """Return whether a text is a chat with markers: it starts with one, and an assistant answers."""
    start = text.lstrip()
    if start.startswith(("[INST]", "<s>[INST]", "<s> [INST]")):
        return "[/INST]" in text
    if start.startswith("<|im_start|>"):
        return "<|im_start|>assistant" in text
    for pattern in (_HASHES, _TURNS):
        found = pattern.match(start)
        if found is not None:
            return any(_ROLES[other.group(1).lower()] == ASSISTANT for other in pattern.finditer(start))
    return False


def parse(text: str) -> list[Message]:
    """Split a text at its markers."""
    text = text.strip()
    if "[INST]" in text and "[/INST]" in text:
        return _llama2(text)
    if "<|im_start|>" in text:
        rest = _CHATML.sub("", text).strip()
        if rest:
            raise RefusedError(f"has text outside its <|im_start|> markers: {rest[:40]!r}")
        return [Message(found.group(1), found.group(2)) for found in _CHATML.finditer(text)]
    for pattern in (_HASHES, _TURNS):
        if pattern.match(text):
            return _split(text, pattern)
    raise RefusedError("has no markers such as ### Human: and ### Assistant:")


def _split(text: str, pattern: re.Pattern[str]) -> list[Message]:
    marks = list(pattern.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        Message(_ROLES[mark.group(1).lower()], text[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    ]


def _llama2(text: str) -> list[Message]:
    before = text[: text.index("[INST]")].replace("<s>", "").strip()
    if before:
        raise RefusedError(f"has text before its first [INST]: {before[:40]!r}")
    messages: list[Message] = []
    for found in _INST.finditer(text):
        asked, answer = found.group(1), found.group(2)
        system = _SYSTEM.match(asked)
        if system is not None:
            messages.append(Message(SYSTEM, system.group(1).strip()))
            asked = system.group(2)
        messages.append(Message(USER, asked.strip()))
        answer = answer.strip().removesuffix("<s>").strip().removesuffix("</s>").strip()
        if answer:
            messages.append(Message(ASSISTANT, answer))
    return messages
