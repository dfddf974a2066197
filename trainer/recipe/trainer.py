"""The training of one rank: the loop over steps, evaluations, checkpoints and the final model."""

import shlex
import time
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import FtmonError
from ...protocol.text import counted
from .checkpoint import manifest
from .checkpoint.manifest import Base
from .checkpoint.restore import load_weights, restore
from .checkpoint.save import Checkpoints
from .config.schema import Config
from .data.batches import Ahead, Order, WithCounts, loader
from .distributed import StopFlag, World
from .evaluation.evaluate import Evaluated, Evaluator
from .export.export import ExportError, Results, export_bytes, push_last, save_model
from .faults import FaultMaker
from .faults import parse as parse_fault
from .model import load, tokenizer
from .model.loss import Batch
from .monitor import Progress, activity, announce, probe
from .optim import optimizer
from .rehearse import Sampled, Writing, compile_first, rehearse
from .state import TrainState
from .step import ProgressLines, Stepper
from .support import learning_rate, zero_stage
from .termination import Termination


def check_skipped(skipped: int, config: Config, step: int) -> None:
    """Raise if ``training.max_skipped`` updates in a row were skipped."""
    if skipped >= config.training.max_skipped:
        raise FtmonError(
            f"after step {step} the gradients of {skipped} updates in a row overflowed (training.max_skipped); lower "
            "optimizer.lr, check the data, or use another training.precision"
        )


def refuse_nan(step: int, checkpoints: Path) -> None:
    """Raise an error about losses that are not numbers, with the checkpoint to resume from."""
    latest = checkpoints / "latest"
    kept = f"go on from {checkpoints / latest.read_text().strip()}" if latest.is_file() else "there is no checkpoint"
    raise FtmonError(
        f"the loss is not a number since before step {step} (training.stop_after_nan); {kept}, with a lower "
        "optimizer.lr or without the rows that caused it"
    )


class Resuming(NamedTuple):
    """Position from which a run resumes."""

    paths: list[Path]
    skipped: list[str]
    base: Base | None
    step: int


class Trained(NamedTuple):
    """What is trained."""

    engine: Any
    model: Any
    tokenizer: Any


class Course(NamedTuple):
    """The way from the first step to the last."""

    state: TrainState
    order: Order
    total_steps: int
    resuming: Resuming


class SaveClock:
    """Asks for a checkpoint when the last one is ``minutes`` old; rank 0's clock counts, 0: never."""

    def __init__(self, config: Config, world: World) -> None:
        saving = config.checkpoint
        self._seconds = 60 * saving.minutes if world.is_first and not saving.every else 0.0
        self._since = time.monotonic()

    def asks(self) -> bool:
        """Return whether a checkpoint is to be asked for now; once for each."""
        due = 0 < self._seconds <= time.monotonic() - self._since
        if due:
            self.saved()
        return due

    def saved(self) -> None:
        """Record a checkpoint."""
        self._since = time.monotonic()


class Trainer(Stepper):
    """A run after setup: runs steps, writes checkpoints and the final model."""

    def __init__(
        self,
        config: Config,
        world: World,
        trained: Trained,
        data: Sampled,
        course: Course,
        evaluator: Evaluator | None,
        checkpoints: Checkpoints,
    ) -> None:
        super().__init__(config, world, trained.engine)
        self.model = trained.model
        self.tokenizer = trained.tokenizer
        self.data = data
        self.state, self.order, self.total_steps, self._resuming = course
        self.evaluator = evaluator
        self.evaluated: Evaluated | None = None
        self.stopped_early = False
        self.checkpoints = checkpoints
        self.output = checkpoints.folder.parent
        self.last_loss: float | None = None  # Loss of the last step over all ranks, set at the end of the training

    def fit(self) -> None:
        """Train to the planned end or until a stop is requested, then write the final model."""
        self._report_plan()
        probe().normalise_over_ranks()
        if self.config.model.compile != "off":
            compile_first(self, self.data, self.model)
        if self.config.training.rehearsal and self._resuming.step < self.total_steps:
            steps = range(self._resuming.step + 1, self.total_steps + 1)
            rehearse(self, self.data, self.evaluator, Writing(self.checkpoints, self.state, steps, self._model_bytes()))
        if self._resuming.paths:
            self._resume()
        collate = WithCounts(self.data.collate, self.world.sequence)
        batches = loader(self.data.examples.rows, self.order, collate, self.config, pin=self.world.on_gpu)
        ahead = Ahead(iter(batches), self.world.device)
        stopped = self._steps(ahead)
        ahead.close()
        self._finish(stopped)

    def _report_plan(self) -> None:
        evaluation, saving = self.config.evaluation, self.config.checkpoint
        probe().plan(
            self.total_steps,
            self.total_steps / self.order.steps_per_epoch,
            str(self.output),
            evaluate_every=evaluation.interval if self.evaluator else 0,
            evaluate_at_end=self.evaluator is not None and evaluation.at_end,
            checkpoint_every=saving.every,
            checkpoint_at_end=saving.at_end,
            first_step=self.state.step,
        )

    def _steps(self, batches: Ahead) -> bool:
        """Train until the planned end or a stop request; return whether it was a stop request."""
        config, world, state = self.config, self.world, self.state
        lines = ProgressLines(self.total_steps, config.output.log_every, world)
        fault = parse_fault(config.debug.fault, world.size) if config.debug.fault else None
        faults = FaultMaker(fault, world, self.engine)
        flag = StopFlag(world)
        termination = Termination.of_steps()
        clock = SaveClock(config, world)
        stop = late = False
        skipped = 0

        def is_asked() -> bool:
            return probe().stop_requested() or termination.requested

        self.engine.train()
        while not self.ended and not stop:
            is_skipped = self._step(batches, faults, lines)
            termination.step()
            skipped = skipped + 1 if is_skipped else 0
            check_skipped(skipped, config, state.step)
            broken = lines.not_a_number >= config.training.stop_after_nan
            stop = flag.exchange(is_asked(), broken, clock.asks())
            late = late or flag.save
            with termination.busy():
                if flag.broken:
                    self.checkpoints.wait()
                    refuse_nan(state.step, self.output / "checkpoints")
                evaluated = None if is_skipped else self._evaluate(lines)
                if evaluated is not None:
                    # A request during the evaluation does not wait for two more steps; the ranks have just met.
                    stop = not world.all_agree(not stop and not is_asked())
                if stop:
                    termination.acknowledge()
                due = not is_skipped and (late or self._is_checkpoint_due(evaluated))
                if (stop or due) and not self._is_broken(lines):
                    self.checkpoints.save(state, evaluated.loss if evaluated is not None else None)
                    clock.saved()
                late = late and not due
        flag.finish()
        lines.flush()
        self.last_loss = lines.last_loss
        with termination.busy():
            self.checkpoints.wait()
            self.world.barrier()
        termination.close()
        return stop and not self.ended

    def _step(self, batches: Ahead, faults: FaultMaker, lines: ProgressLines) -> bool:
        state = self.state

        def fetch() -> Batch:
            faults.in_data()
            return batches.next_batch()

        faults.begin(state.step + 1)
        counts = self.order.counts(state.batches)
        result = self.train_step([fetch] * self.config.training.micro_steps, counts.label_tokens)
        state.batches += 1
        state.samples += self.order.samples_per_step
        state.tokens += counts.tokens
        state.label_tokens += counts.label_tokens
        if not result.skipped:
            state.step += 1
            lines.step(state.step, result, counts.tokens)
        return result.skipped

    def _is_checkpoint_due(self, evaluated: Evaluated | None) -> bool:
        """Return whether a checkpoint of the latest step is planned, or it has the best evaluation."""
        settings = self.config.checkpoint
        if (settings.every and self.state.step % settings.every == 0) or (settings.at_end and self.ended):
            return True
        # After the last step of a run without other checkpoints, the exported model has the best weights.
        exported = self.ended and self.config.output.save_model and not settings.every
        return evaluated is not None and evaluated.best and settings.keep_best and not exported

    @property
    def ended(self) -> bool:
        """Whether all planned steps are done, or early stopping has ended them."""
        return self.state.step >= self.total_steps or self.stopped_early

    def _is_broken(self, lines: ProgressLines) -> bool:
        """Return whether the latest printed losses are not finite: the weights must not replace a good checkpoint."""
        # Wait for all: ranks must agree, and the losses read so far depend on each rank's GPU.
        lines.flush()
        if lines.not_a_number:
            self.world.note(f"no checkpoint after step {self.state.step}: the loss is not a number")
        return lines.not_a_number > 0

    def _evaluate(self, lines: ProgressLines) -> Evaluated | None:
        evaluator, state = self.evaluator, self.state
        if evaluator is None or not evaluator.due(state.step, last=state.step == self.total_steps):
            return None
        lines.flush()
        self.evaluated = evaluator.run(state)
        lines.resume()
        self.stopped_early = evaluator.stop_early(state)
        if self.stopped_early:
            tries, best, best_step = state.evaluations_without_best, state.best_evaluation, state.best_evaluation_step
            self.world.log(f"stopped early after step {state.step}: {tries} evaluations without a new lowest loss")
            if self.world.is_first:
                probe().stopped_early(tries, best, best_step, step=state.step)
        return self.evaluated

    def _finish(self, stopped: bool) -> None:
        state, log = self.state, self.world.log
        if stopped:
            again = "resume with checkpoint.resume=" + shlex.quote(str(self.output))
            log(f"stopped on request after step {state.step} of {self.total_steps}; {again}")
            return
        if self.config.output.save_model:
            folder = self.output / "model"
            parameters = sum(1 for _ in self.model.parameters())
            best = self._best_checkpoint()
            loaded = self._load(best)
            what = self._exported(best, loaded)
            with probe().phase("checkpoint"), activity("export", what, total=parameters) as progress:
                equal = self._save_model(folder, best if loaded else None, progress)
            log(f"final model: {folder} ({equal} tensors compared with the training's); {what}")
            if self.world.is_first and not tokenizer.loads_back(self.tokenizer, folder):
                self.world.note(
                    f"for {self.model.config.model_type} AutoTokenizer makes a tokenizer of its own; load this "
                    "model's with transformers.PreTrainedTokenizerFast.from_pretrained"
                )
            if self.config.output.push:
                push_last(folder, self.config.output.push, self.world)
        log(f"finished: {state.step} steps, {state.tokens:,} tokens")

    def _best_checkpoint(self) -> Path | None:
        """Return the checkpoint of the lowest evaluation loss, here or where this run resumed from, in every rank."""
        state, found = self.state, ""
        if self.world.is_first and self.evaluator is not None and state.best_evaluation_step not in (0, state.step):
            folders = [self.checkpoints.folder, *(path.parent for path in self._resuming.paths[:1])]
            places = [folder / manifest.tag(state.best_evaluation_step) for folder in folders]
            complete = [one for one, _ in map(manifest.examine, places) if one is not None]
            same = (str(one.path) for one in complete if one.manifest.evaluation_loss == state.best_evaluation)
            found = next(same, "")
        found = self.world.share_text(found)
        return Path(found) if found else None

    def _load(self, best: Path | None) -> bool:
        """Load the best weights if they are to be exported; return whether the model has them."""
        if best is None or not self.config.output.load_best:
            return False
        with probe().phase("checkpoint"), activity("export", f"loading {best.name}"):
            return load_weights(self.engine, best, self.config, self.world)

    def _save_model(self, folder: Path, best: Path | None, progress: Progress) -> int:
        """Write the final model, of the checkpoint ``best`` or of the last step.

        An ``ExportError`` names the checkpoint that keeps the training.
        """
        checkpoints, state = self.checkpoints, self.state
        step = state.best_evaluation_step if best is not None else state.step
        try:
            if missing := checkpoints.make_room(self._model_bytes(), "the final model", step):
                raise ExportError(f"the final model cannot be written to {folder}: {missing}")
            made = (self.engine, self.model, self.tokenizer)
            return save_model(*made, self.config, folder, self.world, self._results(step), progress)
        except ExportError as error:
            if best is None and not self.world.all_agree(checkpoints.of(step) is not None):
                checkpoints.save(state)
                checkpoints.wait()
                self.world.barrier()
            kept = best or checkpoints.of(step)
            again = "to write it, resume with checkpoint.resume=" + shlex.quote(str(self.output))
            text = f"step {step:,} is in {kept}; {again}" if kept else f"step {step:,} is in no checkpoint"
            raise ExportError(f"{error}; {text}") from None

    def _model_bytes(self) -> int:
        return export_bytes(self.model, self.tokenizer, self.config) if self.config.output.save_model else 0

    def _exported(self, best: Path | None, loaded: bool) -> str:
        """Return which step's model is exported, and which has the lowest evaluation loss if that is another one."""
        state = self.state
        loss = f"the lowest evaluation loss, {state.best_evaluation:.4f}"
        if loaded:
            return f"the model of step {state.best_evaluation_step:,}, {loss}"
        words = f"the model of step {state.step:,}"
        if self.evaluator is None or state.best_evaluation_step in (0, state.step):
            return words
        words += f"; step {state.best_evaluation_step:,} has {loss}"
        return words + (f": {best}" if best is not None else ", and no checkpoint")

    def _results(self, step: int) -> Results:
        parameters = [
            (int(getattr(parameter, "ds_numel", parameter.numel())), parameter.requires_grad)
            for parameter in self.model.parameters()
        ]
        return Results(
            state=self.state,
            model_type=self.model.config.model_type,
            parameters=sum(count for count, _ in parameters),
            trained=sum(count for count, trained in parameters if trained),
            loss=self.last_loss,
            evaluation_loss=self.evaluated.loss if self.evaluated is not None else None,
            best_evaluation_loss=self.state.best_evaluation if self.evaluated is not None else None,
            step=step,
        )

    def _resume(self) -> None:
        state, world = self.state, self.world
        with probe().phase("init"):
            with optimizer.own_settings(self.engine):
                path = restore(self.engine, self._resuming.paths, state, self._resuming.base, self.config, world)
            optimizer.apply_schedule(self.engine, self.config, state.step, self.total_steps)
        probe().report(step=state.step)
        self._report_plan()
        self.order.first_step = state.batches
        world.log(f"resumed from {path} after step {state.step}")
        told = "".join(f"; skipped: {note}" for note in self._resuming.skipped)
        if state.step >= self.total_steps:
            world.note(f"training ends at step {self.total_steps}: nothing is left to train")
            told = f"; training ends at step {self.total_steps}: nothing is left to train{told}"
        with activity("resume", f"from {path.name}, after step {state.step}{told}"):
            pass
        if self.evaluator is not None and world.is_first:
            self.evaluator.report_best(state)

    def _settings(self) -> list[str]:
        """Return what has safe defaults, as it is in this run, with the key of each."""
        config, total, training, saving = self.config, self.total_steps, self.config.training, self.config.checkpoint
        warmup = optimizer.warmup_steps(config.schedule, total)
        share = f" ({config.schedule.warmup_ratio:.0%})" if config.schedule.warmup_steps == "auto" else ""
        divided = f" / {training.sequence_parallel_size}" if training.sequence_parallel_size > 1 else ""
        batch = f"{training.micro_batch} x {training.micro_steps} x {self.world.size}{divided}"
        batch += f" = {counted(self.order.samples_per_step, 'sequence')} a step"
        timed = f"checkpoint.minutes {saving.minutes:g}" if saving.minutes else "no checkpoints by time or step"
        return [
            f"training.grad_accumulation {training.micro_steps} ({batch})",
            f"optimizer.lr {learning_rate(config):g}",
            f"schedule.warmup_steps {warmup} of {total}{share}",
            f"checkpoint.every {counted(saving.every, 'step')}" if saving.every else timed,
            *(["checkpoint.resume auto"] if saving.resume == "auto" else []),
            *self._evaluation_settings(),
        ]

    def _evaluation_settings(self) -> list[str]:
        settings, output = self.config.evaluation, self.config.output
        if self.evaluator is None:
            return ["no evaluation (evaluation.share holds rows out, by default of 1,000 records or more)"]
        count, share = len(self.evaluator.examples.rows), settings.held_out
        held_out = f" held out (evaluation.share {share:g})" if share else ""
        every = f"evaluation.every {counted(settings.interval, 'step')}"
        when = every if settings.interval else "evaluation after the last step"
        best = output.load_best and output.save_model and self.config.checkpoint.keep_best
        exported = "best evaluation" if best else "last step"
        return [f"{when} on {count:,} examples{held_out}", f"the {exported} is exported"]

    def introduce(self) -> None:
        """Print a summary of the training."""
        config, world, order = self.config, self.world, self.order
        where = f"{world.size} {'GPU' if world.on_gpu else 'CPU rank'}{'s' * (world.size > 1)}"
        if world.sequence.size > 1:
            where += f", {world.sequence.size} share each sequence"
        parameters = load.count_parameters(self.model)
        world.log(
            f"{self.model.config.model_type}, {parameters:,} parameters; ZeRO-{config.zero.stage}, "
            f"{config.training.precision}, {where}; {len(self.data.examples.rows):,} examples, "
            f"{order.samples_per_step} a step, {self.total_steps} steps"
        )
        announce("settings", "; ".join(self._settings()), world.log)
        if (stage := zero_stage(config, world.size)) != config.zero.stage:
            why = "on one rank nothing is partitioned" if config.zero.stage else "its stage 0 is for fp32"
            tell = world.log if config.zero.stage else world.note
            tell(f"zero.stage is {config.zero.stage}, DeepSpeed runs its stage {stage}: {why}")
