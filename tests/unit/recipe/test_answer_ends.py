"""Where an answer begins and ends: the same in training, in the exported model, in chat and in samples."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch
from chat_families import FAMILIES
from ftmon.trainer.recipe.chat.session import Prompts
from ftmon.trainer.recipe.config.schema import Config, Data, Training
from ftmon.trainer.recipe.data.encode import Encoder
from ftmon.trainer.recipe.data.messages import RefusedError
from ftmon.trainer.recipe.data.shipped import shipped
from ftmon.trainer.recipe.evaluation import evaluate
from ftmon.trainer.recipe.export import export
from ftmon.trainer.recipe.model.tokenizer import end_tokens
from small_tokenizer import family_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

CHAT = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": "Another one?"},
    {"role": "assistant", "content": "Blue is another."},
]


def encoded(tokenizer: Any, chat: list[dict[str, str]], template: str = "") -> tuple[list[int], list[bool]]:
    config = Config(data=Data(chat_template=template), training=Training(sequence_length=512))
    (made,) = Encoder(tokenizer, config, ["chat"]).encode([({"messages": chat}, 0)])
    assert not isinstance(made, RefusedError), made
    return made[0].ids, made[0].learned


def small_model(tokenizer: Any) -> Any:
    """A model that knows no end but EOS, as base models do."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, *(f"shipped {name}" for name in shipped())])
def test_chat_sends_the_tokens_that_training_saw_before_an_answer_and_stops_at_its_end(
    name: str, adds_bos: bool
) -> None:
    by_name = name.removeprefix("shipped ") if name.startswith("shipped ") else ""
    tokenizer = family_tokenizer(None if by_name else FAMILIES[name][0], adds_bos=adds_bos)
    ids, learned = encoded(tokenizer, CHAT[:2], by_name)
    prompts = Prompts(small_model(tokenizer), tokenizer)
    given = prompts.encode(CHAT[:1])
    # Templates of some families write another header before an answer than in a turn.
    same = len(given) if by_name else 3
    assert ids[:same] == given[:same]
    assert ids[0] == tokenizer.bos_token_id or not adds_bos
    assert given.count(tokenizer.bos_token_id) == ids.count(tokenizer.bos_token_id)
    answer = [token for token, one in zip(ids, learned, strict=True) if one]
    assert answer[-1] in prompts.stops
    assert not set(answer[:-1]) & prompts.stops
    assert tokenizer.eos_token_id in prompts.stops


def test_the_exported_model_stops_at_the_templates_end_too() -> None:
    tokenizer = family_tokenizer(FAMILIES["chatml"][0])
    model = small_model(tokenizer)
    export._settle_config(model, tokenizer, Config())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, end]


def test_a_sample_ends_where_the_template_ends_an_answer() -> None:
    tokenizer = family_tokenizer(FAMILIES["chatml"][0])
    model = small_model(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():  # the most likely token, whatever came before
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(end), len(tokenizer)).float())
    ids, learned = encoded(tokenizer, CHAT[:2])
    row = {"input_ids": ids, "labels": [token if one else -100 for token, one in zip(ids, learned, strict=True)]}
    engine = SimpleNamespace(module=model, eval=model.eval, train=model.train)
    world: Any = SimpleNamespace(is_first=True, device=torch.device("cpu"))
    ((_, answer),) = evaluate.generate(engine, tokenizer, [row], 8, 64, world, together=False)
    assert answer == "<|im_end|>"


def test_a_template_that_refuses_the_probe_adds_no_end() -> None:
    tokenizer = family_tokenizer("{{ raise_exception('no') }}")
    assert end_tokens(None, tokenizer) == [tokenizer.eos_token_id]


def test_bos_is_put_before_those_of_several_templates_that_lack_it() -> None:
    tools = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    tokenizer = family_tokenizer({"default": FAMILIES["chatml"][0], "tool_use": tools}, adds_bos=True)
    ids, _ = encoded(tokenizer, CHAT)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.chat_template == {"default": "{{ bos_token }}" + FAMILIES["chatml"][0], "tool_use": tools}
