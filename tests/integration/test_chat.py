"""``ftmon chat`` with a tiny model: over pipes as a script uses it, and on a real terminal."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from eventually import eventually
from ftmon.protocol.errors import UsageError
from ftmon.trainer.recipe.chat import session
from ftmon.trainer.recipe.chat.__main__ import _parser, main
from ftmon.trainer.recipe.model import tokenizer as tokenizers
from terminal import command, open_terminal, wait_for

CHAT = [sys.executable, "-P", "-m", "ftmon.tui.cli", "chat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and a tokenizer with the trainer's own chat template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("chat") / "model"
    tokens = tokenizers.train(lambda: ["a few words to learn from, and a few more"], 300)
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=len(tokens), max_position_embeddings=4096, eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("adapters")
    base: Any = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_each_line_of_a_pipe_is_answered_by_one_line_until_bytes_that_are_no_text_without_words_of_a_library(adapters):
    words = (str(adapters), "--temperature", "0", "--max-tokens", "8", "--device", "cpu", "--debug")
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as in most locales
    given = b"a few\n\nwords\na few\na few\xff\n"
    done = subprocess.run([*CHAT, *words], input=given, capture_output=True, timeout=300, check=False, env=environment)
    *debug, refusal = done.stderr.decode().splitlines()
    assert (done.returncode, refusal) == (2, "ftmon: standard input, line 5: not UTF-8")
    first, blank, second, third = done.stdout.decode().removesuffix("\n").split("\n")
    assert (first, blank) == (third, "")
    assert second != "" or first != ""
    assert [line.split()[0] for line in debug] == ["sent", "received"] * 3
    assert "'<|user|>'" in debug[0]
    assert debug[0].endswith("'<|assistant|>'")
    assert debug[1].startswith("received 8 tokens: ") or "'<|end|>'" in debug[1]


def test_lines_are_answered_with_status_0_and_a_prompt_the_model_cannot_take_is_refused(model, monkeypatch, capsys):
    options = _parser().parse_args([str(model), "--max-tokens", "2"])
    conversation = session.Session(session.load(session.find(str(model)), "cpu"), options)
    monkeypatch.setattr("sys.stdin", io.StringIO("a few\n\n"))
    assert conversation.answer_lines() == 0
    assert capsys.readouterr().out.count("\n") == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("words " * 5000))
    with pytest.raises(UsageError, match=r"and the model takes 4,096 at the most$"):
        conversation.answer_lines()
    assert capsys.readouterr() == ("", "")


@pytest.fixture(scope="module")
def named(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three sets of adapters of the model, of different ranks and layers, with random weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    kinds: dict[str, Any] = {
        "one": {"r": 4, "target_modules": "all-linear"},
        "two": {"r": 2, "target_modules": ["q_proj", "down_proj"], "lora_alpha": 64},
        "dora": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    }
    folder = tmp_path_factory.mktemp("named")
    for number, (name, kind) in enumerate(kinds.items()):
        torch.manual_seed(number)
        base: Any = AutoModelForCausalLM.from_pretrained(model)
        settings = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **kind)
        get_peft_model(base, settings).save_pretrained(folder / name)
    return {name: folder / name for name in kinds}


def generated_by_peft(model: Path, adapters: Path | None, text: str) -> str:
    """Return the most likely answer of eight tokens by peft's and transformers' own functions."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens: Any = AutoTokenizer.from_pretrained(model)
    made: Any = AutoModelForCausalLM.from_pretrained(model)
    made = (PeftModel.from_pretrained(made, str(adapters)) if adapters else made).eval()
    messages = [{"role": "user", "content": text}]
    ids = tokens.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        found = made.generate(**ids, max_new_tokens=8, do_sample=False)
    return tokens.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_each_of_several_adapters_answers_as_peft_alone_does(model, named, monkeypatch, capsys):
    words = [str(model), "--temperature", "0", "--max-tokens", "8"]
    for name, path in named.items():
        words += ["--adapter", f"{name}={path}"]
    conversation = session.Session(session.load(session.find(str(model)), "cpu"), _parser().parse_args(words))
    expected = {name: generated_by_peft(model, path, "a few words") for name, path in named.items()}
    expected["base"] = generated_by_peft(model, None, "a few words")
    assert len(set(expected.values())) == 4
    monkeypatch.setattr("sys.stdin", io.StringIO("a few words\n"))
    monkeypatch.setenv("COLUMNS", "160")  # of a terminal where four answers fit side by side
    assert conversation.answer_lines() == 0
    lines = dict(line.split("\t", 1) for line in capsys.readouterr().out.removesuffix("\n").split("\n"))
    shown = {name: session._UNSAFE.sub("", text) for name, text in expected.items()}
    assert lines == {name: shown[name].replace("\\", "\\\\").replace("\n", "\\n") for name in named}
    conversation._begin_anew()
    for name in ("two", "base", "one"):
        conversation._turn(f"/adapter {name}")
        assert capsys.readouterr().err == f"{name} answers\n"
        conversation._turn("/new")
        assert conversation._ask("a few words", show=False)[0] == shown[name]
    before = list(conversation._history)
    conversation._turn("/adapter none")
    assert capsys.readouterr().err == "one of base, one, two, dora\n"
    conversation._turn("/all a few words")
    heading = capsys.readouterr().out.splitlines()[0]
    assert re.split(r" +\|? *", heading.strip()) == ["base", "one", "two", "dora"]
    assert conversation._history == before, "a comparison is no part of the conversation"


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("poems", "--adapter poems: must be NAME=PATH"),
        ("base=MODEL", "base is the name of the model without adapters"),
        ("one=MODEL", "--adapter one: MODEL holds no adapters (no adapter_config.json)"),
        ("one=OTHER", "--adapter one: OTHER cannot be loaded on this model: size mismatch for "),
    ],
)
def test_adapters_that_are_none_or_do_not_fit_are_refused(model, tmp_path, word, text):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, vocab_size=300))
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(tmp_path)
    given = word.replace("MODEL", str(model)).replace("OTHER", str(tmp_path))
    options = _parser().parse_args([str(model), "--adapter", given])
    with pytest.raises(UsageError) as raised:
        session.Session(session.load(session.find(str(model)), "cpu"), options)
    assert text.replace("MODEL", str(model)).replace("OTHER", str(tmp_path)) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_answer_ends_before_a_stop(model, monkeypatch, capsys):
    loaded = session.load(session.find(str(model)), "cpu")

    def answer(*words: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("a few words"))
        given = [str(model), "--temperature", "9", "--seed", "1", "--max-tokens", "60", "--whole", *words]
        assert session.Session(loaded, _parser().parse_args(given)).answer_lines() == 0
        return capsys.readouterr().out.removesuffix("\n")

    whole = answer()
    stop = max(re.findall(r"[ -~]{2,}", whole[1:]), key=len)
    assert answer("--stop", "never written", "--stop", stop) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stop", ""], "--stop needs the text that ends an answer"),
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, not 0"),
        (["--seed", "9" * 23], f"--seed must be a whole number from 0 to 4,294,967,295, not {'9' * 23}"),
        (["--seed=-1"], "--seed must be a whole number from 0 to 4,294,967,295, not -1"),
        ([], "/nowhere/model: no such folder; give a model's folder, a run, or a name on the Hugging Face hub"),
    ],
)
def test_an_option_out_of_range_is_refused_before_a_model_is_looked_for(words, said, monkeypatch, capsys):
    monkeypatch.setattr("os.environ", os.environ.copy())  # it sets what the libraries read
    monkeypatch.setattr("sys.argv", ["chat", "/nowhere/model", *words])
    assert main() == 2
    assert capsys.readouterr() == ("", f"ftmon: {said}\n")


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(model, tmp_path):
    with open_terminal(110, 40, os.environ, tmp_path) as terminal:
        # More tokens could push the question off the screen.
        command(terminal, *CHAT, str(model), "--max-tokens", "2000", "--temperature", "9", "--seed", "1")
        wait_for(terminal, "Ctrl-C stops an answer, Ctrl-D ends", "\n>")
        terminal.press("a few", "Enter")
        # Not before: Ctrl-C empties what the terminal has typed ahead.
        eventually(lambda: terminal.text().partition("a few")[2].strip(), "a token", state=terminal.text)
        # Whatever the model says, the answer ends by itself or is stopped; both are followed by its figures.
        terminal.press("C-c")
        wait_for(terminal, "tokens/s")
        terminal.press("/help", "Enter")
        wait_for(terminal, "/new begins a new conversation")
        terminal.press("\x04")
        terminal.press("echo status-$?", "Enter")
        wait_for(terminal, "status-0")
