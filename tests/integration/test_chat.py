"""``ftmon chat`` with a tiny model: over pipes as a script uses it, and on a real terminal."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from eventually import eventually
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
        "llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=len(tokens),
        max_position_embeddings=4096,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def chat(*words: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*CHAT, *words], input=text, capture_output=True, text=True, timeout=300, check=False, env=os.environ
    )


def test_each_line_of_a_pipe_is_answered_by_one_line_of_its_own(model: Path) -> None:
    words = (str(model), "--temperature", "0", "--max-tokens", "8", "--device", "cpu")
    done = chat(*words, "--debug", text="a few\n\nwords\na few\n")
    assert done.returncode == 0, done.stderr
    first, blank, second, third = done.stdout.removesuffix("\n").split("\n")
    assert (first, blank) == (third, "")
    assert second != "" or first != ""
    sent = [line for line in done.stderr.splitlines() if line.startswith("sent ")]
    assert len(sent) == 3
    assert "'<|user|>'" in sent[0]
    assert sent[0].endswith("'<|assistant|>'")
    received = [line for line in done.stderr.splitlines() if line.startswith("received ")]
    assert received[0].startswith("received 8 tokens: ") or "'<|end|>'" in received[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nowhere/model"], "no such folder"),
        (["no-such-run"], "no such run, folder or model"),
        (["{empty}"], "holds neither a model (config.json) nor a complete checkpoint"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    done = chat(*(word.replace("{empty}", str(tmp_path)) for word in words), text="a\n")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
    assert done.stdout == ""


def test_a_prompt_that_the_model_cannot_take_and_bytes_that_are_no_text_are_refused_in_one_line(model: Path) -> None:
    done = chat(str(model), "--device", "cpu", text="words " * 5000)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "and the model takes 4,096 at the most" in done.stderr
    broken = subprocess.run(
        [*CHAT, str(model)],
        input=b"a few\xff\n",
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},  # as in most locales
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (broken.returncode, broken.stdout) == (2, b""), broken.stderr
    assert broken.stderr.decode().endswith("standard input, line 1: not UTF-8\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, not 0"),
        (["--seed", "9" * 23], f"--seed must be a whole number from 0 to 4,294,967,295, not {'9' * 23}"),
        (["--seed=-1"], "--seed must be a whole number from 0 to 4,294,967,295, not -1"),
    ],
)
def test_an_option_out_of_range_is_refused_before_a_model_is_looked_for(words: list[str], said: str) -> None:
    done = chat("/nowhere/model", *words, text="a\n")
    assert (done.returncode, done.stderr) == (2, f"ftmon: {said}\n")


def test_adapters_are_talked_to_without_the_words_of_a_library(model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base: Any = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    done = chat(str(tmp_path), "--max-tokens", "2", "--device", "cpu", text="a few\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(model: Path, tmp_path: Path) -> None:
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
        command(terminal, "printf", "%s-%s", "it", "ended")
        wait_for(terminal, "it-ended")
