"""The process group of this rank, and agreements between ranks."""

import contextlib
import importlib
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...protocol.errors import ConfigError
from .hardware import free_port
from .monitor import announce
from .support import SEQUENCES, ranks_refusal


class SequenceGroup:
    """Consecutive ranks that hold slices of the same rows.

    To DeepSpeed's engine and ZeRO every rank is a data-parallel one. A rank's loss is the sum over its own slice, so
    the gradients of all ranks add up to those of the whole batch, as they do without slices.
    """

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None) -> None:
        """Wrap a process group, of which this rank has number ``rank`` and that slice; size 1 has whole rows."""
        self.size = size
        self.rank = rank
        self._group = group

    def exchange(self, tensor: torch.Tensor, divide: int, join: int) -> torch.Tensor:
        """Send each rank its part of a tensor, and return the parts received (Ulysses, arXiv 2309.14509).

        ``tensor`` has the same shape in all ranks. Dimension ``divide`` is divided among them; along ``join`` the
        received parts are concatenated in the order of the ranks. The gradient is exchanged in the other direction.
        """
        result: torch.Tensor = _Exchange.apply(self, tensor, divide, join)
        return result

    def _all_to_all(self, tensor: torch.Tensor, divide: int, join: int) -> torch.Tensor:
        parts = tensor.unflatten(divide, (self.size, -1)).movedim(divide, 0).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received.movedim(0, join).flatten(join, join + 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, tensor: torch.Tensor, divide: int, join: int) -> torch.Tensor:
        ctx.group, ctx.divide, ctx.join = group, divide, join
        return group._all_to_all(tensor, divide, join)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return None, ctx.group._all_to_all(grad_outputs[0], ctx.join, ctx.divide), None, None


def start_device() -> None:
    """Begin, beside other imports, what the first use of a GPU waits for: its context, and Triton's hash of itself.

    Nothing is allocated; an error is left to that first use.
    """

    def start() -> None:
        with contextlib.suppress(Exception):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.synchronize()
            importlib.import_module("triton.runtime.cache").triton_key()

    if os.environ.get("DS_ACCELERATOR") == "cuda":
        threading.Thread(target=start, name="ftmon-device", daemon=True).start()


class World:
    """The joined process group: this rank's number and device, and the number of ranks."""

    has_values = True  # Whether tensors have values; not in a dry run, where no check may depend on them
    sequence = SequenceGroup()

    def __init__(self) -> None:
        for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(key, value)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or self.size)
        import deepspeed  # not at the import of this file: a prediction chooses its accelerator first
        import deepspeed.ops
        from deepspeed.accelerator import get_accelerator

        accelerator: Any = get_accelerator()
        self.on_gpu: bool = accelerator.device_name() == "cuda"
        if self.on_gpu:
            accelerator.set_device(self.local_rank)
        else:
            # DeepSpeed would compile its shared-memory all_reduce, for inference only: half a minute on two cores.
            compatible: Any = deepspeed.ops.__compatible_ops__
            compatible["deepspeed_shm_comm"] = False
        self.device = torch.device("cuda", self.local_rank) if self.on_gpu else torch.device("cpu")
        deepspeed.init_distributed(
            dist_backend=accelerator.communication_backend_name(), timeout=timedelta(minutes=30), verbose=False
        )
        self.host_group: Any = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
        """A group whose collectives run on the CPU beside the training, for small agreements."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of this rank's rows: ranks that share sequences have the same."""
        return self.rank // self.sequence.size

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks with rows of their own."""
        return self.size // self.sequence.size

    def share_sequences(self, size: int) -> None:
        """Let each ``size`` consecutive ranks share their rows, or raise ``ConfigError``. All ranks call this."""
        if size == self.sequence.size:
            return
        if text := ranks_refusal(self.size, size):
            raise ConfigError(f"{SEQUENCES} {text}")
        mine: Any = None
        for first in range(0, self.size, size) if size > 1 else ():
            # Every rank must call this for every group.
            group: Any = dist.new_group(range(first, first + size), timeout=timedelta(minutes=30))
            mine = group if first <= self.rank < first + size else mine
        self.sequence = SequenceGroup(size, self.rank % size, mine)

    def log(self, text: str) -> None:
        """Print a line in rank 0."""
        if self.is_first:
            # In one write: print writes the line end separately, and a checkpoint's thread prints too.
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a note in rank 0, and report it to whoever watches."""
        announce("note", text, self.log)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host_group)

    def share_text(self, text: str) -> str:
        """Return rank 0's ``text`` in every rank."""
        texts = [text]
        dist.broadcast_object_list(texts, 0, group=self.host_group)
        return texts[0]

    def first_text(self, text: str) -> str:
        """Return the text of the first rank whose ``text`` is not empty, in every rank."""
        texts: list[Any] = [""] * self.size
        dist.all_gather_object(texts, text, group=self.host_group)
        return next((f"rank {rank}: {one}" if self.size > 1 else one for rank, one in enumerate(texts) if one), "")

    def all_agree(self, mine: bool) -> bool:
        """Return whether ``mine`` is true in every rank."""
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.host_group)
        return bool(flag.item())

    def leave(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class StopFlag:
    """Agrees, one step late and without waiting, on whether some rank was asked to stop, or to save."""

    def __init__(self, world: World) -> None:
        self._group = world.host_group
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None
        self.broken = False  # Whether some rank has reported that training is broken; known to all ranks
        self.save = False  # Whether some rank has asked for a checkpoint in the previous step; known to all ranks

    def exchange(self, asked: bool, broken: bool = False, save: bool = False) -> bool:
        """Send this rank's request at the end of a step; return whether all stop now, by the previous step's requests.

        ``broken``: this rank has found that training is broken and must end without a checkpoint. ``save``: it asks for
        a checkpoint, which a stop writes anyway. Every rank calls this once a step. The all_reduce begun in one step is
        collected in the next, when all ranks have entered it, so the training thread does not wait here.
        """
        found = 0
        if self._work is not None:
            self._work.wait()
            found = int(self._flag.item())
        self.save, self.broken = found == 1, found == 3
        self._flag.fill_(3 if broken else 2 if asked else int(save))
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return found >= 2

    def finish(self) -> None:
        """Wait for the exchange under way."""
        if self._work is not None:
            self._work.wait()
