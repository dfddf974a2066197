"""Chat templates of known model families, and what each writes, made by hand: texts, and whether the assistant's."""

from collections.abc import Callable
from typing import Any

from places import DATA

Messages = list[dict[str, Any]]
Written = list[tuple[str, bool]]

SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|header_start|>", "<|header_end|>", "<|eot|>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>"),
    *("<|assistant|>", "<|system|>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "[INST]", "[/INST]"),
]


def turns(header: Callable[[str], str], end: str, start: str = "", behind: str = "") -> Callable[[Messages], Written]:
    def written(messages: Messages) -> Written:
        result: Written = [(start, False)]
        for message in messages:
            answer = message["role"] == "assistant"
            result += [(header(message["role"]), False), (message["content"].strip() + end, answer), (behind, False)]
        return result

    return written


def qwen3(messages: Messages) -> Written:
    """Write the reasoning of what follows the last question alone, and an empty one in the last answer."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    result: Written = []
    for index, message in enumerate(messages):
        content = message["content"].strip()
        if message["role"] == "assistant":
            thought, _, content = content.rpartition("</think>")
            thought = thought.replace("<think>", "").strip("\n")
            content = content.lstrip("\n")
            if index > last and (index == len(messages) - 1 or thought):
                content = f"<think>\n{thought}\n</think>\n\n{content}"
        result += [(f"<|im_start|>{message['role']}\n", False)]
        result += [(f"{content}<|im_end|>", message["role"] == "assistant"), ("\n", False)]
    return result


def inst(messages: Messages, each: str, space: str) -> Written:
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    result: Written = [] if each else [("<s>", False)]
    for message in messages[bool(system) :]:
        content = message["content"].strip()
        if message["role"] == "user":
            before = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else ""
            system = ""
            result.append((f"{each}[INST] {before}{content} [/INST]", False))
        else:
            result.append((f" {content}{space}</s>", True))
    return result


def gemma_header(role: str) -> str:
    return f"<start_of_turn>{'model' if role == 'assistant' else 'user'}\n"


def deepseek(messages: Messages) -> Written:
    result: Written = [("<s>", False)]
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "assistant":
            result += [("<|Assistant|>", False), (content.rpartition("</think>")[2] + "<|end_of_sentence|>", True)]
        else:
            result.append(((f"<|User|>{content}" if message["role"] == "user" else content), False))
    return result


def phi(messages: Messages) -> Written:
    return [*turns(lambda role: f"<|{role}|>\n", "<|end|>", behind="\n")(messages), ("</s>", False)]


def _template(name: str) -> str:
    return (DATA / "templates" / f"{name}.jinja").read_text().rstrip("\n")


def _llama(start: str, stop: str, end: str) -> str:
    heads = f"'{start}' + message['role'] + '{stop}\\n\\n'"
    asked = f"'{start}assistant{stop}\\n\\n'"
    return _template("llama").replace("HEADS", heads).replace("END", f"'{end}'").replace("ASKED", asked)


def _gemma3(messages: Messages) -> Written:
    if messages[0]["role"] == "system":
        first = {**messages[1], "content": messages[0]["content"] + "\n\n" + messages[1]["content"].strip()}
        messages = [first, *messages[2:]]
    return turns(gemma_header, "<end_of_turn>", "<s>", "\n")(messages)


FAMILIES: dict[str, tuple[str, Callable[[Messages], Written], bool]] = {
    "chatml": (_template("chatml"), turns(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", behind="\n"), True),
    "qwen3": (_template("qwen3"), qwen3, True),
    "llama2": (_template("llama2"), lambda messages: inst(messages, "<s>", " "), True),
    "llama3": (
        _llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        turns(lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "<s>"),
        True,
    ),
    "llama4": (
        _llama("<|header_start|>", "<|header_end|>", "<|eot|>"),
        turns(lambda role: f"<|header_start|>{role}<|header_end|>\n\n", "<|eot|>", "<s>"),
        True,
    ),
    "mistral": (_template("mistral"), lambda messages: inst(messages, "", ""), False),
    "gemma2": (_template("gemma2"), turns(gemma_header, "<end_of_turn>", "<s>", "\n"), False),
    "gemma3": (_template("gemma3"), _gemma3, True),
    "phi3": (_template("phi3"), phi, True),
    "zephyr": (_template("zephyr"), turns(lambda role: f"<|{role}|>\n", "</s>", behind="\n"), True),
    "deepseek-r1": (_template("deepseek-r1"), deepseek, True),
}
"""For each family its template, the reference, and whether it takes a system message."""
