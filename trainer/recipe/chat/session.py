"""The conversation: on a terminal with a person, or over pipes with a script."""

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ....protocol.errors import FtmonError, RunNotFoundError, SeveralRunsError, UsageError
from ....protocol.run import rundir
from ....protocol.run.rundir import RunDir
from ....protocol.text import wrapped
from ..checkpoint import manifest
from ..checkpoint.manifest import Base, Manifest
from ..checkpoint.save import DESCRIPTION
from ..model import shape
from ..model.load import DTYPES
from ..model.tokenizer import end_tokens
from ..preflight.resolve import hub_refusal
from . import adapters


class Sampling(NamedTuple):
    """How the next token is chosen: by ``temperature`` (0: the likeliest), of the likeliest with ``top_p`` together."""

    temperature: float
    top_p: float
    generator: torch.Generator


def tokens(
    model: Any, prompt: Sequence[int], stops: frozenset[int], limit: int, sampling: Sampling
) -> Generator[int, None, str]:
    """Yield an answer's tokens as they are generated, the stop token included; return why generation ended.

    A prompt as long as the model's longest sequence is a ``UsageError``.
    """
    room = shape.room(model.config, len(prompt), limit)
    if room < 1:
        length = len(prompt) + room
        raise UsageError(f"the conversation is {len(prompt):,} tokens long, and the model takes {length:,} at the most")
    known: Any = None
    fed = torch.tensor([list(prompt)], device=model.device)
    for _ in range(room):
        # Not around the yield: inference mode would hold for the caller too.
        with torch.inference_mode():
            out = model(input_ids=fed, past_key_values=known, use_cache=True, logits_to_keep=1)
            known = out.past_key_values
            token = choose(out.logits[0, -1], sampling)
            fed = torch.tensor([[token]], device=model.device)
        yield token
        if token in stops:
            return "end"
    return "--max-tokens" if room == limit else "the model's longest sequence"


def choose(logits: torch.Tensor, sampling: Sampling) -> int:
    """Draw the next token from its logits, of shape [vocabulary]."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / sampling.temperature, -1)
    ordered, indices = probabilities.sort(descending=True)
    # The first token is always kept: the sum before it is 0.
    ordered[ordered.cumsum(0) - ordered >= sampling.top_p] = 0.0
    return int(indices[torch.multinomial(ordered, 1, generator=sampling.generator)])


class Words:
    """Converts generated tokens to text, whole characters at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0
        self._begin = 0

    def add(self, token: int) -> str:
        """Return the text that this token completes; empty in the middle of a character."""
        self._tokens.append(token)
        text: str = self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return ""
        new = text[self._shown :]
        self._shown = len(text)
        if len(self._tokens) - self._begin > 64 and new.startswith(" "):
            # Decode from a new word on: the cost does not grow with the answer. The word's token is kept for its space.
            self._begin = len(self._tokens) - 1
            self._shown = len(self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True))
        return new

    def rest(self) -> str:
        """Return the rest of the text, an unfinished character."""
        text: str = self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True)
        return text[self._shown :]


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str, bool]:
    """Return the text before the first of ``stops``, and whether one is there; between: what may become one of them."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], "", True
    begun = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    shown = len(text) - max(begun, default=0)
    return text[:shown], text[shown:], False


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class Source(NamedTuple):
    """Place of a model's weights: a folder or a name on the hub; or a checkpoint of ftmon's trainer."""

    path: str
    is_checkpoint: bool
    text: str


def find(target: str) -> Source:
    """Return the model of a chat: the final model if there is one, else the newest complete checkpoint."""
    path = Path(target).expanduser()
    if path.is_dir():
        found = _in_folder(path) or _of_run(RunDir(path))
        if found is None:
            raise UsageError(f"{target}: holds neither a model (config.json) nor a complete checkpoint")
        return found
    # A name with a slash is a local folder if its first part is one: ``output/model``.
    is_local = target.startswith(("/", "./", "../", "~")) or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())
    if path.exists() or is_local:
        raise UsageError(f"{target}: no such folder; give a model's folder, a run, or a name on the Hugging Face hub")
    try:
        run = rundir.find(target)
    except SeveralRunsError:
        raise
    except RunNotFoundError:
        if _HUB_NAME.fullmatch(target):
            if refusal := hub_refusal(target):
                raise UsageError(refusal) from None
            return Source(target, False, target)
        raise UsageError(f"{target}: no such run, folder or model; 'ftmon ls' lists runs") from None
    found = _of_run(run)
    if found is None:
        raise UsageError(
            f"{run.id}: has neither a final model nor a complete checkpoint; 'ftmon train' writes one every "
            "checkpoint.every steps"
        )
    # ``target`` may be the beginning of a name, or the name of several runs, one of them alive.
    return found._replace(text=f"{run.id}: {found.text}")


def _in_folder(path: Path) -> Source | None:
    for name in ("adapter_config.json", "config.json"):
        if (path / name).is_file():
            return Source(str(path), False, str(path))
    one, _ = manifest.examine(path)
    if one is not None:
        return _checkpoint(one)
    if (path / "model").is_dir() and (found := _in_folder(path / "model")):
        return found
    for folder in (path / "checkpoints", path):
        complete, _ = manifest.complete(folder)
        if complete:
            return _checkpoint(complete[0])
    return None


def _of_run(run: RunDir) -> Source | None:
    if not run.config.is_file():
        return None
    from ..config.load import load

    try:
        folder = load(str(run.config)).config.output.dir
    except (FtmonError, OSError):
        folder = ""  # a configuration of another version
    output = Path(folder) if folder else run.path / "output"
    return _in_folder(output) if output.is_dir() and os.access(output, os.R_OK) else None


def _checkpoint(found: manifest.Found) -> Source:
    state = found.manifest.state
    return Source(str(found.path), True, f"{found.path}, after step {state.step:,}")


Message = dict[str, str]


class Prompts:
    """Renders conversations for one model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.stops = frozenset(end_tokens(model, tokenizer))

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the answer."""
        if not self.has_template:
            return self._tokenizer("".join(message["content"] for message in messages))["input_ids"]
        try:
            found: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        except (TemplateError, ValueError, TypeError) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            raise UsageError(f"the model's chat template refuses these messages: {first}") from None
        return list(found["input_ids"] if hasattr(found, "keys") else found)


class Loaded(NamedTuple):
    """A loaded model and its tokenizer."""

    model: Any
    tokenizer: Any
    text: str


def load(source: Source, device: str) -> Loaded:
    """Load a model and its tokenizer; raise ``UsageError`` if they cannot be loaded.

    ``device`` auto is a GPU if there is one, but the CPU for a checkpoint, whose run may be training on the GPUs.
    """
    disable_progress_bar()
    where = _device(device, source.is_checkpoint)
    tokens = str(Path(source.path) / DESCRIPTION) if source.is_checkpoint else source.path
    try:
        if source.is_checkpoint:
            model = _from_checkpoint(Path(source.path))
        else:
            model = AutoModelForCausalLM.from_pretrained(source.path, dtype="auto", device_map={"": "cpu"})
        model = _fitting(model, where)
        tokenizer: Any = AutoTokenizer.from_pretrained(tokens)
    except UsageError:
        raise
    except torch.OutOfMemoryError:
        raise UsageError(f"{source.path}: does not fit on the GPU; use --device cpu") from None
    except Exception as error:  # the hub's, the files' and the model types' own errors
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"{source.path}: cannot be loaded: {first}") from None
    model = model.to(where).eval()
    dtype = str(model.dtype).removeprefix("torch.")
    return Loaded(model, tokenizer, f"{source.text} ({dtype} on {'the CPU' if where.type == 'cpu' else where})")


def _device(device: str, is_checkpoint: bool) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no GPU can be used here; see 'ftmon doctor'")
    if device == "cpu" or (is_checkpoint and device == "auto"):
        return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _from_checkpoint(path: Path) -> Any:
    content = manifest.read(path)
    if content is None:
        raise UsageError(f"{path}: is not a complete checkpoint")
    weights = _weights(path, content)
    dtype = DTYPES[content.precision]
    if content.base is not None:
        return _adapted(path, content.base, weights, dtype)
    config = AutoConfig.from_pretrained(path / DESCRIPTION)
    with torch.device("meta"):
        kind: Any = type(AutoModelForCausalLM.from_config(config))
    # The auto class requires a path.
    model, report = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    wrong = [*report["missing_keys"], *report["unexpected_keys"]]
    if wrong:
        raise UsageError(f"{path}: does not hold the whole model: {sorted(wrong)[0]}")
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path / DESCRIPTION)
    return model


def _adapted(path: Path, base: Base, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    from peft import LoraConfig, get_peft_model

    if not base.name:
        raise UsageError(
            f"{path}: holds adapters of a model with random weights, which no checkpoint keeps; its final model can be "
            "talked to"
        )
    settings: Any = AutoConfig.from_pretrained(path / DESCRIPTION)  # the base's, with model.overrides
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    plain = AutoModelForCausalLM.from_pretrained(base.name, config=settings, dtype=dtype, device_map={"": "cpu"})
    model: Any = get_peft_model(plain, LoraConfig.from_pretrained(str(path / DESCRIPTION)))  # type: ignore[arg-type]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    wrong = [*unexpected, *(name for name in missing if ".lora_" in name)]
    if wrong:
        raise UsageError(f"{path}: its adapters do not fit {base.name}: {wrong[0]}")
    return model.merge_and_unload()


def _place(path: str) -> adapters.Place:
    """Return the place of adapters: a folder of peft, an output folder, a run, or a checkpoint with adapters."""
    source = find(path)
    folder = Path(source.path)
    content = manifest.read(folder) if source.is_checkpoint else None
    if content is None:
        return adapters.Place(folder, None)
    return adapters.Place(folder / DESCRIPTION, partial(_weights, folder, content))


def _weights(path: Path, content: Manifest) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if content.zero_stage == 0:
        state: Any = torch.load(path / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        return state["module"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        consolidated: Any = get_fp32_state_dict_from_zero_checkpoint(
            str(path.parent), tag=path.name, exclude_frozen_parameters=content.base is not None
        )
    return consolidated


def _fitting(model: Any, device: torch.device) -> Any:
    """Return the model in fp32 on a CPU with memory for it, where half precision is slow."""
    if device.type == "cpu" and model.dtype != torch.float32:
        needed = 4 * sum(parameter.numel() for parameter in model.parameters())
        if needed < psutil.virtual_memory().available // 2:
            return model.float()
    return model


_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters that a terminal would execute; tabs and line ends are kept."""
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # Surrogates: bytes that are not UTF-8 (``surrogateescape``)
_HELP = "/new begins a new conversation, /system TEXT sets the system prompt; Ctrl-C stops an answer, Ctrl-D ends"
_ADAPTERS = "/adapter NAME lets it answer ({}), /all TEXT answers with each, side by side"


class Session:
    """A conversation with a model, and its history; a system prompt that the template refuses is a ``UsageError``."""

    def __init__(self, loaded: Loaded, options: argparse.Namespace) -> None:
        paths = adapters.parse(options.adapter)
        self._voices = {adapters.BASE: loaded.tokenizer}  # The tokenizer of each that can answer, by its name
        if paths:
            model, own = adapters.load(
                loaded.model, loaded.tokenizer, {name: _place(path) for name, path in paths.items()}
            )
            loaded = loaded._replace(model=model)
            self._voices |= own
        self._loaded = loaded
        self._options = options
        self._voice = adapters.BASE
        self._prompts = Prompts(loaded.model, loaded.tokenizer)
        if paths:
            self._speak_as(next(iter(paths)))
        self._sampling = _sampling(options, loaded)
        self._history: list[Message] = []
        self._interruptible = False  # Whether Ctrl-C ends what is under way: the input of a line, or an answer
        self._system(options.system)

    def converse(self) -> int:
        """Run a dialogue on the terminal until Ctrl-D; return the exit status."""
        self._note(self._loaded.text)
        self._note(_HELP if self._prompts.has_template else "no chat template: what you write is continued as text")
        if len(self._voices) > 1:
            self._note(f"{self._voice} answers; {_ADAPTERS.format(', '.join(self._voices))}")
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
            if _NOT_UTF8.search(line):
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
            if _NOT_UTF8.search(line):
                raise UsageError(f"standard input, line {number}: not UTF-8")
            answers = self._ask_all(line.strip())
            for name, answer in answers.items():
                named = f"{name}\t" if len(answers) > 1 else ""
                text = answer if whole else answer.replace("\\", "\\\\").replace("\n", "\\n")
                print(named + text, flush=True)
        return 0

    def _ask_all(self, text: str) -> dict[str, str]:
        """Return the answer of each set of adapters to a message alone; without adapters the model's."""
        found: dict[str, str] = {}
        for name in [name for name in self._voices if name != adapters.BASE] or [adapters.BASE]:
            self._speak_as(name)
            self._begin_anew()
            found[name] = self._ask(text, show=False)[0]
        return found

    def _compare(self, text: str) -> None:
        """Show the answers of the model and of each set of adapters to the next message; the conversation stays."""
        history, voice, answers = list(self._history), self._voice, dict[str, str]()
        try:
            for name in self._voices:
                self._speak_as(name)
                self._history = list(history)
                answers[name] = self._ask(text, show=False)[0]
        except KeyboardInterrupt:
            self._note("stopped")
        except UsageError as error:
            self._note(str(error))
        self._speak_as(voice)
        self._history = history
        print(adapters.side_by_side(answers))

    def _speak_as(self, name: str) -> None:
        """Let a set of adapters answer, or the model without any."""
        if len(self._voices) > 1:
            adapters.select(self._loaded.model, name)
        self._voice = name
        self._loaded = self._loaded._replace(tokenizer=self._voices[name])
        self._prompts = Prompts(self._loaded.model, self._loaded.tokenizer)

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
        elif command == "/adapter" and len(self._voices) > 1:
            if rest in self._voices:
                self._speak_as(rest)
            self._note(f"{self._voice} answers" if rest in self._voices else f"one of {', '.join(self._voices)}")
        elif command == "/all" and len(self._voices) > 1:
            self._compare(rest)
        elif command in ("/help", "/?"):
            self._note(_HELP + (f"; {_ADAPTERS.format(', '.join(self._voices))}" if len(self._voices) > 1 else ""))
        else:
            try:
                self._note(self._ask(line, show=True)[1])
            except UsageError as error:
                self._history.pop()
                self._note(str(error))

    def _ask(self, text: str, show: bool) -> tuple[str, str]:
        """Return the answer, and a note on its length, its speed and what ended it."""
        self._history.append({"role": "user", "content": text})
        words, received, parts, why = Words(self._loaded.tokenizer), [], [], "Ctrl-C"
        held, is_stopped = "", False
        began = time.perf_counter()
        try:
            self._interruptible = True
            prompt = self._prompts.encode(self._history)
            if self._options.debug:
                self._debug("sent", prompt)
            began = time.perf_counter()
            stream = tokens(self._loaded.model, prompt, self._prompts.stops, self._options.max_tokens, self._sampling)
            while not is_stopped:
                try:
                    token = next(stream)
                except StopIteration as end:
                    why = end.value
                    break
                received.append(token)
                if token not in self._prompts.stops:
                    text, held, is_stopped = before_stop(held + words.add(token), self._options.stop)
                    self._show(text, parts, show)
                    why = "--stop" if is_stopped else why
        except KeyboardInterrupt:
            if not show:
                raise
        finally:
            self._interruptible = False
        seconds = time.perf_counter() - began
        if not is_stopped:
            self._show("".join(before_stop(held + words.rest(), self._options.stop)[:2]), parts, show)
        if show:
            print(flush=True)
        if self._options.debug:
            self._debug("received", received)
        answer = "".join(parts)
        self._history.append({"role": "assistant", "content": answer})
        note = f"{len(received)} tokens, {len(received) / max(seconds, 1e-9):.1f} tokens/s"
        return _UNSAFE.sub("", answer), note if why == "end" else f"{note}, ended by {why}"

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
        dim = sys.stderr.isatty()
        text = "\n".join(wrapped(line, 2) for line in text.split("\n"))
        print(f"\x1b[2m{_UNSAFE.sub('', text)}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


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
