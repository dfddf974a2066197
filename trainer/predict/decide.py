"""Chooses what is ``auto`` in a configuration: ``python -m ftmon.trainer.predict.decide CONFIG [key.sub=value ...]``.

Prints the choice as a JSON object (``Decision``); with ``--init FILE`` it writes a commented configuration instead.
Exit status: 0, or 2 for wrong usage, a configuration that cannot be used, or if nothing fits.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ... import __version__
from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates.memory import beside_pytorch
from ...protocol.analysis.estimates.time import gpu_cost
from ...protocol.errors import ConfigError, FtmonError
from ...protocol.host.machine import Gpu, available_memory, find_gpu
from ...protocol.text import counted, duration, gib, sanitize, wrapped
from ..host.processes import end_with_parent
from ..recipe.config.load import Loaded, load, of_model_and_data
from ..recipe.config.schema import Config
from ..recipe.hardware import usable_gpus
from ..recipe.preflight import resolve
from ..recipe.support import TARGET_ROWS, settle_batch
from . import answer, jobs, measure, ranks
from .__main__ import Progress, allocator_settings, quietly
from .choose import LORA_RANK, Candidate, Choice, Estimate, Fit, Space, choose, fit_of, fits

_SAMPLE = 2000  # Records whose lengths are read
_LONGEST = 4096  # Largest sequence length that is chosen
_LEAST = 1024
_LENGTHS = 0.995  # Share of the records that fit a chosen sequence length
_FIT_TOKENS = 4096  # Least tokens of the first point of a fit: the loss is computed in chunks, which grow up to there
_CPU_TOKENS = 4096  # Tokens of a micro-batch on the CPU
_STAND_IN = "A100 80 GB"  # Kind whose rates order the candidates for a GPU without known rates


class Machine(NamedTuple):
    """The GPUs of a run."""

    gpu: Gpu
    number: int  # 0: none, training is on the CPU
    capacity_bytes: int  # Total memory of a GPU that this run can have
    host_bytes: int  # Memory of the host; 0: not known
    note: str = ""
    name: str = ""  # Of the GPU, if ``gpu`` stands in for it


class Data(NamedTuple):
    """Lengths of a data set, from a sample of its records."""

    records: int
    lengths: list[int]
    empty: float  # Share of the records that have no token to learn within the sequence length, or are refused
    rows: int  # Packed rows of an epoch
    padding: float  # Share of the positions that would be padding without packing
    pairs_a_token: float
    label_share: float  # Share of the tokens that carry loss


class Decision(msgspec.Struct, frozen=True):
    """What was chosen."""

    overrides: list[str]  # As ``key.sub=value``
    lines: list[str]  # The choice with its reasons, for people


class Known(msgspec.Struct, frozen=True):
    """What was chosen, and what was read of the data for it."""

    overrides: list[str]  # As ``key.sub=value``
    pairs_a_token: float | None  # None: rows are not packed
    label_share: float


class _Decided(NamedTuple):
    values: dict[str, tuple[str, str]]  # Value and reason by dotted path
    head: list[str]
    ranks: int

    def assignments(self) -> list[str]:
        return [f"{path}={value}" for path, (value, _) in self.values.items() if path in _ASSIGNED]


def known(argv: Sequence[str], tell: Callable[[str], None]) -> Known:
    """Return the choice of what is ``auto``, and what was read of the data. Raises ``ConfigError`` as ``decide``."""
    loaded, data, decided = decide(_parser().parse_args(argv), tell)
    packed = bool(loaded.config.data.packing)
    return Known(decided.assignments(), data.pairs_a_token if packed else None, data.label_share)


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write a choice; return the exit status."""
    given = _parser().parse_args(argv)
    if given.parent:
        end_with_parent(given.parent)
    if given.pair:
        words = of_model_and_data(given.config, given.overrides[0])
        given.words = [given.config, *given.overrides]
        given.config, given.overrides = words[0], [*words[1:], *given.overrides[1:]]
    try:
        if given.init and Path(given.init).exists():
            raise ConfigError(f"{given.init}: exists; give another name with --output")
        with quietly(), Progress(activity="choosing", descriptor=given.progress or 2) as tell:
            loaded, _, decided = decide(given, tell)
        if given.init:
            Path(given.init).write_text(_file(given, loaded, decided))
    except FtmonError as error:
        print(wrapped(sanitize(f"ftmon: {error}"), 2), file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(sanitize(f"ftmon: {error.filename}: cannot be written: {error.strerror}"), file=sys.stderr)
        return 2
    lines = _lines(decided)
    if given.init:
        print("\n".join(wrapped(sanitize(line), 1) for line in lines))
        print(sanitize(f"written: {given.init}; start it: ftmon train {shlex.quote(given.init)}"))
    else:
        if given.progress:
            text = "".join(f"{wrapped(sanitize(line), given.progress)}\n" for line in lines)
            with contextlib.suppress(OSError):
                os.write(given.progress, text.encode())
        print(msgspec.json.encode(Decision(decided.assignments(), lines)).decode())
    return 0


def decide(given: argparse.Namespace, tell: Callable[[str], None]) -> tuple[Loaded, Data, _Decided]:
    """Return a configuration, what was read of its data, and the values of its settings that are ``auto``.

    Raises ``ConfigError`` if the configuration or the data cannot be used, or nothing fits.
    """
    machine = _machine(given.gpus)
    loaded = load(given.config, given.overrides)
    count = loaded.config.run.ranks or given.ranks or max(1, machine.number)
    on_cpu = loaded.config.run.device == "cpu" or not machine.number
    resolve.check_hub(loaded)
    tell("reading the data")
    config = resolve.resolve(loaded, elsewhere=count).config
    data, length = _read(config, loaded)
    training = msgspec.structs.replace(config.training, sequence_length=length)
    config = msgspec.structs.replace(config, training=training)
    rows = _target_rows(config, data)
    if on_cpu:
        return loaded, data, _on_cpu(config, loaded, data, rows)
    tell("importing torch, transformers and DeepSpeed")
    environ = dict(os.environ)
    with ranks.without_gpus():
        ranks.warm([*jobs.modules(config), *jobs.compiler(config)])
        space = _space(config, loaded, machine, count, rows)
        runs = _Runs(given, loaded, space, data, tell)
        chosen = choose(space, runs.fit, runs.run)
    measured: list[str] = []
    if not given.gpus and not given.no_measure:
        words = [*given.overrides, f"training.sequence_length={space.sequence_length}"]
        ranked, measured = measure.best(
            chosen.ranked, lambda one: measure.run(given.config, [*words, *one.assignments()], environ), tell
        )
        if not ranked:
            raise ConfigError("every choice that was measured ran out of memory; is another process on the GPUs?")
        chosen = chosen._replace(ranked=ranked)
    decided = _described(chosen, space, config, data, machine, given.price)
    return loaded, data, decided._replace(head=[*decided.head, *measured])


def _machine(text: str | None) -> Machine:
    """Return the GPUs named by ``--gpus`` (``8xH100-80GB``), or this machine's.

    Raises ``ConfigError`` if the table has no such GPU, or several.
    """
    if not text:
        return _this_machine()
    count, name = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.*)", text.strip(), re.IGNORECASE).groups()  # type: ignore[union-attr]
    number = float(count or 1)
    if not name or not 1 <= number <= jobs.MOST_RANKS:
        raise ConfigError(f"--gpus: {text}: must be 1 to {jobs.MOST_RANKS:,} GPUs of a kind, such as 8xH100-80GB")
    gpu = jobs.find(name, "--gpus")
    return _rated(Machine(gpu, int(number), gpu.memory_bytes, 0), gpu.name)


def _this_machine() -> Machine:
    """Return the visible GPUs, as of the kind with the least free memory."""
    names = usable_gpus()
    if not names:
        return Machine(jobs.find(_STAND_IN), 0, 0, available_memory())
    import pynvml

    pynvml.nvmlInit()
    found: list[tuple[int, str]] = []
    for name in names:
        by_number = name.isdigit()
        handle: Any = (
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(name)
        )
        found.append((int(pynvml.nvmlDeviceGetMemoryInfo(handle).free), str(pynvml.nvmlDeviceGetName(handle))))
    pynvml.nvmlShutdown()
    free, device = min(found)
    gpu = find_gpu(device) or jobs.find(_STAND_IN)
    machine = Machine(gpu, len(names), min(free, gpu.memory_bytes if find_gpu(device) else free), available_memory())
    return _rated(machine, device)


def _rated(machine: Machine, name: str) -> Machine:
    if machine.gpu.peak_flops("bf16") and find_gpu(name):
        return machine
    note = f"no rates are known of {name}: times are those of an {_STAND_IN}"
    return machine._replace(gpu=jobs.find(_STAND_IN), note=note, name=name)


def _read(config: Config, loaded: Loaded) -> tuple[Data, int]:
    """Return the lengths of the data, and the sequence length: the given one, or one that nearly all records fit.

    Raises ``ConfigError`` if the data or the tokenizer do not fit the configuration.
    """
    from ..recipe.data import encode, pipeline
    from ..recipe.data.records import read_records
    from ..recipe.model.shape import check, positions
    from .recipe import of_rows

    given = "training.sequence_length" not in loaded.chosen
    shape, _ = check(config)
    limit = positions(shape)
    most = config.training.sequence_length if given else min(_LONGEST, limit.most if limit else _LONGEST)
    training = msgspec.structs.replace(config.training, sequence_length=most)
    config = msgspec.structs.replace(config, training=training)
    records = read_records(config)
    forms = pipeline.record_formats(records, config)
    encoder = encode.Encoder(pipeline.load_tokenizer(config, records, forms), config, forms)
    step = -(-len(records) // _SAMPLE)
    sample = [(encode.read(records, one), records.source_of(one)[0]) for one in range(0, len(records), step)]
    made = [one for one in encoder.encode(sample) if isinstance(one, list)]
    used = [document for documents in made for document in documents if document.label_tokens]
    lengths = sorted(len(document.ids) for document in used)
    if not lengths:
        raise ConfigError("data: no record of the sample holds a token to learn; 'ftmon data check' shows why")
    if not given:
        longest = lengths[min(len(lengths) - 1, round(_LENGTHS * len(lengths)))]
        most = min(most, max(_LEAST, 1 << (longest - 1).bit_length()))
    lengths = [min(one, most) for one in lengths]
    bins = pipeline.best_fit(lengths, most)
    documents = of_rows([lengths[one] for one in row] for row in bins)
    learned = sum(any(document.label_tokens for document in documents) for documents in made)
    empty = 1 - learned / len(sample)
    labels = sum(document.label_tokens for document in used) / sum(len(document.ids) for document in used)
    rows = len(bins) * step
    return Data(len(records), lengths, empty, rows, _padding(lengths), documents.pairs_a_token, labels), most


def _padding(lengths: Sequence[int]) -> float:
    """Return the share of padding in batches of 8 records in any order; ``lengths`` in rising order."""
    count = len(lengths)
    # The longest of 8 draws from n is the k-th with the chance (k / n)^8 - ((k - 1) / n)^8.
    longest = sum(one * (((k + 1) / count) ** 8 - (k / count) ** 8) for k, one in enumerate(lengths))
    return 1 - sum(lengths) / count / longest


def _target_rows(config: Config, data: Data) -> int:
    """Return the rows of a step over all ranks."""
    rows = data.rows if config.data.packing else data.records
    run = msgspec.structs.replace(config.run, ranks=1)
    training = msgspec.structs.replace(config.training, micro_batch=1, grad_accumulation="auto")
    return settle_batch(msgspec.structs.replace(config, run=run, training=training), rows).training.micro_steps


def _space(config: Config, loaded: Loaded, machine: Machine, count: int, rows: int) -> Space:
    """Return what may be chosen: all values of what is ``auto``, and the given ones of the rest."""
    chosen, training, zero = loaded.chosen, config.training, config.zero
    beside = beside_pytorch(min(count, 8), -(-count // 8), False, machine.gpu.name).value
    given = training.grad_accumulation
    lora_ranks, quantized = (0, LORA_RANK) if "lora.rank" in chosen else (config.lora.rank,), (False,)
    if config.model.quantization != "none":
        lora_ranks, quantized = (lora_ranks[-1],), (True,)
    elif "lora.rank" in chosen and "model.quantization" not in loaded.places and config.model.name:
        quantized = (False, True) if find_spec("bitsandbytes") is not None else (False,)
    return Space(
        gpu=machine.gpu,
        ranks=count,
        capacity_bytes=machine.capacity_bytes - round(beside),
        rows=rows,
        sequence_length=training.sequence_length,
        host_bytes=round(0.8 * machine.host_bytes),
        stages=() if "zero.stage" in chosen else (zero.stage,),
        checkpointing=("none", "layers")
        if "model.gradient_checkpointing" in chosen
        else (config.model.gradient_checkpointing,),
        offload=(False, True) if "zero.offload_optimizer" in chosen else (zero.offload_optimizer,),
        lora_ranks=lora_ranks,
        quantized=quantized,
        micro_batches=() if "training.micro_batch" in chosen else (training.micro_batch,),
        accumulation=0 if given == "auto" else given,
    )


class _Runs:
    def __init__(
        self, given: argparse.Namespace, loaded: Loaded, space: Space, data: Data, tell: Callable[[str], None]
    ) -> None:
        self._config, self._overrides, self._space, self._tell = given.config, given.overrides, space, tell
        self._packed = bool(loaded.config.data.packing)
        self._data = data
        self._allocator: Settings = allocator_settings()
        self._count = 0

    def _job(self, candidate: Candidate) -> jobs.Prepared:
        from .recipe import of_sample

        length = self._space.sequence_length
        words = [f"training.sequence_length={length}", *candidate.assignments()]
        arguments = argparse.Namespace(
            config=self._config,
            overrides=[*self._overrides, *words],
            ranks=self._space.ranks,
            sequence_length=[length],
            gpu=self._space.gpu.name,
            data=False,
            documents=of_sample(self._data.pairs_a_token) if self._packed else None,
            label_share=self._data.label_share,
        )
        return jobs.prepare(arguments, self._allocator)

    def fit(self, lora_rank: int, quantized: bool) -> Fit:
        """Return the pieces of a dry run with adapters of a rank (0: all weights), on a base in 4 bits or not."""
        space = self._space
        stage = space.stages[0] if space.stages else 1 if space.ranks == 1 else 2
        offload = space.offload == (True,)
        candidate = Candidate(stage, space.checkpointing[0], offload, lora_rank, 1, 8, quantized)
        self._say(candidate, "fitted to")
        length = space.sequence_length
        first = -(-_FIT_TOKENS // length)
        if self._packed:  # rows of several documents stand for several rows
            job = self._job(candidate)
            run = ranks.run(job.make, [0], [first * length, 4 * first * length])[0]
            outcomes = run.outcomes
        else:
            jobs_of = [self._job(candidate._replace(micro_batch=rows)) for rows in (first, 4 * first)]
            each = ranks.run(lambda number: jobs_of[number].make(0), [0, 1], [length])
            run, outcomes = each[0], [each[number].outcomes[0] for number in (0, 1)]
        return fit_of(candidate, run, [(first * length, outcomes[0]), (4 * first * length, outcomes[1])])

    def run(self, candidate: Candidate) -> tuple[int, float]:
        self._say(candidate, "checking")
        space = self._space
        ends = sorted({0, space.ranks - 1}) if candidate.stage in (1, 2) else None
        (point,) = answer.predict(self._job(candidate), space.capacity_bytes, only=ends).points
        assert point.step_seconds is not None
        return point.needed_bytes, point.step_seconds

    def _say(self, candidate: Candidate, what: str) -> None:
        self._count += 1
        self._tell(f"dry run {self._count}, {what} {', '.join(candidate.words())}")


_KEYS = (
    *("model.gradient_checkpointing", "model.compile", "model.quantization", "lora.rank", "data.packing"),
    *("zero.stage", "zero.offload_optimizer", "training.sequence_length", "training.micro_batch"),
    "training.grad_accumulation",
)
_ASSIGNED = tuple(key for key in _KEYS if key not in ("model.compile", "data.packing"))
"""Without those that the training itself decides, and that stay as they are."""


def _on_cpu(config: Config, loaded: Loaded, data: Data, rows: int) -> _Decided:
    """Return the settings of a training on the CPU, where no memory is predicted."""
    length, training = config.training.sequence_length, config.training
    ranks_ = max(1, config.run.ranks)
    most = max(1, min(_CPU_TOKENS // length, rows // ranks_))
    micro_batch = 1 << (most.bit_length() - 1) if "training.micro_batch" in loaded.chosen else training.micro_batch
    given = training.grad_accumulation
    accumulation = max(1, round(rows / micro_batch / ranks_)) if given == "auto" else given
    lora = config.lora.rank if "lora.rank" not in loaded.chosen else 0
    checkpointing, zero = config.model.gradient_checkpointing, config.zero
    batch = Candidate(zero.stage, checkpointing, zero.offload_optimizer, lora, micro_batch, accumulation)
    reasons = {
        "zero.stage": "on the CPU nothing is chosen by memory",
        "zero.offload_optimizer": "states are in the host's memory",
        "model.gradient_checkpointing": "all activations are kept",
        "lora.rank": "all weights are trained",
        "training.micro_batch": f"at most {_CPU_TOKENS:,} tokens at a time on the CPU",
    }
    found = _common(batch, reasons, config, data, rows, ranks_)
    found["model.compile"] = (config.model.compile, "on the CPU layers are not compiled")
    head = ["for the CPU: its memory and times are not predicted"]
    return _Decided(_ordered(found), head, ranks_)


def _ordered(found: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {key: found[key] for key in _KEYS if key in found}


def _common(
    of: Candidate, reasons: Mapping[str, str], config: Config, data: Data, rows: int, count: int
) -> dict[str, tuple[str, str]]:
    """Return values and reasons, with those that depend on the data and the batch."""
    length = config.training.sequence_length
    sequences = of.micro_batch * of.accumulation * count
    fewer = " (small data)" if rows < TARGET_ROWS else ""
    reached = sum(one >= length for one in data.lengths) / len(data.lengths)
    longest = f"{reached:.1%} reach it" if reached else f"the longest has {data.lengths[-1]:,} tokens"
    longest += f"; {data.empty:.1%} are refused, or have nothing to learn in it" if data.empty else ""
    longest += f"; {data.label_share:.0%} of the tokens carry loss" if round(data.label_share, 2) < 1 else ""
    packing = json.dumps(config.data.packing).strip('"')
    more = {
        "training.sequence_length": (str(length), f"of {counted(data.records, 'record')} {longest}"),
        "training.grad_accumulation": (
            str(of.accumulation),
            f"{of.micro_batch} x {of.accumulation} x {counted(count, 'rank')} = {counted(sequences, 'sequence')}, "
            f"{sequences * length:,} tokens{fewer}",
        ),
        "data.packing": (packing, f"{data.padding:.0%} would be padding otherwise"),
    }
    return {key: (value, reasons.get(key, "")) for key, value in of.settings().items()} | more


def _described(
    chosen: Choice, space: Space, config: Config, data: Data, machine: Machine, price: float | None
) -> _Decided:
    best = chosen.ranked[0]
    reasons = _reasons(chosen, space)
    found = _common(best.candidate, reasons, config, data, space.rows, space.ranks)
    found["model.compile"] = (config.model.compile, "where nothing excludes it: the log says")
    rows = data.rows if config.data.packing else data.records
    head = [
        f"for {space.ranks} x {machine.name or space.gpu.name}",
        f"predicted: {_figures(best, space, config, rows, price)}",
    ]
    head += [machine.note] if machine.note else []
    others = chosen.ranked[1:3]
    for other in others:
        words = ", ".join(other.candidate.words())
        head += [f"next best: {words}", f"           {_figures(other, space, config, rows, price)}"]
    return _Decided(_ordered(found), head, space.ranks)


def _figures(one: Estimate, space: Space, config: Config, rows: int, price: float | None) -> str:
    of = one.candidate
    sequences = of.micro_batch * of.accumulation * space.ranks
    steps = config.training.max_steps or max(1, round(config.training.epochs * rows / sequences))
    seconds = steps * one.step_seconds
    cost = "" if price is None else f", costs {gpu_cost(seconds, space.ranks, price):,.2f}"
    return (
        f"{gib(one.needed_bytes)} of {gib(space.capacity_bytes, 1)}{'' if one.exact else ' (fitted)'}, "
        f"{one.tokens_per_second:,.0f} tokens/s, {counted(steps, 'step')} in {duration(seconds)}{cost}"
    )


def _reasons(chosen: Choice, space: Space) -> dict[str, str]:
    best, every = chosen.ranked[0], {one.candidate: one for one in chosen.found}
    of = best.candidate

    def against(**changes: Any) -> str:
        other = every.get(of._replace(**changes))
        if other is None:
            return ""
        if not fits(other, space):
            return f"needs {gib(other.needed_bytes, 1)}; {gib(space.usable_bytes, 1)} may be used"
        longer = other.step_seconds / best.step_seconds
        if abs(longer - 1) < 0.01:
            return f"is as fast within 1%, in {gib(other.needed_bytes, 1)}"
        if longer < 1 and not other.exact:
            return f"may need {longer:.2f} times as long, which no dry run checked"
        return f"needs {longer:.2f} times as long"

    result = {
        "zero.stage": "on one GPU nothing is partitioned" if space.ranks == 1 else "the least communication",
        "zero.offload_optimizer": "the states fit the GPU",
        "model.gradient_checkpointing": "all activations fit",
        "lora.rank": "all weights fit",
        "training.micro_batch": "the fastest that fits",
    }
    if space.ranks > 1 and of.stage > 1 and (words := against(stage=of.stage - 1)):
        result["zero.stage"] = f"stage {of.stage - 1} {words}"
    elif space.ranks > 1 and of.stage < 3 and (words := against(stage=of.stage + 1)):
        result["zero.stage"] = f"stage {of.stage + 1} {words}"
    other = "none" if of.checkpointing == "layers" else "layers"
    if words := against(checkpointing=other):
        result["model.gradient_checkpointing"] = f"{other} {words}"
    if of.offload:
        result["zero.offload_optimizer"] = "nothing else holds all weights' states"
    elif of.lora_rank:
        result["zero.offload_optimizer"] = "adapters have small states"
        full = [one.needed_bytes for one in chosen.found if not one.candidate.lora_rank]
        if full:
            result["lora.rank"] = f"all weights need {gib(min(full), 1)} or more"
    if of.quantized:
        whole = [one.needed_bytes for one in chosen.found if one.candidate.lora_rank and not one.candidate.quantized]
        result["model.quantization"] = f"a base as it is needs {gib(min(whole), 1)} or more" if whole else "given"
    larger = of._replace(micro_batch=2 * of.micro_batch, accumulation=max(1, of.accumulation // 2))
    if larger in every:
        words = against(micro_batch=larger.micro_batch, accumulation=larger.accumulation)
        result["training.micro_batch"] = f"{larger.micro_batch} {words}"
    return result


def _lines(decided: _Decided) -> list[str]:
    lines = [f"chosen {decided.head[0]}"]
    values = {key: f"{key}={value}" for key, (value, _) in decided.values.items()}
    width = max(map(len, values.values()))
    lines += [f"  {values[key]:{width}}  {reason}" for key, (_, reason) in decided.values.items()]
    return [*lines, *decided.head[1:]]


def _file(given: argparse.Namespace, loaded: Loaded, decided: _Decided) -> str:
    """Return a commented configuration: what was given, and what was chosen with its reason."""
    command = shlex.join(["ftmon", "train", "--init", *given.words])
    lines = [f"# Written by ftmon {__version__}: {sanitize(command, 400)}"]
    lines += [f"# {sanitize(line, 400)}" for line in [f"Chosen {decided.head[0]}", *decided.head[1:]]]
    lines += ["# Every key: ftmon train --print-config", ""]
    values: dict[str, dict[str, tuple[str, str]]] = {}
    config = msgspec.to_builtins(loaded.config)
    for path in loaded.places:
        section, _, key = path.partition(".")
        if key and "." not in key and "[" not in key and path not in loaded.chosen:
            values.setdefault(section, {})[key] = (json.dumps(config[section][key], ensure_ascii=False), "")
    of_gpus = {"run.ranks": (str(loaded.config.run.ranks or decided.ranks), "one on each GPU")} if given.gpus else {}
    for path, value in {**decided.values, **of_gpus}.items():
        section, _, key = path.partition(".")
        values.setdefault(section, {})[key] = value
    for section, settings in values.items():
        lines.append(f"{section}:")
        for key, (value, reason) in settings.items():
            lines += [f"  # {reason}"] if reason else []
            lines.append(f"  {key}: {value}")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftmon train", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--init", metavar="FILE")
    parser.add_argument("--pair", action="store_true", help="a model and data are given in place of a configuration")
    parser.add_argument("--no-measure", action="store_true")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with that process")
    parser.add_argument("--progress", type=int, metavar="FD", help="descriptor for lines about the choice")
    parser.add_argument("--gpus")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--price", type=float)
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: on unloading, PyTorch's libraries would call the device that a dry run has installed.
    os._exit(status)
