"""From records to token ids and labels."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from ftmon.trainer.recipe import tokenizer as tokenizers
from ftmon.trainer.recipe.config import Config, Data, Training
from ftmon.trainer.recipe.data import Collate, pack
from ftmon.trainer.recipe.examples import IGNORED, Encoder

TEXTS = ["What is two plus two? Two plus two is four.", "Name a colour. Red is a colour.", "hello world, hello rank"]
INSTRUCTION = {"prompt": "What is two plus two?", "response": "Two plus two is four."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.train(lambda: TEXTS, 400)


def encoder(tokenizer: Any, kind: str, length: int = 128, **data: Any) -> Encoder:
    return Encoder(tokenizer, Config(data=Data(**data), training=Training(sequence_length=length)), kind)


def learned(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    return tokenizer.decode([label for label in labels if label != IGNORED])


def test_a_trained_tokenizer_gives_any_text_back(tokenizer: Any) -> None:
    for text in (*TEXTS, "Ünïcödé 你好 🙂\n\ttabs"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.pad_token_id == 0
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_loss_is_counted_on_the_response_and_its_end_alone(tokenizer: Any) -> None:
    ids, labels = encoder(tokenizer, "instruction").encode(INSTRUCTION)
    assert tokenizer.decode(ids) == "<|user|>What is two plus two?<|end|><|assistant|>Two plus two is four.<|end|>"
    assert learned(tokenizer, ids, labels) == "Two plus two is four.<|end|>"


def test_loss_is_counted_on_prompts_too_when_asked(tokenizer: Any) -> None:
    ids, labels = encoder(tokenizer, "instruction", train_on_prompt=True).encode(INSTRUCTION)
    assert labels == ids


def test_text_is_learned_whole_with_its_end(tokenizer: Any) -> None:
    ids, labels = encoder(tokenizer, "text").encode({"text": "hello world"})
    assert learned(tokenizer, ids, labels) == "hello world<|end|>"


def test_of_a_chat_every_answer_is_learned_and_nothing_else(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Another."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Thanks."},
    ]
    ids, labels = encoder(tokenizer, "chat").encode({"messages": chat})
    assert learned(tokenizer, ids, labels) == "Red.<|end|>Blue.<|end|>"
    assert tokenizer.decode(ids).endswith("<|assistant|>Blue.<|end|>")


def test_a_tokenizer_without_a_template_writes_the_roles_out(tokenizer: Any) -> None:
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        ids, labels = encoder(tokenizer, "instruction").encode(INSTRUCTION)
    finally:
        tokenizer.chat_template = template
    assert tokenizer.decode(ids) == "User: What is two plus two?\nAssistant: Two plus two is four.<|end|>\n"
    assert learned(tokenizer, ids, labels) == "Two plus two is four.<|end|>"


def test_long_examples_are_cut_and_those_with_nothing_to_learn_left_out(tokenizer: Any) -> None:
    made = encoder(tokenizer, "instruction", length=12)
    ids, labels = made.encode({"prompt": "a", "response": "b" * 500})
    assert len(ids) == len(labels) == 12
    columns = {"prompt": ["a", "a" * 500], "response": ["b", "never reached"]}
    assert len(made.batch(columns)["input_ids"]) == 1


def test_padding_is_masked_and_carries_no_loss(tokenizer: Any) -> None:
    ten = list(range(10, 20))
    short = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}
    batch = Collate(pad_id=0, limit=128)([short, {"input_ids": ten, "labels": ten}])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(batch, (2, 16))
    assert batch["input_ids"][0].tolist() == [5, 6, 7] + [0] * 13
    assert batch["attention_mask"].sum(1).tolist() == [3, 10]
    assert batch["labels"][0].tolist() == [IGNORED, 6, 7] + [IGNORED] * 13


def test_padding_never_exceeds_the_sequence_length(tokenizer: Any) -> None:
    batch = Collate(pad_id=0, limit=13)([{"input_ids": list(range(13)), "labels": list(range(13))}])
    assert batch["input_ids"].shape == (1, 13)


def test_packing_fills_sequences_to_the_last_token() -> None:
    packed = pack({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]], "labels": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]}, 4)
    assert packed["input_ids"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
