"""Writes checkpoints: a folder is complete or missing, and errors do not affect the training."""

import contextlib
import copy
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map

from ....protocol.errors import FtmonError
from ....protocol.host.machine import available_memory
from ....protocol.text import duration
from .. import support
from ..config.schema import Config
from ..distributed import World
from ..monitor import activity, probe
from ..state import TrainState
from . import manifest, space
from .manifest import Base, File, Manifest

_MARGIN = 1.25  # Free host memory that a copy needs, as a multiple of its size


class Writer(TorchCheckpointEngine):
    """Collects or writes the files that DeepSpeed saves, in place of its checkpoint engine; errors are recorded.

    An exception in DeepSpeed's engine would leave the other ranks in a collective. ``local_ranks`` are those on this
    host, which copy at the same time.
    """

    def __init__(self, local_ranks: int) -> None:
        super().__init__()
        self._local_ranks = local_ranks
        self._waiting: list[tuple[Path, Any]] = []
        self._folder = Path()
        self._background = False
        self._measuring = self._sampling = False
        self.bytes = 0  # Bytes of the tensors of this checkpoint
        self.compared = 0  # Number of tensors that were read back and are equal
        self.files: dict[str, File] = {}  # Written files, by path within the checkpoint
        self.error = ""  # The first error, after which nothing more is written; empty without one
        self.in_foreground = ""
        """Reason why a file was written at once instead of in the background; empty without one."""

    def begin(self, folder: Path, background: bool, sample: bool = False) -> None:
        """Start a new checkpoint in ``folder``.

        With ``sample`` files have only the beginnings of their tensors, are written at once, read back and compared;
        then each is extended to its full size.
        """
        self._folder, self._background, self._sampling = folder, background and not sample, sample
        self._waiting, self.files, self.error, self.in_foreground = [], {}, "", ""
        self._measuring, self.bytes, self.compared = False, 0, 0

    def measure(self) -> None:
        """Until the next ``begin``, count the bytes to be saved instead of writing them."""
        self.begin(Path(), background=False)
        self._measuring = True

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a folder."""
        self.attempt(lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: Any) -> None:
        """Write a file, or copy its content to host memory for ``write_waiting``."""
        size = tensor_bytes(state_dict)
        self.bytes += size
        if self.error or self._measuring:
            return
        if self._background:
            needed = int(size * self._local_ranks * _MARGIN)
            free = available_memory()
            if needed <= free:
                self.attempt(lambda: self._waiting.append((Path(path), host_copy(state_dict, {}))))
                return
            self.in_foreground = (
                f"a copy needs {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} are free"
            )
        write = self._try_write if self._sampling else self._write
        self.attempt(lambda: write(state_dict, Path(path)))

    def write_bytes(self, content: bytes, path: Path) -> None:
        """Write a small file."""

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            self.files[path.relative_to(self._folder).as_posix()] = File(len(content), zlib.crc32(content))

        self.attempt(write)

    def write_waiting(self) -> None:
        """Write the copied files; any thread."""
        waiting, self._waiting = self._waiting, []
        while waiting and not self.error:
            path, content = waiting.pop(0)
            self.attempt(lambda path=path, content=content: self._write(content, path))

    def _write(self, content: Any, path: Path) -> File:
        with path.open("wb") as file:
            summed: Any = _Summed(file)
            torch.save(content, summed)
            file.flush()
            os.fsync(file.fileno())
        written = File(summed.bytes, summed.crc32)
        self.files[path.relative_to(self._folder).as_posix()] = written
        return written

    def _try_write(self, content: Any, path: Path) -> None:
        """Write a sample of a file's content, compare what is read back, and reserve the file's size on the disk."""
        part = sample(content)
        written = self._write(part, path)
        with path.open("rb") as file:  # from the disk, not from the page cache, if the file system allows it
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if manifest.checksum(path) != written.crc32:
            raise ValueError(f"{path.name} was not read back as it was written: its checksum differs")
        problem, compared = difference(torch.load(path, map_location="cpu", weights_only=False), part, path.name)
        if problem:
            raise ValueError(f"{problem} was not read back as it was written")
        self.compared += compared
        space.reserve(path, max(written.bytes, tensor_bytes(content)))

    def attempt(self, action: Callable[[], object]) -> None:
        """Run an action unless one has failed for this checkpoint; record its error."""
        if self.error or self._measuring:
            return
        try:
            action()
        except Exception as error:  # OSError, or RuntimeError of PyTorch's writer around one
            cause: BaseException = error
            while not isinstance(cause, OSError) and (inner := cause.__cause__ or cause.__context__) is not None:
                cause = inner
            text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause).strip() or repr(cause)
            self.error = text.splitlines()[0]


class _Summed:
    """A file that counts and checksums the bytes written to it, in order."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        self._file.flush()


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    return sum(one.numel() * one.element_size() for one in tree_leaves(value) if isinstance(one, torch.Tensor))


_SAMPLE_BYTES = 16 << 20  # Bytes of a file's tensors that a rehearsal writes
_SAMPLE_ELEMENTS = 64  # Elements that it writes of each tensor at least


def sample(value: Any) -> Any:
    """Return nested containers with the beginnings of their tensors, flat, about ``_SAMPLE_BYTES`` together."""
    count = sum(isinstance(one, torch.Tensor) for one in tree_leaves(value))

    def begin(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        most = max(_SAMPLE_ELEMENTS, _SAMPLE_BYTES // (count * one.element_size()))
        # A copy: a view would be written with all of its storage.
        return (one.detach() if one.numel() <= most else one.detach().reshape(-1)[:most]).clone()

    return tree_map(begin, value)


def difference(found: Any, wanted: Any, name: str) -> tuple[str, int]:
    """Return the place of the first difference of nested containers, tensors bit by bit, and the equal tensors' number.

    The place is empty without a difference.
    """
    leaves, shape = tree_flatten_with_path(wanted)
    others, other_shape = tree_flatten(found)
    if shape != other_shape:
        return name, 0
    compared = 0
    for (path, one), other in zip(leaves, others, strict=True):
        if isinstance(one, torch.Tensor):
            alike = isinstance(other, torch.Tensor) and (other.dtype, other.shape) == (one.dtype, one.shape)
            same = alike and torch.equal(_bits(other), _bits(one))
            compared += same
        else:
            same = not isinstance(one, int | float | str | bytes | None) or repr(other) == repr(one)
        if not same:
            return f"{name}{keystr(path)}", compared
    return "", compared


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def host_copy(value: Any, seen: dict[Any, torch.Tensor]) -> Any:
    """Return a copy in host memory that later training steps do not change; a shared tensor stays shared."""
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
        if key not in seen or not value.numel():
            seen[key] = value.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(value, dict):
        made = copy.copy(value)
        for name, inner in value.items():
            made[name] = host_copy(inner, seen)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(host_copy(inner, seen) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(host_copy(inner, seen) for inner in value)
    try:
        return copy.deepcopy(value)
    except Exception:  # locks, handles: they cannot be saved either, and fail there
        return value


DESCRIPTION = "huggingface"
"""Folder in a checkpoint with the model's configuration and tokenizer, so that it can be loaded without its run."""
RANDOM = "random-{}.pt"  # State of a rank's random generators
_POLL_SECONDS = 0.05


class Checkpoints:
    """Writes the checkpoints of a run. All ranks make one, and call its methods together.

    Each rank writes its files into ``step-N.part``, in a thread if they fit into host memory a second time. When all
    ranks have reported their files, rank 0 writes the manifest, renames the folder, updates ``latest`` and removes the
    oldest checkpoint.
    """

    def __init__(
        self, engine: Any, tokenizer: Any, config: Config, world: World, folder: Path, base: Base | None
    ) -> None:
        self._engine = engine
        self._config = config
        self._world = world
        self.folder = folder
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
        self._bytes = 0  # Size of a checkpoint, known to rank 0 once one was measured or written; 0 before
        self._serial = 0
        self._thread: threading.Thread | None = None
        self._said = False
        if world.is_first:
            manifest.remove_unfinished(folder)

    def save(self, state: TrainState, evaluation_loss: float | None = None) -> None:
        """Write a checkpoint, in the background if possible; wait for the previous one first.

        If the disk has too little space, the oldest ones are removed first, but one stays; a failure is reported.
        """
        self.wait()
        began = time.time()
        part = self.folder / (manifest.tag(state.step) + ".part")
        writer = self._writer
        if problem := self.make_room(self._bytes, part.stem):
            if self._world.is_first:
                self._failed(part, problem, state.step)
            return
        self._serial += 1
        with probe().phase("checkpoint"), activity("checkpoint", manifest.tag(state.step)):
            writer.begin(part, self._config.checkpoint.background)
            self._save(part, state)
            if self._config.checkpoint.background and writer.in_foreground and not self._said:
                self._said = True
                self._world.note(f"checkpoints are not written in the background: {writer.in_foreground}")
        content = Manifest(
            time=0.0,
            state=msgspec.structs.replace(state),
            zero_stage=support.zero_stage(self._config, self._world.size),
            precision=self._config.training.precision,
            parameters=shapes(self._engine.module),
            trained=trained(self._engine.module),
            files={},
            base=self._base,
            optimizer=support.states(self._config),
            evaluation_loss=evaluation_loss,
            settings=manifest.identity(self._config),
        )
        arguments = (self._serial, part, content, began)
        if self._config.checkpoint.background:
            self._thread = threading.Thread(target=self._finish, args=arguments, name="ftmon-checkpoint", daemon=True)
            self._thread.start()
        else:
            with probe().phase("checkpoint"), activity("checkpoint", manifest.tag(state.step)):
                self._finish(*arguments)

    def make_room(self, needed: int, what: str, step: int | None = None) -> str:
        """Remove the oldest checkpoints until ``needed`` bytes are free (rank 0's count); return what is missing.

        All ranks call this. The best one stays, and that of ``step``; without either the newest does.
        """
        problem = ""
        if self._world.is_first and needed:
            found, _ = manifest.complete(self.folder)
            best = manifest.lowest(found) if self._config.checkpoint.keep_best else None
            kept = {best.path} if best is not None else set[Path]()
            newest = {one.path for one in found[:1] if not kept}
            kept |= newest if step is None else {self.folder / manifest.tag(step)}
            gone: list[str] = []
            with contextlib.suppress(OSError):  # what cannot be asked or removed fails in the write, which reports it
                gone, problem = space.make_room(self.folder, needed, kept)
            if gone:
                names = ", ".join(gone)
                self._world.note(f"{names} removed to make room for {what}: the disk of {self.folder} is short")
        return self._world.share_text(problem)

    def measure(self, state: TrainState) -> int:
        """Return the size of a checkpoint on disk in bytes, over all ranks; nothing is written."""
        self._writer.measure()
        self._save(self.folder / manifest.TRIAL, state)
        total = torch.tensor([self._writer.bytes + sum(map(len, self._description.values()))])
        dist.all_reduce(total, group=self._world.host_group)
        self._bytes = int(total)
        return self._bytes

    def try_out(self, state: TrainState) -> tuple[str, int]:
        """Write a sample of each file of a checkpoint, read it back, compare it, reserve its size and delete it.

        Return the error of some rank, or an empty text, and the number of compared tensors of all ranks.
        """
        self.wait()
        part, writer = self.folder / manifest.TRIAL, self._writer
        existed = self.folder.exists()
        try:
            with probe().phase("checkpoint"):
                writer.begin(part, background=False, sample=True)
                self._save(part, state)
            compared = torch.tensor([writer.compared])
            dist.all_reduce(compared, group=self._world.host_group)
            return self._world.first_text(writer.error), int(compared)
        finally:
            if self._world.is_first:
                # DeepSpeed leaves a script beside it.
                shutil.rmtree(part if existed else self.folder, ignore_errors=True)

    def _save(self, part: Path, state: TrainState) -> None:
        writer = self._writer
        if self._world.is_first:
            writer.attempt(lambda: shutil.rmtree(part, ignore_errors=True))
            writer.makedirs(part, exist_ok=True)
        self._world.barrier()
        writer.save(random_state(self._world), part / RANDOM.format(self._world.rank))
        for name, data in self._description.items():
            writer.write_bytes(data, part / DESCRIPTION / name)
        self._engine.save_checkpoint(
            str(self.folder),
            tag=part.name,
            client_state={"ftmon": msgspec.to_builtins(state)},
            save_latest=False,
            exclude_frozen_parameters=self._base is not None,
        )

    def of(self, step: int) -> Path | None:
        """Return the complete checkpoint of a step, or None."""
        path = self.folder / manifest.tag(step)
        return path if manifest.examine(path)[0] is not None else None

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
        report = {"error": writer.error, "files": msgspec.to_builtins(writer.files), "bytes": writer.bytes}
        self._store.set(f"{serial}/{self._world.rank}", json.dumps(report))
        if not self._world.is_first:
            return
        files: dict[str, File] = {}
        errors: list[str] = []
        size = 0
        for rank in range(self._world.size):
            key = f"{serial}/{rank}"
            while not self._store.check([key]):
                time.sleep(_POLL_SECONDS)
            told = json.loads(self._store.get(key))
            self._store.delete_key(key)
            size += told["bytes"]
            if told["error"]:
                errors.append(f"rank {rank}: {told['error']}")
            files |= msgspec.convert(told["files"], dict[str, File])
        self._bytes = max(self._bytes, size)
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
        support.replace_folder(path, part)  # a run that resumed from an earlier step passes this one again
        manifest.sync_folder(self.folder)
        manifest.write_durably(self.folder / manifest.LATEST, path.name.encode())
        with contextlib.suppress(OSError):
            manifest.prune(self.folder, self._config.checkpoint.keep, self._config.checkpoint.keep_best)
        return path

    def _report(self, path: Path, content: Manifest, began: float) -> None:
        best = manifest.lowest(manifest.complete(self.folder)[0])
        size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        is_best = content.evaluation_loss is not None and best is not None and best.path == path
        self._world.log(f"checkpoint: {path}")
        seconds = time.time() - began
        probe().checkpoint(str(path), size=size, seconds=seconds, best=is_best, step=content.state.step)

    def report_failure(self, path: Path, why: str, step: int) -> manifest.Found | None:
        """Report a checkpoint that could not be written (rank 0); return the newest complete one."""
        kept = next(iter(manifest.complete(self.folder)[0]), None)
        probe().checkpoint_failed(str(path), why, kept=str(kept.path) if kept is not None else "", step=step)
        return kept

    def _failed(self, part: Path, why: str, step: int) -> None:
        kept = self.report_failure(part.with_suffix(""), why, step)
        newest = f"the newest is {kept.path.name}" if kept is not None else "there is none"
        self._world.note(f"checkpoint {part.stem} could not be written: {why}; training continues, and {newest}")


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


def shapes(model: Any) -> dict[str, list[int]]:
    """Return the full shape of every parameter by name, partitioned or not."""
    return {name: list(getattr(one, "ds_shape", one.shape)) for name, one in model.named_parameters()}


def trained(model: Any) -> list[str]:
    """List the names of the parameters that are trained."""
    return [name for name, one in model.named_parameters() if one.requires_grad]


_PIECE = 1 << 24  # Elements summed at once: 128 MiB as 64-bit integers
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base_of(model: Any, config: Config, world: World) -> Base | None:
    """Return the identity of the frozen weights under adapters; None if all weights are trained. All ranks call this.

    Contents are summed as integers, whose sum does not depend on the order: partitions of ZeRO-3 add up to the sum of
    an unpartitioned parameter.
    """
    frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    if not config.lora.rank or not frozen:
        return None
    sums = torch.stack([_sum(one, world.rank).cpu() for _, one in frozen])
    if hasattr(frozen[0][1], "ds_tensor"):
        dist.all_reduce(sums, group=world.host_group)
    digest = hashlib.sha256()
    for (name, one), total in zip(frozen, sums.tolist(), strict=True):
        shape = list(getattr(one, "ds_shape", one.shape))
        digest.update(f"{name} {shape} {one.dtype} {total}\n".encode())
    return Base(config.model.name, digest.hexdigest()[:32])


def _sum(parameter: Any, rank: int) -> torch.Tensor:
    """Return the sum of a parameter's (or of this rank's part of it) elements, read as integers."""
    tensor: torch.Tensor = parameter.detach()
    if hasattr(parameter, "ds_tensor"):
        part: torch.Tensor = parameter.ds_tensor.detach().flatten()
        # The padding of the last partition is uninitialized.
        tensor = part[: max(0, min(part.numel(), int(parameter.ds_numel) - rank * part.numel()))]
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    whole = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    # Summing integers first converts all of them to 8 bytes.
    return torch.stack([piece.sum(dtype=torch.int64) for piece in whole.split(_PIECE)]).sum()


def random_state(world: World) -> dict[str, torch.Tensor]:
    """Return the state of this rank's generators, on the CPU and on its GPU."""
    state = {"cpu": torch.get_rng_state()}
    if world.on_gpu:
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def rehearse_checkpoint(
    checkpoints: Checkpoints, state: TrainState, config: Config, world: World, steps: range, model: int
) -> str:
    """Check the space for what ``steps`` will write, and try to write a checkpoint; return a note for the log.

    ``model``: bytes of the final model, 0 if none is written. All ranks call this. If the disk lacks the space, or
    other bytes are read back, all ranks raise ``FtmonError``; if no checkpoint is planned (a stop or a best
    evaluation still writes one), it is a printed note, unless the model does not fit.
    """
    began = time.perf_counter()
    folder, keep = checkpoints.folder, config.checkpoint.keep
    planned = space.plan(config, steps, checkpoints.measure(state), model)
    required = config.checkpoint.every > 0 or config.checkpoint.at_end
    missing, note, unplanned = "", "", ""
    if world.is_first:
        missing, note = space.check(folder, planned if required else planned._replace(saves=0), keep)
        unplanned = "" if required else space.check(folder, planned._replace(saves=1, model=0), keep)[0]
    missing, unplanned = world.share_text(missing), world.share_text(unplanned)
    fix = "free space, set output.dir to another disk, or leave this check out with checkpoint.rehearse=false"
    if missing:
        raise FtmonError(f"rehearsal: {missing}; {fix}")
    if note:
        world.note(f"rehearsal: {note}")
    problem, compared = (unplanned, 0) if unplanned else checkpoints.try_out(state)
    if not problem:
        return (
            f"; a checkpoint takes {space.size_text(planned.checkpoint)}; a sample of each file was written, read "
            f"back and compared ({compared} tensors) in {duration(time.perf_counter() - began)}"
        )
    if not unplanned:
        problem = f"a checkpoint could not be written to {folder}: {problem}"
    if required:
        raise FtmonError(f"rehearsal: {problem}; {fix}")
    if world.is_first:
        checkpoints.report_failure(folder, problem, state.step)
    best = " or a best evaluation" if config.evaluation.on and config.checkpoint.keep_best else ""
    timed = f", {config.checkpoint.minutes:g} minutes of training" if config.checkpoint.minutes else ""
    world.note(f"rehearsal: {problem}; none is planned by steps, but a stop{timed}{best} would write one")
    return ""
