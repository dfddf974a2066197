"""The conversation: on a terminal with a person, or over pipes with a script."""

import argparse
import re
import signal
import sys
import time
from typing import NamedTuple

import torch

from ....protocol.errors import UsageError
from .generate import Sampling, Words, tokens
from .load import Loaded
from .prompt import Message, Prompts

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters that a terminal would execute; tabs and line ends are kept."""
_HELP = "/new begins a new conversation, /system TEXT sets the system prompt; Ctrl-C stops an answer, Ctrl-D ends"


class Answer(NamedTuple):
    """A model's answer."""

    text: str
    tokens: int
    seconds: float
    why: str
    """Reason of its end: ``end``, the name of a limit, or ``Ctrl-C``."""


class Session:
    """A conversation with a model, and its history.

    Raises:
        UsageError: the model's template refuses the system prompt.
    """

    def __init__(self, loaded: Loaded, options: argparse.Namespace) -> None:
        self._loaded = loaded
        self._options = options
        self._prompts = Prompts(loaded.model, loaded.tokenizer)
        self._sampling = _sampling(options, loaded)
        self._history: list[Message] = []
        self._interruptible = False
        """Whether Ctrl-C ends what is under way: the input of a line, or the generation of an answer."""
        self._system(options.system)

    def converse(self) -> int:
        """Run a dialogue on the terminal until Ctrl-D; return the exit status."""
        self._note(self._loaded.text)
        self._note(_HELP if self._prompts.has_template else "no chat template: what you write is continued as text")
        signal.signal(signal.SIGINT, self._interrupt)
        while True:
            try:
                self._interruptible = True
                line = input("\n> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                self._note("\nCtrl-D ends")
                continue
            finally:
                self._interruptible = False
            if not _is_text(line):
                self._note("not UTF-8")
            elif line:
                self._turn(line)

    def _interrupt(self, _number: int, _frame: object) -> None:
        """Handle Ctrl-C: it counts at the prompt and while an answer is generated, once."""
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt

    def answer_lines(self) -> int:
        """Answer each line of standard input on its own, or all of it as one message; return the exit status.

        The answer to a line is one line: backslashes and line ends in it are escaped by a backslash.
        """
        whole = sys.stdin.read().strip() if self._options.whole else ""
        for number, line in enumerate([whole] if whole else sys.stdin, 1):
            if not line.strip():
                print(flush=True)  # so that answers and questions have the same line numbers
                continue
            if not _is_text(line):
                raise UsageError(f"standard input, line {number}: not UTF-8")
            self._begin_anew()
            answer = self._ask(line.strip(), show=False)
            text = answer.text if whole else answer.text.replace("\\", "\\\\").replace("\n", "\\n")
            print(text, flush=True)
        return 0

    def _turn(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/new":
            self._begin_anew()
        elif command == "/system":
            try:
                self._system(rest)
            except UsageError as error:
                self._note(str(error))
                self._system("")
        elif command in ("/help", "/?"):
            self._note(_HELP)
        else:
            try:
                answer = self._ask(line, show=True)
            except UsageError as error:
                self._history.pop()
                self._note(str(error))
                return
            ended = "" if answer.why == "end" else f", ended by {answer.why}"
            self._note(f"{answer.tokens} tokens, {answer.tokens / max(answer.seconds, 1e-9):.1f} tokens/s{ended}")

    def _ask(self, text: str, show: bool) -> Answer:
        """Generate the answer to a message, and add both to the conversation."""
        self._history.append({"role": "user", "content": text})
        words, received, parts, why = Words(self._loaded.tokenizer), [], [], "Ctrl-C"
        began = time.perf_counter()
        try:
            self._interruptible = True
            prompt = self._prompts.encode(self._history)
            if self._options.debug:
                self._debug("sent", prompt)
            began = time.perf_counter()
            stream = tokens(self._loaded.model, prompt, self._prompts.stops, self._options.max_tokens, self._sampling)
            while True:
                try:
                    token = next(stream)
                except StopIteration as end:
                    why = end.value
                    break
                received.append(token)
                if token not in self._prompts.stops:
                    self._show(words.add(token), parts, show)
        except KeyboardInterrupt:
            if not show:
                raise
        finally:
            self._interruptible = False
        seconds = time.perf_counter() - began
        self._show(words.rest(), parts, show)
        if show:
            print(flush=True)
        if self._options.debug:
            self._debug("received", received)
        answer = "".join(parts)
        self._history.append({"role": "assistant", "content": answer})
        return Answer(_UNSAFE.sub("", answer), len(received), seconds, why)

    def _show(self, text: str, parts: list[str], show: bool) -> None:
        parts.append(text)
        if show and text:
            print(_UNSAFE.sub("", text), end="", flush=True)

    def _begin_anew(self) -> None:
        self._history = [message for message in self._history[:1] if message["role"] == "system"]

    def _system(self, text: str) -> None:
        """Restart the conversation with this system prompt."""
        self._history = [{"role": "system", "content": text}] if text else []
        if text:
            self._prompts.encode([*self._history, {"role": "user", "content": "a"}])

    def _debug(self, what: str, ids: list[int]) -> None:
        each = " ".join(f"{one}:{self._loaded.tokenizer.decode([one])!r}" for one in ids)
        self._note(f"{what} {len(ids)} tokens: {each}")

    def _note(self, text: str) -> None:
        """Write a text that is not part of the conversation to standard error."""
        dim = sys.stderr.isatty()
        print(f"\x1b[2m{_UNSAFE.sub('', text)}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def _is_text(line: str) -> bool:
    """Return whether all bytes of a line were UTF-8."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sampling(options: argparse.Namespace, loaded: Loaded) -> Sampling:
    own = loaded.model.generation_config
    temperature = options.temperature
    if temperature is None:
        temperature = own.temperature if own.do_sample and own.temperature is not None else 0.7
    top_p = options.top_p
    if top_p is None:
        top_p = own.top_p if own.do_sample and own.top_p is not None else 0.95
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    return Sampling(float(temperature), float(top_p), generator)
