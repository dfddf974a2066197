"""Writes checkpoints: a folder is complete or missing, and errors do not affect the training."""

import contextlib
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..config.schema import Config
from ..engine.distributed import World
from ..monitor import activity, probe
from ..optim import support
from ..state import TrainState
from . import folder as folders
from . import identity, manifest
from .manifest import Base, File, Manifest
from .writer import Writer

DESCRIPTION = "huggingface"
"""Folder in a checkpoint with the model's configuration and tokenizer, so that it can be loaded without its run."""
RANDOM = "random-{}.pt"
"""State of a rank's random generators."""
_POLL_SECONDS = 0.05


class Checkpoints:
    """Writes the checkpoints of a run. All ranks make one, and call its methods together.

    Each rank writes its files into ``step-N.part``, in a thread if they fit into host memory a second time. When all
    ranks have reported their files, rank 0 writes the manifest, renames the folder, updates ``latest`` and removes the
    oldest checkpoint.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        config: Config,
        world: World,
        folder: Path,
        base: Base | None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._world = world
        self._folder = folder
        self._base = base
        self._writer = Writer(world.local_size)
        engine.checkpoint_engine = self._writer
        # DeepSpeed writes its copy of zero_to_fp32.py without the checkpoint engine.
        copy_script = engine._copy_recovery_script
        engine._copy_recovery_script = lambda path: self._writer.attempt(lambda: copy_script(path))
        self._description = describe(engine.module, tokenizer, config) if world.is_first else {}
        # Reports use the process group's key-value store, which works when a disk does not.
        self._store: Any = dist.distributed_c10d.PrefixStore(
            "ftmon-checkpoint", dist.distributed_c10d._get_default_store()
        )
        self._serial = 0
        self._thread: threading.Thread | None = None
        self._said = False
        if world.is_first:
            folders.remove_unfinished(folder)

    def save(self, state: TrainState, evaluation_loss: float | None = None) -> None:
        """Write a checkpoint, in the background if possible; wait for the previous one first."""
        self.wait()
        began = time.time()
        self._serial += 1
        part = self._folder / (folders.tag(state.step) + ".part")
        writer = self._writer
        with probe().phase("checkpoint"), activity("checkpoint", folders.tag(state.step)):
            writer.begin(part, self._config.checkpoint.background)
            self._save(part, state)
            if self._config.checkpoint.background and writer.in_foreground and not self._said:
                self._said = True
                self._world.log(f"note: checkpoints are not written in the background: {writer.in_foreground}")
        content = Manifest(
            time=0.0,
            state=msgspec.structs.replace(state),
            zero_stage=self._config.zero.stage,
            precision=self._config.training.precision,
            parameters=identity.shapes(self._engine.module),
            trained=identity.trained(self._engine.module),
            files={},
            base=self._base,
            optimizer=support.states(self._config),
            evaluation_loss=evaluation_loss,
        )
        arguments = (self._serial, part, content, began)
        if self._config.checkpoint.background:
            self._thread = threading.Thread(target=self._finish, args=arguments, name="ftmon-checkpoint", daemon=True)
            self._thread.start()
        else:
            with probe().phase("checkpoint"), activity("checkpoint", folders.tag(state.step)):
                self._finish(*arguments)

    def measure(self, state: TrainState) -> int:
        """Return the size of a checkpoint on disk in bytes, over all ranks; nothing is written."""
        self._writer.measure()
        self._save(self._folder / folders.TRIAL, state)
        total = torch.tensor([self._writer.bytes + sum(map(len, self._description.values()))])
        dist.all_reduce(total, group=self._world.host_group)
        return int(total)

    def try_out(self, state: TrainState) -> tuple[str, int]:
        """Write a checkpoint as ``save`` does, read it back, compare it and delete it.

        Returns:
            The error of some rank, or an empty text; and the number of compared tensors of all ranks.
        """
        self.wait()
        part, writer = self._folder / folders.TRIAL, self._writer
        existed = self._folder.exists()
        try:
            with probe().phase("checkpoint"):
                writer.begin(part, self._config.checkpoint.background, read_back=True)
                self._save(part, state)
                writer.write_waiting()
            compared = torch.tensor([writer.compared])
            dist.all_reduce(compared, group=self._world.host_group)
            return self._world.first_text(writer.error), int(compared)
        finally:
            if self._world.is_first:
                # DeepSpeed leaves a script beside it.
                shutil.rmtree(part if existed else self._folder, ignore_errors=True)

    def _save(self, part: Path, state: TrainState) -> None:
        """Pass the contents of a checkpoint to the writer."""
        writer = self._writer
        if self._world.is_first:
            writer.attempt(lambda: shutil.rmtree(part, ignore_errors=True))
            writer.makedirs(part, exist_ok=True)
        self._world.barrier()
        writer.save(random_state(self._world), part / RANDOM.format(self._world.rank))
        for name, data in self._description.items():
            writer.write_bytes(data, part / DESCRIPTION / name)
        self._engine.save_checkpoint(
            str(self._folder),
            tag=part.name,
            client_state={"ftmon": msgspec.to_builtins(state)},
            save_latest=False,
            exclude_frozen_parameters=self._base is not None,
        )

    @property
    def folder(self) -> Path:
        """The folder that checkpoints are written to."""
        return self._folder

    def of(self, step: int) -> Path | None:
        """Return the complete checkpoint of a step, or None."""
        path = self._folder / folders.tag(step)
        return path if folders.examine(path)[0] is not None else None

    def wait(self) -> None:
        """Wait until the checkpoint under way is complete or has failed."""
        if self._thread is not None:
            with probe().phase("checkpoint"), activity("checkpoint", "waiting for the disk"):
                self._thread.join()
            self._thread = None

    def _finish(self, serial: int, part: Path, content: Manifest, began: float) -> None:
        """Write this rank's files; rank 0 completes the checkpoint once all ranks have written theirs."""
        writer = self._writer
        writer.write_waiting()
        report = {
            "error": writer.error,
            "files": {name: msgspec.to_builtins(one) for name, one in writer.files.items()},
        }
        self._store.set(f"{serial}/{self._world.rank}", json.dumps(report))
        if not self._world.is_first:
            return
        files: dict[str, File] = {}
        errors: list[str] = []
        for rank in range(self._world.size):
            key = f"{serial}/{rank}"
            while not self._store.check([key]):
                time.sleep(_POLL_SECONDS)
            told = json.loads(self._store.get(key))
            self._store.delete_key(key)
            if told["error"]:
                errors.append(f"rank {rank}: {told['error']}")
            files |= msgspec.convert(told["files"], dict[str, File])
        try:
            if errors:
                raise OSError(None, errors[0])
            path = self._complete(part, content, files)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            self._failed(part, error.strerror or str(error), content.state.step)
            return
        self._report(path, content, began)

    def _complete(self, part: Path, content: Manifest, files: dict[str, File]) -> Path:
        for path in part.rglob("*"):
            name = path.relative_to(part).as_posix()
            if path.is_file() and name not in files:  # files that DeepSpeed copied itself, such as zero_to_fp32.py
                files[name] = File(path.stat().st_size)
        path = part.with_suffix("")
        manifest.write(part, msgspec.structs.replace(content, files=files, time=time.time()))
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():  # a run that resumed from an earlier step passes this one again
            path.rename(old)
        part.rename(path)
        manifest.sync_folder(self._folder)
        manifest.write_durably(self._folder / folders.LATEST, path.name.encode())
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):
            folders.prune(self._folder, self._config.checkpoint.keep, self._config.checkpoint.keep_best)
        return path

    def _report(self, path: Path, content: Manifest, began: float) -> None:
        best = folders.lowest(folders.complete(self._folder)[0])
        size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        is_best = content.evaluation_loss is not None and best is not None and best.path == path
        self._world.log(f"checkpoint: {path}")
        seconds = time.time() - began
        probe().checkpoint(str(path), size=size, seconds=seconds, best=is_best, step=content.state.step)

    def report_failure(self, path: Path, why: str, step: int) -> folders.Found | None:
        """Report a checkpoint that could not be written (rank 0); return the newest complete one."""
        kept = next(iter(folders.complete(self._folder)[0]), None)
        probe().checkpoint_failed(str(path), why, kept=str(kept.path) if kept is not None else "", step=step)
        return kept

    def _failed(self, part: Path, why: str, step: int) -> None:
        kept = self.report_failure(part.with_suffix(""), why, step)
        newest = f"the newest is {kept.path.name}" if kept is not None else "there is none"
        self._world.log(f"note: checkpoint {part.stem} could not be written: {why}; training continues, and {newest}")


def describe(model: Any, tokenizer: Any, config: Config) -> dict[str, bytes]:
    """Return the files that describe a model and its tokenizer in Hugging Face's format, by name."""
    with tempfile.TemporaryDirectory() as folder:
        plain = model.get_base_model() if config.lora.rank else model
        plain.config.save_pretrained(folder)
        if plain.generation_config is not None:
            plain.generation_config.save_pretrained(folder)
        if config.lora.rank:
            model.peft_config["default"].save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def random_state(world: World) -> dict[str, torch.Tensor]:
    """Return the state of this rank's generators, on the CPU and on its GPU."""
    state = {"cpu": torch.get_rng_state()}
    if world.on_gpu:
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state
