"""Chat templates of the known model families, and what each writes: made by hand, message by message.

``written`` is the reference for labels: a list of texts, each with whether the assistant generates it.
"""

from collections.abc import Callable
from typing import Any

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


_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set content = message.content | trim -%}
  {%- if message.role == 'assistant' -%}
    {%- set thought = '' -%}
    {%- if '</think>' in content -%}
      {%- set thought = (content.split('</think>')[:-1] | join('</think>') | replace('<think>', '')).strip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {%- if loop.index0 > ns.last and (loop.last or thought) -%}
      {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' -}}
    {%- else -%}
      {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' -}}
    {%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
_LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system = '' %}"
    "{% endif %}{% for message in loop_messages %}{% set content = message['content'] | trim %}"
    "{% if loop.first and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + content %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA3 = (
    "{% for message in messages %}{% set content = HEADS + message['content'] | trim + END %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ASKED }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}"
    "{%- endif -%}{%- for message in loop_messages -%}{%- if message['role'] == 'assistant' -%}"
    "{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}{{ message['content'] | trim }}"
    "{{ '<end_of_turn>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
_PHI3 = (
    "{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% set content = message.content | trim %}"
    "{% if message.role == 'assistant' %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + '<|end_of_sentence|>' }}{% elif message.role == 'user' %}"
    "{{ '<|User|>' + content }}{% else %}{{ content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)


def _llama(start: str, stop: str, end: str) -> str:
    heads = f"'{start}' + message['role'] + '{stop}\\n\\n'"
    return (
        _LLAMA3.replace("HEADS", heads).replace("END", f"'{end}'").replace("ASKED", f"'{start}assistant{stop}\\n\\n'")
    )


def _gemma3(messages: Messages) -> Written:
    if messages[0]["role"] == "system":
        first = {**messages[1], "content": messages[0]["content"] + "\n\n" + messages[1]["content"].strip()}
        messages = [first, *messages[2:]]
    return turns(gemma_header, "<end_of_turn>", "<s>", "\n")(messages)


FAMILIES: dict[str, tuple[str, Callable[[Messages], Written], bool]] = {
    "chatml": (_CHATML, turns(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", behind="\n"), True),
    "qwen3": (_QWEN3, qwen3, True),
    "llama2": (_LLAMA2, lambda messages: inst(messages, "<s>", " "), True),
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
    "mistral": (_MISTRAL, lambda messages: inst(messages, "", ""), False),
    "gemma2": (_GEMMA, turns(gemma_header, "<end_of_turn>", "<s>", "\n"), False),
    "gemma3": (_GEMMA3, _gemma3, True),
    "phi3": (_PHI3, phi, True),
    "deepseek-r1": (_DEEPSEEK, deepseek, True),
}
"""For each family its template, the reference, and whether it takes a system message."""
