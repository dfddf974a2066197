"""What updates do: skipped ones, weights that stand still or are not finite, gradients and edits that are lost."""

from collections.abc import Mapping
from math import isfinite
from typing import ClassVar, Literal

import msgspec

from ...messages.telemetry import Goodbye, Heartbeat, Hello, LostEdit, Step
from ...text import counted
from ..findings.finding import HIDDEN, Detector, Finding, Handler, Kind, Shown
from ..words import Words, high_rate, number

SKIPPED = 3  # updates in a row without effect, where no loss scaler looks for its scale
STILL = 50  # steps in a row without a changed weight, at a learning rate above 0
BARE = 5  # the same where no parameter of the optimizer has a gradient
ZERO = 20  # steps in a row at a learning rate of 0
APART = 600  # more than the steps that ranks take alone where they average their models now and then (DiLoCo: 500)
EVALUATING = 5  # updates in a row of a model in evaluation mode
LEFT_OUT = 100  # batches in a row without a backward
CLIPPED = 3  # steps in which gradients were seen to be clipped by mistake
_BLOCK = 8  # steps, at most, of a block at whose end a rank reads the mode of its model, unless they are read in full
EDITED = 8  # places in a script whose lost changes are told


class SkippedFacts(msgspec.Struct, frozen=True):
    """Updates without effect."""

    skipped: int  # in a row
    since_step: int
    grad_norm: float | None
    loss: float | None
    lr: float | None
    precision: str
    loss_scale: float | None = None
    batches: int = 0  # batches that were left out in a row, without an update; 0: updates were skipped


class WeightFacts(msgspec.Struct, frozen=True):
    """Weights that are not finite."""

    since_step: int
    loss: float | None  # of that step: finite
    grad_norm: float | None
    lr: float | None
    at_latest: bool = False  # seen before the next update: the loss of that one was not finite
    after_step: int = 0  # the last step whose sampled weights were finite, if some between were not looked at


class StillFacts(msgspec.Struct, frozen=True):
    """Steps that change nothing."""

    steps: int
    since_step: int
    lr: float | None
    grad_norm: float | None
    trainable: int
    parameters: int
    no_gradients: bool = False  # no parameter of the optimizer had a gradient


class PendingFacts(msgspec.Struct, frozen=True):
    """Micro-batches whose gradients are in a later update, or in none."""

    micro_batches: int
    applied: bool  # they joined the update of `step`; False: the run ended
    times: int = 1  # passes over the data with such an end, on the rank that was first
    zeroed: bool = False  # their gradients were set to zero before the update of `step`


class EditFacts(msgspec.Struct, frozen=True):
    """Parameters changed inside ``GatheredParameters``."""

    parameters: tuple[str, ...]
    count: int
    frame: str
    overwritten: bool


class ModeFacts(msgspec.Struct, frozen=True):
    """Updates of a model in evaluation mode."""

    since_step: int
    steps: int
    part: str = ""  # of the model, if the rest is in training mode
    unread: int = 0  # steps before the first in which the mode may have changed: it is read at the end of a block


class LeftOutFacts(msgspec.Struct, frozen=True):
    """Parameters that no optimizer has, or that get no gradient."""

    parameters: int
    first: str
    detached: bool = False  # an optimizer has them, and the loss does not depend on them


class RowFacts(msgspec.Struct, frozen=True):
    """Steps in a row, from the first one on."""

    steps: int
    since_step: int


class ConstantFacts(msgspec.Struct, frozen=True):
    """Steps in a row, from the first one on, with one loss."""

    steps: int
    since_step: int
    loss: float = 0.0


class ClippedFacts(msgspec.Struct, frozen=True):
    """Gradients that are clipped by mistake."""

    how: str
    since_step: int


class _Row:
    """Steps in a row for which something holds."""

    def __init__(self) -> None:
        self.count = self.since = 0

    def add(self, holds: bool, step: int) -> int:
        """Count a step; return the number of steps in a row."""
        if holds and not self.count:
            self.since = step
        self.count = self.count + 1 if holds else 0
        return self.count

    def lasts(self, step: int) -> int:
        """Return for how many steps it has held until this one, also where not each was looked at."""
        return max(self.count, step - self.since + 1) if self.count else 0


class _Rank:
    def __init__(self) -> None:
        self.skipped, self.still, self.zero, self.evaluating = _Row(), _Row(), _Row(), _Row()
        self.constant: _Row | None = _Row()
        """Steps from the first one on with one loss, and no gradient; None: another loss was seen."""
        self.zero_norm: _Row | None = _Row()  # those whose norm is 0; None: another one was seen
        self.loss: float | None = None  # the first loss
        self.zero_gradients = 0  # updates whose sampled gradients were seen to be 0
        self.last_skipped = SkippedFacts(0, 0, None, None, None, "")
        self.apart: _Row | None = _Row()  # steps from the first on without reduced gradients; None: some had them
        self.clipped, self.clipped_since = 0, 0  # steps that were seen to clip by mistake, and the first of them
        self.finite = 0  # the last step whose sampled weights were finite
        self.bare = False  # whether the optimizer had no gradient in the last step in which that was looked at
        self.part, self.mode_unread = "", 0
        """The part of the model that was in evaluation mode when the modes of parts were last looked at; steps before
        the first in evaluation mode whose mode was not read."""
        self.before: Step | None = None


def _skipped(facts: SkippedFacts, _: Finding) -> Words:
    if facts.batches:
        return Words(
            f"no batch is trained on since step {facts.since_step}: {counted(facts.batches, 'batch')} left out",
            "They were fetched in a row from the loader of the training, and no backward followed, as in a loop that "
            "continues after each loss that is not finite.",
            "Look at the loss and the weights: once a weight is NaN, every loss is. Resume from a checkpoint before "
            "that step, and end the loop after a few such batches.",
            "Updates are applied again.",
        )
    scaler = ""
    if facts.loss_scale is not None:
        scaler = " bf16 needs no loss scaler, and a lower scale does not help: make it with enabled=False."
    return Words(
        f"gradients are not finite since step {facts.since_step}: {counted(facts.skipped, 'update')} without effect",
        f"The gradient norm is {number(facts.grad_norm)} at a loss of "
        f"{number(facts.loss)} and a learning rate of {number(facts.lr)}; the weights do not change.{scaler}",
        "Lower the learning rate and resume from a checkpoint before that step; look for a square root, a logarithm or "
        "a division near 0 in the loss.",
        "Updates are applied again.",
    )


def _weights(facts: WeightFacts, _: Finding) -> Words:
    at, lower = high_rate(facts.lr)
    since = f"the update of step {facts.since_step}, or one before" if facts.at_latest else f"step {facts.since_step}"
    if facts.after_step:
        since = f"a step from {facts.after_step + 1} to {facts.since_step}"
    return Words(
        f"weights are not finite since {since}: the backward{at}",
        f"The loss of that step was still {number(facts.loss)}, at a learning rate of {number(facts.lr)}: its "
        "gradients were not finite. No later loss will be finite.",
        f"{lower}Look for an operation whose derivative is infinite (a square root or a norm at 0, a division by a "
        "masked sum); torch.autograd.set_detect_anomaly(True) names it. Resume from a checkpoint before that step.",
        "Another training has begun.",
    )


def _still(facts: StillFacts, _: Finding) -> Words:
    if not facts.lr:
        return Words(
            f"the learning rate has been 0 for {facts.steps} steps: nothing is learned",
            f"Since step {facts.since_step}.",
            "Look at the schedule: its number of steps, its warm-up, and how often it is stepped.",
            "The learning rate is above 0.",
        )
    if facts.no_gradients:
        return Words(
            f"no weight has changed for {facts.steps} steps: none of the optimizer's parameters has a gradient",
            f"Since step {facts.since_step}, at a learning rate of {number(facts.lr)}.",
            "Make the optimizer of the parameters of the model that is called, after that model was made, loaded or "
            "wrapped; look for a loss that was detached from them, or for gradients set to zero before the update.",
            "Weights change again.",
        )
    share = f" {facts.trainable:,} of {facts.parameters:,} parameters are trainable." if facts.parameters else ""
    return Words(
        f"no sampled weight has changed for {facts.steps} steps, at a learning rate of {number(facts.lr)}",
        f"Since step {facts.since_step}; gradient norm {number(facts.grad_norm)}.{share}",
        "Check that the optimizer has the parameters of this model, that they require gradients and take part in the "
        "loss, and that no gradient scaler skips each update; weights kept in bf16 round small updates away.",
        "Weights change again.",
    )


def _pending(facts: PendingFacts, finding: Finding) -> Words:
    several = counted(facts.micro_batches, "micro-batch")
    were, are = ("was", "is") if facts.micro_batches == 1 else ("were", "are")
    if facts.zeroed:
        return Words(
            f"{several} at the end of a pass over the data {were} never applied",
            f"The data ended in the middle of an accumulation, and the gradients were set to zero before step "
            f"{finding.step}." + (f" So it was in {facts.times} passes so far." if facts.times > 1 else ""),
            "Make the batches of an epoch a multiple of the accumulation, or step at the end of each epoch.",
            "Another training has begun.",
        )
    if not facts.applied:
        return Words(
            f"{several} at the end {were} never applied",
            "Gradients were computed after the last update.",
            "Step the optimizer after the last micro-batch, or drop incomplete groups.",
            "Another training has begun.",
        )
    return Words(
        f"{several} of one pass over the data {are} part of the next one's update",
        f"The data ended in the middle of an accumulation; the update of step {finding.step} mixes two epochs."
        + (f" So did {facts.times} passes so far." if facts.times > 1 else ""),
        "Make the batches of an epoch a multiple of the accumulation, or step at the end of each epoch.",
        "Another training has begun.",
    )


def _edit(facts: EditFacts, _: Finding) -> Words:
    names = ", ".join(facts.parameters[:3]) + (" ..." if facts.count > 3 else "")
    why = (
        "The next update overwrites it from the optimizer's fp32 copy."
        if facts.overwritten
        else "GatheredParameters was entered without modifier_rank, so the change is not written back."
    )
    return Words(
        f"a change of {counted(facts.count, 'parameter')} inside GatheredParameters is lost",
        f"{names} at {facts.frame}. {why}",
        "Use deepspeed.utils.safe_set_full_fp32_param, or modifier_rank before the engine is made.",
        "Another training has begun.",
    )


def _mode(facts: ModeFacts, _: Finding) -> Words:
    who = f"{facts.part}, a part of the model," if facts.part else "the model"
    return Words(
        f"{who} trains in evaluation mode since step {facts.since_step}"
        + (f", or one of the {facts.unread} before" if facts.unread else ""),
        "Dropout is off and batch statistics are frozen in these updates.",
        "Call model.train() after the evaluation, and before the first step of a model that was loaded, also as a part "
        "of another.",
        "It is in training mode again.",
    )


def _left_out(facts: LeftOutFacts, _: Finding) -> Words:
    more = f" and {counted(facts.parameters - 1, 'other parameter')}" if facts.parameters > 1 else ""
    if facts.detached:
        return Words(
            f"{facts.first}{more} get no gradient: not trained",
            "An optimizer has them, which are most of what it has, and in no update that was looked at, at the "
            "beginning and after 100 steps, had they a gradient.",
            "Look between them and the loss for detach(), torch.no_grad(), inference_mode(), .data, .item() or NumPy, "
            "and for inputs_embeds that were computed before; with gradient checkpointing above frozen embeddings "
            "call enable_input_require_grads(), or set use_reentrant=False; call requires_grad_(False) on what is not "
            "to be trained.",
            "Another training has begun.",
        )
    return Words(
        f"no optimizer updates {facts.first}{more}: not trained",
        "Gradients are computed for it, and no optimizer updates it."
        if facts.parameters == 1
        else "Gradients are computed for them, and no optimizer updates them.",
        "Make the optimizer after the model is complete (resized embeddings, adapters, a new head; layers in a "
        "ModuleList) with all that is to be trained, and step each optimizer; call requires_grad_(False) on what is "
        "not to be trained, which saves its gradients.",
        "Another training has begun.",
    )


def _apart(facts: RowFacts, _: Finding) -> Words:
    return Words(
        f"gradients have not been reduced over the ranks for {facts.steps} steps: each trains a model of its own",
        f"Since step {facts.since_step} nothing has reduced them: the model that is called has no wrapper, or each "
        "micro-batch was inside no_sync() of DistributedDataParallel; nor has the script done so by itself.",
        "Wrap the model in DistributedDataParallel, and call the wrapper, not its module; leave no_sync() out in the "
        "last micro-batch before each update.",
        "Another training has begun.",
    )


def _zero_loss(facts: ConstantFacts, _: Finding) -> Words:
    return Words(
        f"the loss has been exactly {number(facts.loss)} for {facts.steps} steps: nothing is learned",
        f"Since step {facts.since_step}. Its gradients are 0: only weight decay changes the weights.",
        "Look for a mask or a weight that is 0 everywhere, labels that are all ignored, rewards that are all equal, "
        "or pairs whose two sides are the same.",
        "The loss changes.",
    )


def _zero_norm(facts: RowFacts, _: Finding) -> Words:
    return Words(
        f"the gradient norm has been 0 for {facts.steps} steps",
        f"Since step {facts.since_step}, while the loss is not 0: what is clipped are not the gradients of the update, "
        "or the loss does not reach its parameters.",
        "Clip after the backward and before zero_grad; pass the parameters of the model that is trained as a list: a "
        "generator is empty once the optimizer has read it.",
        "The norm is above 0.",
    )


def _put_back(facts: RowFacts, _: Finding) -> Words:
    return Words(
        "weights are put back after each update: nothing is learned",
        f"Before each of the first {facts.steps} updates the sampled weights were the same, though the update before "
        "had changed them.",
        "Look for weights that are copied into the model after the update: of an average (EMA), a best or a reference "
        "model, or a checkpoint that is loaded in the loop.",
        "Another training has begun.",
    )


def _overwritten(facts: RowFacts, _: Finding) -> Words:
    return Words(
        f"weights that were set after the engine was made are lost in step {facts.since_step}",
        "Its update moved half of the sampled weights by more than 10 times the learning rate, further than Adam does: "
        "DeepSpeed made them of its fp32 copies, which were still those of the weights before.",
        "Load weights before deepspeed.initialize, or call engine.optimizer.refresh_fp32_params() after it. "
        "engine.load_checkpoint with load_optimizer_states=False does not refresh them at ZeRO stage 0; "
        "load_module_only=True does.",
        "Another training has begun.",
    )


def _unloaded(facts: RowFacts, _: Finding) -> Words:
    return Words(
        f"the weights of a checkpoint were not loaded before step {facts.since_step}",
        "load_checkpoint(load_module_only=True) returned, and the engine has the weights that it had: DeepSpeed reads "
        "those of a ZeRO-3 checkpoint with the optimizer's states.",
        "Pass load_optimizer_states=False as well. DeepSpeed then reads the newest tag, whichever was asked for.",
        "Another training has begun.",
    )


_CLIPPED = {
    "zero": (
        "gradients are clipped to a norm of 0",
        "Every update is without its gradients: only weight decay changes the weights.",
        "Pass the largest norm that is to be kept as max_norm, such as 1.0; look for a division of integers.",
    ),
    "scaled": (
        "gradients are clipped before the loss scaler divides them by its scale",
        "Their norm is the loss scale times too large, so nearly every update is made far smaller than the limit says.",
        "Call scaler.unscale_(optimizer) before the clipping.",
    ),
    "discarded": (
        "gradients are set to zero between the backward and the update",
        "Every update is without its gradients: only weight decay and momentum change the weights.",
        "Call zero_grad() after the update, or before the backward.",
    ),
    "replaced": (
        "each update has the gradients of its last micro-batch alone",
        "Those of the micro-batches before it were set to zero: the data are read, and nothing is learned from them.",
        "Call zero_grad() once after each update, not in each micro-batch of an accumulation; if the script adds the "
        "gradients up elsewhere, nothing is wrong.",
    ),
    "late": (
        "gradients are clipped after their update",
        "The clipping has no effect: the update was made before it, and the next backward is without these gradients.",
        "Clip between the backward and the update; with a loss scaler, after scaler.unscale_(optimizer).",
    ),
    "kept": (
        "gradients are not set to zero between updates",
        "Each backward adds to the gradients of the updates before it, so an update goes along all batches so far.",
        "Call optimizer.zero_grad() after each update, of the optimizer or the model that is trained.",
    ),
}


def _clipped(facts: ClippedFacts, _: Finding) -> Words:
    what, why, remedy = _CLIPPED.get(facts.how, _CLIPPED["zero"])
    return Words(f"{what} since step {facts.since_step}", why, remedy, "Another training has begun.")


class Updates(Detector):
    """Finds updates that do not do what was meant."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "updates_skipped",
            SkippedFacts,
            _skipped,
            shown={"batches": Shown("batches left out")},
            limits={
                "updates in a row, but in fp16": f"{SKIPPED}",
                "batches in a row without a backward": f"{LEFT_OUT}",
            },
        ),
        Kind("weights_not_finite", WeightFacts, _weights, shown={"at_latest": Shown("at the latest")}),
        Kind(
            "weights_unchanged",
            StillFacts,
            _still,
            shown={
                "trainable": Shown("trainable parameters"),
                "parameters": Shown("parameters"),
                "no_gradients": Shown("no gradients"),
            },
            limits={
                "steps in a row": f"{STILL}",
                "steps without a gradient": f"{BARE}",
                "steps at a learning rate of 0": f"{ZERO}",
            },
        ),
        Kind("not_in_optimizer", LeftOutFacts, _left_out, shown={"first": Shown("first"), "detached": HIDDEN}),
        *(
            Kind(name, facts, words, limits={"steps in a row, from the first one": f"{ZERO}"})
            for name, facts, words in (("zero_loss", ConstantFacts, _zero_loss), ("zero_norm", RowFacts, _zero_norm))
        ),
        Kind("gradients_apart", RowFacts, _apart, limits={"steps from the first one on": f"{APART}"}),
        Kind("weights_put_back", RowFacts, _put_back),
        Kind("weights_overwritten", RowFacts, _overwritten),
        Kind("weights_not_loaded", RowFacts, _unloaded),
        Kind("clipping", ClippedFacts, _clipped, shown={"how": HIDDEN}, limits={"steps that were seen": f"{CLIPPED}"}),
        Kind(
            "pending_micro_batches",
            PendingFacts,
            _pending,
            shown={
                "applied": Shown("applied later"),
                "times": Shown("passes"),
                "zeroed": Shown("gradients set to zero"),
            },
        ),
        Kind(
            "lost_edit",
            EditFacts,
            _edit,
            shown={"frame": Shown("at"), "overwritten": Shown("overwritten by the update")},
        ),
        Kind(
            "evaluation_mode",
            ModeFacts,
            _mode,
            shown={"part": Shown("part of the model"), "unread": Shown("steps before it that were not read")},
            limits={"updates in a row": f"{EVALUATING}"},
        ),
    )
    replays = (Hello, Step)

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._standing: dict[str, set[int]] = {}  # ranks of each finding that is raised
        self._precision = self._computes_in = ""
        self._sizes = 0, 0
        self._told: set[str] = set()  # findings that are told once
        self._edited: set[str] = set()
        self._ends: dict[str, tuple[int, int, int]] = {}
        """Rank, first step and number of updates that micro-batches of the pass before joined, or were zeroed at."""
        self._unapplied: dict[int, int] = {}  # by rank that has ended

    def handlers(self) -> Mapping[type, Handler]:
        handlers: dict[type, Handler] = {Hello: self.hello, Step: self.step, Heartbeat: self.beat}
        return handlers | {LostEdit: self.edit, Goodbye: self.goodbye}

    def hello(self, hello: Hello) -> None:
        self._precision = hello.precision or self._precision
        self._computes_in = hello.matmul_precision or self._computes_in
        self._sizes = hello.trainable_parameters, hello.parameters

    def step(self, step: Step) -> list[Finding]:
        rank = self._ranks.setdefault(step.rank, _Rank())
        signs, found = step.signs, list[Finding]()
        loss_is_finite = step.loss is None or isfinite(step.loss)
        scaled = self._precision == "fp16" or (step.loss_scale is not None and self._computes_in != "bf16")
        skipped = step.overflow and not scaled
        if rank.skipped.add(skipped, step.step) >= SKIPPED or not skipped:
            facts = rank.last_skipped = SkippedFacts(
                *(rank.skipped.count, rank.skipped.since, step.grad_norm, step.loss, step.lr, self._precision),
                step.loss_scale,
            )
            found += self._judge("updates_skipped", skipped, step, facts, rank.skipped.since, "error")
        # The weights are sampled in full steps alone.
        sampled = step.memory_every == 1 or not any(phase.coarse for phase in step.phases)
        unlabelled = signs is not None and signs.unlabelled > 0
        may_change = bool(step.lr) and not (step.overflow or unlabelled)
        still = may_change and signs is not None and signs.weights == "same"
        bare = signs is not None and signs.no_gradients
        zero = step.lr == 0
        if sampled:
            rank.still.add(still, step.step)
            rank.bare = bare
        many = rank.zero.add(zero, step.step) >= ZERO or (
            still and rank.still.lasts(step.step) >= (BARE if bare else STILL)
        )
        if many or (sampled and not (still or zero)):
            row = rank.zero if zero else rank.still
            facts = StillFacts(row.lasts(step.step), row.since, step.lr, step.grad_norm, *self._sizes, bare)
            found += self._judge("weights_unchanged", many, step, facts, row.since)
        found += self._of_constants(rank, step, unlabelled, rank.bare or zero or unlabelled)
        if sampled:
            rank.part = signs.evaluating_part if signs is not None else ""
        whole = signs is not None and signs.evaluating
        evaluating = whole or bool(rank.part)
        rank.evaluating.add(evaluating, step.step)
        if rank.evaluating.since == step.step and rank.before is not None:
            rank.mode_unread = _BLOCK - 1 if any(phase.coarse for phase in rank.before.phases) else 0
        if not evaluating or rank.evaluating.lasts(step.step) >= EVALUATING:
            row, part = rank.evaluating, "" if whole else rank.part
            facts = ModeFacts(row.since, row.lasts(step.step), part, rank.mode_unread)
            found += self._judge("evaluation_mode", evaluating, step, facts, rank.evaluating.since)
        if signs is not None and signs.weights == "nan" and loss_is_finite and not step.overflow:
            after = rank.finite if 0 < rank.finite < step.step - 1 else 0
            facts = WeightFacts(step.step, step.loss, step.grad_norm, step.lr, after_step=after)
            found += self._once("weights_not_finite", facts, step.rank, step.step, "error")
        elif sampled and (signs is None or signs.weights != "nan"):
            rank.finite = step.step
        before, rank.before = rank.before, step
        if signs is not None and signs.weights_lost and before is not None:
            facts = WeightFacts(before.step, before.loss, before.grad_norm, before.lr, at_latest=True)
            found += self._once("weights_not_finite", facts, step.rank, before.step, "error")
        if signs is not None and signs.left_out:
            facts = LeftOutFacts(signs.left_out, signs.left_out_first)
            found += self._once("not_in_optimizer", facts, step.rank, step.step, "warning")
        if signs is not None and signs.detached:
            facts = LeftOutFacts(signs.detached, signs.detached_first, detached=True)
            found += self._once("not_in_optimizer", facts, step.rank, step.step, "warning")
        if sampled and rank.apart is not None:
            # A rank without a loss may be a pipeline's.
            rank.apart = rank.apart if signs is not None and signs.apart and step.loss is not None else None
            if rank.apart is not None and rank.apart.add(True, step.step):
                facts = RowFacts(rank.apart.lasts(step.step), rank.apart.since)
                rows = [one.apart.lasts(step.step) for one in self._ranks.values() if one.apart is not None]
                if sum(row >= APART for row in rows) > 1:
                    found += self._once("gradients_apart", facts, step.rank, rank.apart.since, "error")
        if signs is not None and signs.put_back:
            found += self._once("weights_put_back", RowFacts(step.step, 1), step.rank, 1, "warning")
        if signs is not None and signs.overwritten and not self._edited:
            facts = RowFacts(1, step.step)
            found += self._once("weights_overwritten", facts, step.rank, step.step, "error")
        if signs is not None and signs.unloaded:
            found += self._once("weights_not_loaded", RowFacts(1, step.step), step.rank, step.step, "error")
        if signs is not None and signs.clipped and not (signs.clipped == "late" and not step.grad_norm):
            rank.clipped, rank.clipped_since = rank.clipped + 1, rank.clipped_since or step.step
            if rank.clipped >= CLIPPED:
                clipped = ClippedFacts(signs.clipped, rank.clipped_since)
                found += self._once("clipping", clipped, step.rank, rank.clipped_since, "warning")
        if signs is not None and signs.pending:
            found += self._end_of_pass(step, signs.pending, "joined")
        if signs is not None and signs.dropped:
            found += self._end_of_pass(step, signs.dropped, "dropped")
        return found

    def _of_constants(self, rank: _Rank, step: Step, unlabelled: bool, explained: bool) -> list[Finding]:
        """Judge a norm, and a loss, that are the same from the first step on; ``explained``: others say why."""
        found, loss, norm = list[Finding](), step.loss, step.grad_norm
        if (row := rank.zero_norm) is not None and norm is not None:
            holds = norm == 0 and bool(loss) and not explained
            if row.add(holds, step.step) >= ZERO or not holds:
                found += self._judge("zero_norm", holds, step, RowFacts(row.count, row.since), row.since)
            rank.zero_norm = None if norm else row
        rank.zero_gradients += step.signs is not None and step.signs.zero_gradients
        if (row := rank.constant) is not None and loss is not None:
            rank.loss = loss if rank.loss is None else rank.loss
            same = loss == rank.loss and not norm
            holds = same and not unlabelled and (norm is None or not loss)
            known = norm == 0 or rank.zero_gradients >= CLIPPED
            if (row.add(holds, step.step) >= ZERO and known) or not holds:
                facts = ConstantFacts(row.count, row.since, rank.loss)
                found += self._judge("zero_loss", holds, step, facts, row.since)
            rank.constant = row if same else None
        return found

    def _end_of_pass(self, step: Step, micro_batches: int, how: str) -> list[Finding]:
        """Count the ends of passes on the rank that was first."""
        rank, first, times = self._ends.get(how, (step.rank, step.step, 0))
        if rank != step.rank:
            return []
        self._ends[how] = rank, first, times + 1
        facts = PendingFacts(micro_batches, how == "joined", times + 1, how == "dropped")
        state = "updated" if times else "raised"
        return [Finding("pending_micro_batches", facts, state, "info", (rank,), how, first)]

    def beat(self, beat: Heartbeat) -> list[Finding]:
        """Process a heartbeat, which tells how many batches were left out since the last step."""
        rank = self._ranks.get(beat.rank)
        if rank is None or rank.before is None or beat.left_out < LEFT_OUT:
            return []
        since, none = rank.before.step, (None, None, None, "", None)
        facts = rank.last_skipped = SkippedFacts(0, since, *none, batches=beat.left_out)
        return self._judge("updates_skipped", True, beat, facts, since, "error")

    def edit(self, edit: LostEdit) -> list[Finding]:
        facts = EditFacts(tuple(edit.parameters), edit.count, edit.where, edit.overwritten)
        if len(self._edited) >= EDITED or edit.where in self._edited:
            return []
        self._edited.add(edit.where)
        return [Finding("lost_edit", facts, "raised", "warning", (edit.rank,), edit.where, edit.step)]

    def goodbye(self, goodbye: Goodbye) -> list[Finding]:
        found: list[Finding] = []
        if goodbye.rank in self._standing.get("updates_skipped", ()):
            facts = self._ranks[goodbye.rank].last_skipped
            ranks = tuple(sorted(self._standing["updates_skipped"]))
            found.append(Finding("updates_skipped", facts, "updated", "error", ranks, step=facts.since_step))
        if not goodbye.pending or goodbye.reason != "finished":
            return found
        self._unapplied[goodbye.rank] = goodbye.pending
        state = "raised" if len(self._unapplied) == 1 else "updated"
        facts, ranks = PendingFacts(max(self._unapplied.values()), applied=False), tuple(sorted(self._unapplied))
        return [*found, Finding("pending_micro_batches", facts, state, "warning", ranks, "never", goodbye.step)]

    def _judge(
        self,
        kind: str,
        holds: bool,
        step: Step | Heartbeat,
        facts: msgspec.Struct,
        since: int,
        severity: Literal["warning", "error"] = "warning",
    ) -> list[Finding]:
        """Raise a finding for the first rank and each further one; resolve it with the last."""
        ranks = self._standing.setdefault(kind, set())
        if holds == (step.rank in ranks):
            return []
        ranks ^= {step.rank}
        return [Finding(kind, facts, "raised" if ranks else "resolved", severity, tuple(sorted(ranks)), step=since)]

    def _once(
        self, kind: str, facts: msgspec.Struct, rank: int, step: int, severity: Literal["info", "warning", "error"]
    ) -> list[Finding]:
        """Raise a finding the first time that one rank has it."""
        if kind in self._told:
            return []
        self._told.add(kind)
        return [Finding(kind, facts, "raised", severity, (rank,), step=step)]
