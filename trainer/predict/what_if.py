"""Predicts what else fits a GPU by further dry runs: remedies, the largest lengths, steps of a data set."""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates import ranking
from ...protocol.analysis.estimates.ranking import Need, Option, Ranked, largest_that_fit, rank
from ...protocol.analysis.estimates.time import combined, step_time
from ...protocol.errors import ConfigError, FtmonError
from ...protocol.host.machine import FIT_TABLE
from ...protocol.text import counted
from ..recipe.config.schema import Config
from ..recipe.data import pipeline
from ..recipe.data.batches import Order, padded_length
from ..recipe.data.encode import Encoder
from ..recipe.data.pipeline import Examples
from ..recipe.data.records import Records, read_records
from ..recipe.preflight.consistency import uncompiled
from ..recipe.support import SMALL_STATES, settle_batch, state_bytes, zero_stage
from . import answer, choose, deepspeed_file, jobs, ranks
from .answer import Both
from .deepspeed_file import KEEPS_GATHERED, LIVE_PARAMETERS
from .jobs import Prepared
from .ranks import RankRun
from .result import DataRisk, Holds, Point, Prediction, RiskyStep, WhatIf

Tell = Callable[[str], None]  # Called with each activity before it begins
Runs = list[RankRun]  # Dry runs of a change with ``ranks.DEPTHS`` of its layers, or one with all of them


class RunChange(NamedTuple):
    """A change of the run."""

    name: str
    change: str  # The setting to change
    prepare: Callable[[], Prepared]
    combines: bool  # Whether it may be combined with others, because it does not change the training
    changes: tuple[str, ...] = ()  # The assignments or flags behind ``change``


_EXPANDABLE = "expandable segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def expandable(allocator: Settings) -> Settings | None:
    """Return the allocator's settings with expandable segments; None if it has them."""
    return None if allocator.expandable_segments else msgspec.structs.replace(allocator, expandable_segments=True)


Calls = dict[str, Callable[[], Runs]]  # Dry runs of changes by their names


class Further(NamedTuple):
    """Dry runs of the changes that the unchanged run's parts do not show."""

    uncompiled: Calls  # To make beside it; they need not wait until the compiler is imported
    beside: Calls
    after: Calls  # To make after it in its process, with layers that it has compiled


def further(arguments: argparse.Namespace, allocator: Settings, job: Prepared, capacity: int) -> Further:
    """Return the further dry runs of a table; those beside the unchanged one begin with the longest.

    Where layers are alike in both runs, of few of them; else whole ones, where all ranks are like the first: their
    parts show other changes, too.
    """
    found = Further({}, {}, {})
    shown = [job]
    length = max(job.lengths)
    for change in remedies(_at(arguments, length), allocator) if job.config is not None else ():
        with contextlib.suppress(FtmonError):
            other = change.prepare()
            if any(_by_parts(other, one) is not None for one in shown):
                continue
            calls = found.uncompiled if not jobs.compiler(other.config) else found.beside
            calls = found.after if _compiles_alike(other, job) else calls
            if job.make_shallow is not None and other.make_shallow is not None:
                calls[change.name] = partial(ranks.shallow, other.make_shallow, length, 0)
            elif other.different == [0]:
                calls[change.name] = partial(ranks.whole, other.make, length, capacity, 0)
                shown.append(other)
    return Further(dict(reversed(found.uncompiled.items())), dict(reversed(found.beside.items())), found.after)


def _compiles_alike(job: Prepared, unchanged: Prepared) -> bool:
    """Return whether a changed run compiles the same layers for the same batch as the unchanged one.

    Only in ``BF16_Optimizer``: under ZeRO-3 a run after another one in its process gathers in another order.
    """
    of: list[Any] = []
    for one in (job, unchanged):
        if one.config is None or not one.alike or not jobs.compiler(one.config):
            return False
        of.append((one.config.lora, one.config.model.quantization, one.micro_batch, one.lengths[-1]))
    return of[0] == of[1]


def _at(arguments: argparse.Namespace, length: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(arguments), "sequence_length": [length]})


def table(
    arguments: argparse.Namespace,
    allocator: Settings,
    both: Both,
    capacity_bytes: int,
    tell: Tell,
    beside: Iterable[Callable[[Tell], dict[str, Runs]]] = (),
) -> list[WhatIf]:
    """Return the table of all changes, predicted at the longest length, the fastest that fits first.

    ``both.other`` has expandable segments. What the parts of the unchanged run or the dry runs ``beside`` and after it
    (``further``) show has no other dry run (``_Pieces``). Changes that leave the training as it is are combined if none
    of them fits alone. ``tell`` is called with the name of each change before its dry run, and of those whose runs are
    waited for.
    """
    base = both.found
    point = max(base.points, key=lambda one: one.sequence_length)
    given = _at(arguments, point.sequence_length)
    found: dict[str, _Found] = {}
    known = list(remedies(given, allocator))
    job = jobs.prepare(given, allocator)
    made = dict(both.after)
    for results in beside:
        made |= results(lambda names: tell(f"what if: {names}"))
    pieces = _Pieces(job, both, point, capacity_bytes, made)

    def add(changes: Sequence[RunChange]) -> None:
        def began(name: str, number: int, count: int) -> None:
            tell(f"what if: {name} ({number} of {count} dry runs)")

        results = _options(changes, arguments.price, capacity_bytes, pieces, began)
        found.update(zip((change.name for change in changes), results, strict=True))

    if both.other is not None:
        found[_EXPANDABLE[0]] = _Found(_of(both.other, job, *_EXPANDABLE), both.other)
    add(known)
    as_it_is = _of(base, job, "as it is", "")
    ranked = rank(as_it_is, [one.option for one in found.values()], capacity_bytes)
    best = [remedy for one in ranked for remedy in known if remedy.name == one.option.name and remedy.combines]
    best = [remedy for remedy in best if not found[remedy.name].option.refused][:3]
    for count in (2, 3):
        if len(best) < count or any(one.fits for one in ranked):
            break
        together = joined(given, allocator, best[:count])
        if together is not None:
            add([together])
            ranked = rank(as_it_is, [one.option for one in found.values()], capacity_bytes)
    return [_row(one, found[one.option.name]) for one in ranked]


class _Found(NamedTuple):
    option: Option
    predicted: Prediction | None = None  # None: it was refused
    fitted: bool = False


_UNSURE = 0.08  # Share of the capacity around which a fitted need does not decide: fitted needs were up to 6 % off
_UNSURE_OF_FEW = 0.15  # The same of needs fitted to a few layers: some were 12 % too low


class _Pieces:
    """What the parts of the unchanged run show about changes: the estimates of a choice, relative to its own."""

    def __init__(
        self, job: Prepared, both: Both, point: Point, capacity_bytes: int, beside: Mapping[str, Runs]
    ) -> None:
        self.rank = max(point.ranks, key=lambda one: one.needed_bytes).rank  # The rank that needs most
        self._job, self._base, self._point = job, both.found, point
        self._capacity = capacity_bytes
        self._beside = beside
        run = both.runs[ranks.nearest(both.runs, self.rank)]
        self._outcome = next(one for one in run.outcomes if one.sequence_length == point.sequence_length)
        self._run = run

    def fitted(self, name: str, job: Prepared, price: float | None) -> Prediction | None:
        """Return the prediction of a changed run, from its parts; None if it needs a dry run."""
        config, before = job.config, self._job.config
        if config is None or before is None or not self._point.step_seconds or self._run.made is None:
            return None
        if len(self._beside.get(name, [])) > 1:
            return self._with_layers(job, config, before, self._beside[name], price)
        both = _by_parts(job, self._job)
        if both is None:
            return None
        own, candidate = both
        length = self._point.sequence_length
        fit = choose.fit_of(own, self._run, [(own.micro_batch * length, self._outcome)])
        if _held(config) != _held(before):
            released = _held(config)[1]
            return None if released and not choose.gathers_again(fit) else self._with_held(job, config, fit, price)
        fit = msgspec.structs.replace(fit, state_bytes=state_bytes(before))
        changed = msgspec.structs.replace(fit, state_bytes=state_bytes(config))
        space = choose.Space(job.gpu, job.ranks, self._capacity, 0, length)
        more = choose.allocated_bytes(changed, candidate, space) - choose.allocated_bytes(fit, own, space)
        host = 0
        if candidate.offload != own.offload:
            sign = 1 if candidate.offload else -1
            host = sign * choose.offloaded_bytes(fit, candidate, space) * space.hosts // job.ranks
        times = [choose.estimate(fit, each, space).step_seconds for each in (own, candidate)]
        return self._answer(job, self._point.needed_bytes + more, host, times[1] / times[0], price)

    def run(self, name: str, job: Prepared, price: float | None) -> Both | None:
        """Return the prediction from a changed run's whole dry run beside the unchanged one; None: there was none."""
        runs = self._beside.get(name, [])
        return answer.of_one_rank(job, runs[0], self._capacity, price) if len(runs) == 1 else None

    def of(self, job: Prepared, both: Both) -> "_Pieces":
        return _Pieces(job, both, both.found.points[0], self._capacity, {})

    def _with_held(self, job: Prepared, config: Config, fit: choose.Fit, price: float | None) -> Prediction | None:
        """Return the prediction of a run whose parameters are on the host, or not kept gathered."""
        changed = choose.with_parameters(fit, job.ranks, *_held(config))
        space = choose.Space(job.gpu, job.ranks, self._capacity, 0, self._point.sequence_length)
        before, after = choose.highest_bytes(fit), choose.highest_bytes(changed)
        share = fit.weight_bytes * fit.parameters / job.ranks
        gathered = max(1.0, before[1] - share), max(0.0, after[1] - (0 if config.zero.offload_parameters else share))
        # Gathered parameters, which are freed in another order than all else, fragment memory.
        fragmented = (self._point.needed_bytes - before[0]) * min(1.0, gathered[1] / gathered[0])
        times = [choose.estimate(one, fit.run, space).step_seconds for one in (fit, changed)]
        on_host = 2 * fit.weight_bytes * fit.parameters // job.ranks if config.zero.offload_parameters else 0
        return self._answer(job, after[0] + fragmented, on_host, times[1] / times[0], price)

    def _with_layers(
        self, job: Prepared, config: Config, before: Config, runs: Runs, price: float | None
    ) -> Prediction | None:
        """Return the prediction of a run from those with few of its layers; None if its layers are not alike."""
        made = self._run.made
        assert made is not None
        beyond = Fraction(made.layers - ranks.DEPTHS[1], ranks.DEPTHS[1] - ranks.DEPTHS[0])

        def whole(of: Callable[[RankRun], float]) -> float:
            few, more = map(of, runs)
            return float(more + beyond * (Fraction(more) - Fraction(few)))

        def frozen(run: RankRun, of: Config) -> int:
            return run.parameters - (run.trainable if of.lora.rank else 0)

        own = _candidate(self._job, before)
        fit = choose.fit_of(own, self._run, [(own.micro_batch * self._point.sequence_length, self._outcome)])
        many = own.stage == 3 and self._run.parameters > LIVE_PARAMETERS
        if whole(lambda run: frozen(run, config)) != frozen(self._run, before) or choose.gathers_again(fit) != many:
            return None
        kept = choose.gathered_bytes(made.weight_bytes, self._run, self._outcome.rank, job.ranks) if many else {}
        peaks = {
            phase: whole(lambda run, phase=phase: run.outcomes[0].rank.phases[phase].allocated_peak_bytes)
            + kept.get(phase, 0)
            for phase in runs[0].outcomes[0].rank.phases
        }
        highest, last = max(peaks.values()), runs[1].outcomes[0].rank
        fragmented = (self._point.needed_bytes / self._outcome.rank.allocated_peak_bytes - 1) * highest
        if config.lora.rank != before.lora.rank:  # in which less is allocated, and as much may be lost
            fragmented = max(fragmented, last.needed_bytes - last.allocated_peak_bytes)
        works = [run.outcomes[0].work for run in runs]
        work = combined([(works[1], 1 + beyond), (works[0], -beyond)])
        seconds = step_time(work, job.gpu, -(-job.ranks // 8)).total.value
        host = round(whole(lambda run: run.outcomes[0].rank.host_bytes)) - self._point.host_bytes // job.ranks
        slower = seconds / (self._point.step_seconds or 1.0)
        return self._answer(job, highest + fragmented, host, slower, price, _UNSURE_OF_FEW)

    def _answer(
        self,
        job: Prepared,
        needed: float,
        more_on_host: int,
        slower: float,
        price: float | None,
        unsure: float = _UNSURE,
    ) -> Prediction | None:
        """Return the prediction with these figures; None if the needed memory is near the capacity."""
        needed_bytes = round(needed)
        if abs(needed_bytes - self._capacity) < unsure * self._capacity:
            return None
        host = max(0, self._point.host_bytes // job.ranks + more_on_host)
        of = msgspec.structs.replace(self._point.ranks[self.rank], needed_bytes=needed_bytes, host_bytes=host)
        seconds = (self._point.step_seconds or 0.0) * slower
        point = msgspec.structs.replace(
            self._point, micro_batch=job.micro_batch, ranks=[of], needed_bytes=needed_bytes, step_seconds=seconds
        )
        return msgspec.structs.replace(self._base, points=[answer.with_run(point, job, price)])


def _by_parts(job: Prepared, unchanged: Prepared) -> tuple[choose.Candidate, choose.Candidate] | None:
    """Return the unchanged and a changed run, if the parts of the first show the second; None if they do not."""
    config, before = job.config, unchanged.config
    if config is None or before is None:
        return None
    own, candidate = _candidate(unchanged, before), _candidate(job, config)
    recomputed = own.checkpointing, candidate.checkpointing
    changes = recomputed[0] == recomputed[1] or recomputed == ("none", "layers")
    partitioned = own.stage and candidate.stage and job.ranks > 1
    if _apart(config) != _apart(before) or not changes or not (partitioned or candidate.stage == own.stage):
        return None
    small = [one.optimizer.kind in SMALL_STATES for one in (config, before)]
    if own.stage == candidate.stage == 1 and job.ranks > 1 and small[0] != small[1]:
        return None  # gradients are reduced in another way (``recipe/engine.py``, ``LateStep``)
    if _held(config) != _held(before):
        alike = candidate == own and state_bytes(config) == state_bytes(before)
        # Recomputed layers fragment memory by a tenth, and in another way.
        return (own, candidate) if alike and own.checkpointing == "none" and not any(_held(before)) else None
    return own, candidate


def _candidate(job: Prepared, config: Config) -> choose.Candidate:
    held = config.model.quantization != "none"
    recomputed = config.model.gradient_checkpointing
    batch = job.micro_batch, job.accumulation
    return choose.Candidate(job.stage, recomputed, job.offload, config.lora.rank, *batch, held)


def _apart(config: Config) -> Config:
    """Return a configuration without what a candidate and the bytes of its states say."""
    replace = msgspec.structs.replace
    return replace(
        config,
        zero=replace(config.zero, stage=1, offload_optimizer=False, offload_parameters=False),
        training=replace(config.training, micro_batch=1, grad_accumulation=1),
        model=replace(config.model, gradient_checkpointing="none"),
        optimizer=replace(config.optimizer, kind="auto"),
        deepspeed=_split(config)[0],
    )


def _held(config: Config) -> tuple[bool, bool]:
    """Return whether ZeRO-3's parameters are on the host, and whether none are kept gathered."""
    return config.zero.offload_parameters, _split(config)[1] == dict.fromkeys(KEEPS_GATHERED, 0)


def _split(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a configuration's section for DeepSpeed without the keys that keep parameters gathered, and these."""
    zero: dict[str, Any] = dict(config.deepspeed.get("zero_optimization", {}))
    kept = {key: zero.pop(key) for key in KEEPS_GATHERED if key in zero}
    rest = {key: value for key, value in config.deepspeed.items() if key != "zero_optimization"}
    return rest | ({"zero_optimization": zero} if zero else {}), kept


def _options(
    changes: Sequence[RunChange],
    price: float | None,
    capacity: int,
    pieces: _Pieces,
    tell: Callable[[str, int, int], None],
) -> list[_Found]:
    """Fit each change, or predict one rank of it, the one that needs most in the unchanged run."""
    found: dict[str, _Found] = {}
    prepared: dict[str, Prepared] = {}
    shown = [pieces]

    def refuse(change: RunChange, error: FtmonError) -> None:
        found[change.name] = _Found(Option(change.name, 0, 0.0, change=change.change, refused=str(error)))

    for change in changes:
        try:
            job = change.prepare()
        except FtmonError as error:
            refuse(change, error)
            continue
        known = next(filter(None, (one.fitted(change.name, job, price) for one in shown)), None)
        fitted = known is not None
        if known is None and (both := pieces.run(change.name, job, price)) is not None:
            shown.append(pieces.of(job, both))
            known = both.found
        if known is None:
            prepared[change.name] = job
        else:
            found[change.name] = _Found(_of(known, job, change.name, change.change), known, fitted)
    waiting = [change for change in changes if change.name in prepared]

    def began(number: int) -> None:
        tell(waiting[number].name, number + 1, len(waiting))

    results = answer.predict_each(list(prepared.values()), capacity, price, pieces.rank, began)
    for change, result in zip(waiting, results, strict=True):
        if isinstance(result, Prediction):
            found[change.name] = _Found(_of(result, prepared[change.name], change.name, change.change), result)
        else:
            refuse(change, result)
    return [found[change.name] for change in changes]


def _of(predicted: Prediction, job: Prepared, name: str, change: str) -> Option:
    point = max(predicted.points, key=lambda one: one.sequence_length)
    samples = job.micro_batch * job.accumulation * job.data_ranks
    host = max(rank.host_bytes for rank in point.ranks)
    return Option(name, point.needed_bytes, point.step_seconds or 0.0, samples, job.ranks, host, change)


def _row(one: Ranked, found: _Found) -> WhatIf:
    option, needed, saved, slower, price = one.option, 0, 0, 0.0, None
    if found.predicted:
        point = max(found.predicted.points, key=lambda each: each.sequence_length)
        needed, price = point.needed_bytes, point.price_per_million_tokens
        saved, slower = one.saved_bytes, one.slower
    memory, seconds = (needed, saved, option.host_bytes), option.step_seconds
    return WhatIf(option.name, option.change, one.fits, *memory, seconds, slower, price, option.refused, found.fitted)


def remedies(given: argparse.Namespace, allocator: Settings) -> Iterator[RunChange]:
    """Yield the changes of its settings that this run does not have yet."""
    kinds = _assignments(given) if given.config else _flags(given)
    yield from (_remedy(given, allocator, *kind) for kind in kinds)


def joined(given: argparse.Namespace, allocator: Settings, parts: list[RunChange]) -> RunChange | None:
    """Return changes combined as one; None if two of them set the same key."""
    changes = tuple(change for part in parts for change in part.changes)
    keys = [change.partition("=")[0] for change in changes]
    if len(set(keys)) < len(keys):
        return None
    return _remedy(given, allocator, " + ".join(part.name for part in parts), changes, False)


def _remedy(
    given: argparse.Namespace, allocator: Settings, name: str, changes: tuple[str, ...], combines: bool
) -> RunChange:
    arguments = changed(given, changes)
    if not getattr(given, "command", None):
        shown = (change.removesuffix("=true") if change.startswith("--") else change for change in changes)
        return RunChange(name, " ".join(shown), lambda: jobs.prepare(arguments, allocator), combines, changes)
    from . import script

    def prepare() -> Prepared:
        if refused := script.refusal(changes, given.script_inputs):
            raise ConfigError(refused)
        return jobs.prepare(arguments, allocator)

    return RunChange(name, script.words(changes, given.script_inputs), prepare, combines, changes)


def changed(given: argparse.Namespace, changes: tuple[str, ...]) -> argparse.Namespace:
    """Return the arguments with changes.

    Changes are assignments to a configuration's keys; without a configuration, flags and keys of DeepSpeed's file.
    """
    arguments = argparse.Namespace(**vars(given))
    if given.config:
        arguments.overrides = [*given.overrides, *changes]
    else:
        pairs = [change.split("=", 1) for change in changes]
        arguments.changes = {key: json.loads(value) for key, value in pairs if not key.startswith("--")}
        for key, value in pairs:
            if key.startswith("--"):
                setattr(arguments, key.removeprefix("--").replace("-", "_"), json.loads(value))
    return arguments


_GATHERED = "nothing kept gathered"
Kind = tuple[str, tuple[str, ...], bool]  # A remedy's name, its changes, and whether it may be combined with others


def _assignments(given: argparse.Namespace) -> Iterator[Kind]:
    """Yield remedies for a configuration of ftmon's own trainer, as assignments."""
    from . import recipe

    config = recipe.read(given.config, given.overrides, given.ranks, given.sequence_length)
    config = settle_batch(config, getattr(given, "rows", 0))
    training, zero, optimizer = config.training, config.zero, config.optimizer
    yield from _faster(config)
    if config.model.gradient_checkpointing == "none":
        yield "selective checkpointing", ("model.gradient_checkpointing=selective",), False
    if config.model.gradient_checkpointing != "layers":
        yield "checkpointing", ("model.gradient_checkpointing=layers",), True
    if config.model.fused_loss == "off":
        yield "fused loss", ("model.fused_loss=auto",), True
    half = training.micro_batch // 2
    if half and not training.micro_batch % half:
        accumulation = training.micro_steps * (training.micro_batch // half)  # the batch of a step is the same
        changes = (f"training.micro_batch={half}", f"training.grad_accumulation={accumulation}")
        yield f"micro-batch {half}", changes, True
    for stage in range(zero_stage(config, config.run.ranks) + 1, 4) if config.run.ranks > 1 else ():
        yield f"ZeRO {stage}", (f"zero.stage={stage}",), stage == 3
    if not zero.offload_optimizer and zero.stage:
        yield "optimizer offload", ("zero.offload_optimizer=true",), True
    if zero.stage == 3 and not zero.offload_parameters:
        yield "parameter offload", ("zero.offload_parameters=true",), True
    if zero.stage == 3:
        yield _GATHERED, tuple(f"deepspeed.zero_optimization.{key}=0" for key in KEEPS_GATHERED), True
    if optimizer.kind in ("auto", "deepspeed", "torch", "torch_foreach", "torch_fused"):
        yield "optimizer in bf16", ("optimizer.kind=adamw_bf16",), False
        yield "optimizer in 8 bit", ("optimizer.kind=adamw_8bit",), False
    if not config.lora.rank:
        yield "LoRA of rank 16", ("lora.rank=16",), False
    if config.model.quantization == "none" and config.model.name and zero.stage < 3:
        adapters = () if config.lora.rank else ("lora.rank=16",)
        yield "QLoRA" if config.lora.rank else "QLoRA of rank 16", (*adapters, "model.quantization=nf4"), False


def _faster(config: Config) -> Iterator[Kind]:
    """Yield changes that spend memory on speed, without changing the batch of a step."""
    training, zero = config.training, config.zero
    if training.micro_steps % 2 == 0:
        changes = (
            f"training.micro_batch={2 * training.micro_batch}",
            f"training.grad_accumulation={training.micro_steps // 2}",
        )
        yield f"micro-batch {2 * training.micro_batch}", changes, False
    if config.model.gradient_checkpointing != "none":
        yield "no checkpointing", ("model.gradient_checkpointing=none",), False
    if config.model.compile == "off" and not uncompiled(config):
        yield "compiled layers", ("model.compile=layers",), False
    if zero.offload_optimizer or zero.offload_parameters:
        yield "no offload", ("zero.offload_optimizer=false", "zero.offload_parameters=false"), False
    stage = zero_stage(config, config.run.ranks)
    for lower in range(1, stage) if config.run.ranks > 1 and not zero.offload_parameters else ():
        yield f"ZeRO {lower}", (f"zero.stage={lower}",), False


def _flags(given: argparse.Namespace) -> Iterator[Kind]:
    """Yield remedies for the user's own script, as flags and keys of DeepSpeed's file."""
    command = getattr(given, "command", None)
    if command:
        job = jobs.prepare(given, Settings())
        settings, ranks = given.script_inputs.deepspeed, job.ranks
    else:
        settings, _ = jobs.deepspeed(given)
        ranks = given.ranks or 1
    stage = deepspeed_file.stage(settings)
    batch = deepspeed_file.batch(settings, ranks, given.micro_batch, given.accumulation)
    offload = json.dumps({"device": "cpu", "pin_memory": True})
    if not given.checkpointing and not (command and given.script_inputs.checkpointing):
        yield "checkpointing", ("--checkpointing=true",), True
    if batch.micro > 1 and batch.micro % 2 == 0:
        half, accumulation = batch.micro // 2, batch.accumulation * 2
        yield f"micro-batch {half}", (f"--micro-batch={half}", f"--accumulation={accumulation}"), True
    for higher in range(stage + 1, 4) if ranks > 1 else ():
        yield f"ZeRO {higher}", (f"zero_optimization.stage={higher}",), higher == 3
    if not deepspeed_file.offloads(settings) and stage:
        yield "optimizer offload", (f"zero_optimization.offload_optimizer={offload}",), True
    if stage == 3 and not deepspeed_file.offloads(settings, "param"):
        yield "parameter offload", (f"zero_optimization.offload_param={offload}",), True
    if stage == 3:
        yield _GATHERED, tuple(f"zero_optimization.{key}=0" for key in KEEPS_GATHERED), True
    if settings.get("optimizer", {}).get("params", {}).get("torch_adam"):
        yield "compiled optimizer", ("optimizer.params.torch_adam=false",), True
    if not given.lora_rank and not command:
        yield "LoRA of rank 16", ("--lora-rank=16",), False


CONFIRMED = (0.99, 0.97, 0.95)  # Shares of a fitting length that must fit, too: memory grows unevenly with the length
_MOST_TOKENS = 1 << 24  # Maximum tokens of a micro-batch
_MOST_POSITIONS = 1 << 20  # Maximum length if a model's own is not known
_MOST_ROWS = 1024

Run = Callable[[list[int]], dict[int, Point]]  # Predicts values of one axis


def add(found: Prediction, job: Prepared, arguments: argparse.Namespace, allocator: Settings, tell: Tell) -> Prediction:
    """Return a prediction with the largest lengths and micro-batches that fit, and the curves over both.

    If ranks differ, only those are run that need most at one of the points. ``found`` and ``job`` are of the unchanged
    run; a capacity in ``arguments`` replaces the kinds of GPU; ``tell`` is called before each round. Raises
    ``ConfigError`` if a dry run was refused.
    """
    longest = max(found.points, key=lambda point: point.sequence_length)
    highest = {max(point.ranks, key=lambda rank: rank.needed_bytes).rank for point in found.points}
    run = job.different
    only = sorted({ranks.nearest(run, rank) for rank in highest})
    given = argparse.Namespace(**{**vars(arguments), "sequence_length": [longest.sequence_length]})

    def lengths(values: list[int]) -> dict[int, Point]:
        tell(f"the largest sequence length: {_candidates(values)}")
        points = answer.predict(job._replace(lengths=values), arguments.capacity, only=only).points
        return {point.sequence_length: point for point in points}

    def micro_batches(values: list[int]) -> dict[int, Point]:
        points: dict[int, Point] = {}
        for number, rows in enumerate(values, 1):
            tell(f"the largest micro-batch: candidate {rows:,} ({number} of {len(values)} in this round)")
            changes = (f"--micro-batch={rows}", f"--accumulation={job.accumulation}")
            if arguments.config:
                changes = (f"training.micro_batch={rows}", "training.total_batch=0")
            other = jobs.prepare(changed(given, changes), allocator)
            (points[rows],) = answer.predict(other, arguments.capacity, only=only).points
        return points

    positions = min(found.positions or _MOST_POSITIONS, _MOST_TOKENS // job.micro_batch)
    rows = min(_MOST_ROWS, max(1, _MOST_TOKENS // longest.sequence_length))
    by_length = {point.sequence_length: point for point in found.points}
    by_rows = {job.micro_batch: longest}
    kinds = _kinds(job, arguments.capacity)
    long = _search(ranking.round_numbers(positions, job.sequence_parallel_size), kinds, lengths, by_length, CONFIRMED)
    wide = _search(range(1, rows + 1), kinds, micro_batches, by_rows)
    largest = [Holds(*kind, length, batch) for kind, length, batch in zip(kinds, long, wide, strict=True)]
    curves = {"pieces": answer.curve(by_length), "batch_pieces": answer.curve(by_rows)}
    return msgspec.structs.replace(found, largest=largest, **curves)


def _candidates(values: Sequence[int]) -> str:
    shown = ", ".join(f"{value:,}" for value in values[:4])
    return f"{counted(len(values), 'candidate')} ({shown}{', ...' if len(values) > 4 else ''})"


def _kinds(job: Prepared, capacity: int | None) -> list[tuple[str, int]]:
    """Return the kinds of GPU, and the limit of PyTorch's reserved memory on each."""
    if capacity is not None:
        return [("", capacity)]
    return [(gpu.title, gpu.memory_bytes - round(answer.beside(job, gpu).value)) for gpu in FIT_TABLE]


def _search(
    values: Sequence[int],
    kinds: list[tuple[str, int]],
    run: Run,
    points: dict[int, Point],
    confirm: Sequence[float] = (),
) -> list[ranking.Largest]:
    """Search one axis; ``points`` has the known points, and receives the new ones."""
    capacities = [capacity for _, capacity in kinds]

    def needs(asked: list[int]) -> list[ranking.Need]:
        new = [value for value in asked if value not in points]
        points.update(run(new) if new else {})
        needed = [points[value].needed_bytes for value in asked]
        return [ranking.Need(one, [one <= capacity for capacity in capacities]) for one in needed]

    return ranking.largest_that_fit(values, capacities, needs, confirm)


_MOST_NAMED = 3


def steps_an_epoch(config: Config, examples: Examples) -> int:
    """Return the optimizer steps of an epoch; ``ConfigError``: there are fewer examples than one step needs."""
    return Order(examples, settle_batch(config, len(examples.rows)), 0, _data_ranks(config)).steps_per_epoch


def _data_ranks(config: Config) -> int:
    return config.run.ranks // config.training.sequence_parallel_size


def read(config: Config) -> tuple[Records, Examples]:
    """Return a configuration's records and training examples.

    Raises ``ConfigError`` if the data or the tokenizer do not fit the configuration.
    """
    records = read_records(config)
    forms = pipeline.record_formats(records, config)
    tokenizer = pipeline.load_tokenizer(config, records, forms)
    folder = pipeline.encode(records, Encoder(tokenizer, config, forms), tokenizer, config)
    return records, pipeline.examples(folder, records, config)


def find(
    config: Config, records: Records, examples: Examples, capacity: int, run: Callable[[list[int]], Sequence[Need]]
) -> DataRisk:
    """Return the steps of the first epoch that do not fit; ``run`` predicts whether lengths, in rising order, fit.

    Memory grows with the length of a micro-batch, so the occurring lengths are searched for the largest that fits.
    Raises ``ConfigError`` from ``run``, or there are fewer examples than one step needs.
    """
    steps = _steps(config, examples)
    lengths = sorted({step.length for step in steps})
    largest = largest_that_fit(lengths, [capacity], run)[0].value
    failing = [step for step in steps if largest is None or step.length > largest]

    def named(step: RiskyStep) -> RiskyStep:
        places = [", ".join(records.place(one) for one in examples.rows.records(row)) for row in step.rows]
        return msgspec.structs.replace(step, places=places)

    longest = named(max(steps, key=lambda step: step.length))
    return DataRisk(len(steps), longest, largest, len(failing), [named(step) for step in failing[:_MOST_NAMED]])


def _steps(config: Config, examples: Examples) -> list[RiskyStep]:
    """Return the longest micro-batch of each optimizer step of the first epoch, of all ranks, without its places."""
    training, ranks = settle_batch(config, len(examples.rows)).training, _data_ranks(config)
    found: list[RiskyStep] = []
    settled = msgspec.structs.replace(config, training=training)
    orders = [iter(Order(examples, settled, rank, ranks)) for rank in range(ranks)]
    for step in range(1, steps_an_epoch(config, examples) + 1):
        batches = [(rank, next(order)) for _ in range(training.micro_steps) for rank, order in enumerate(orders)]
        lengths = [max(int(examples.tokens[row]) for row in rows) for _, rows in batches]
        longest = max(range(len(batches)), key=lambda number: lengths[number])
        rank, rows = batches[longest]
        limit = training.sequence_length
        length = limit if config.data.packing else padded_length(lengths[longest], limit)
        found.append(RiskyStep(step, rank * training.sequence_parallel_size, rows, [], length))
    if not found:
        raise ConfigError("data: an epoch has no step")
    return found
