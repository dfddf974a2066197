"""Builds a rank's ``Hello`` message."""

import os
import platform
import sys
import time
from typing import Any, Literal

import msgspec

from ....protocol.messages.telemetry import Hello, Plan, SelfDump
from ..device.backend import backend_of
from .context import RankContext

_PACKAGES = ("ftmon", "torch", "deepspeed", "transformers", "accelerate")


class Introduction:
    """Collects the fields of the rank's ``Hello`` as they become known."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._backend = ""
        self.facts: dict[str, Any] = {"framework": "pytorch"}
        """Fields of ``Hello``."""
        self.parameter_dtype = ""
        """``bf16``, ``fp16`` or ``fp32``: data type of the model's parameters; empty while unknown."""
        self.forward_dtype: str | None = None
        """Data type of autocast in the first forward, empty without autocast; None before the first forward."""
        self.plan: Plan | None = None
        """The script's plan; sent after each hello."""

    def hello(self, self_dump: SelfDump | None = None) -> Hello:
        """Return a ``Hello`` with everything known so far."""
        rank = self._rank
        return Hello(
            rank=rank.rank,
            local_rank=rank.local_rank,
            world_size=rank.world_size,
            host=rank.host,
            pid=rank.process.pid,
            start_ticks=rank.process.start_ticks,
            device=rank.device.info,
            memory_measure=rank.device.memory.measure,
            time=time.time(),
            versions=_versions(),
            argv=list(sys.argv),
            backend=self.note_backend(),
            sends_logs=rank.sends_logs,
            self_dump=self_dump,
            launch=rank.launch,
            restart=_restart_count(),
            matmul_precision=self.matmul_precision(),
            **self.facts,
        )

    def note_backend(self) -> str:
        """Return the backend of torch.distributed, also after its process group was destroyed."""
        self._backend = backend_of(self._rank.device.info.kind) or self._backend
        return self._backend

    def matmul_precision(self) -> Literal["", "bf16", "fp16", "tf32", "fp32"]:
        """Return the data type of matrix products; empty if unknown (no forward seen, so autocast may be on)."""
        configured = self.facts.get("precision", "")
        halves = [one for one in (configured, self.forward_dtype, self.parameter_dtype) if one in ("bf16", "fp16")]
        if halves:
            return "bf16" if halves[0] == "bf16" else "fp16"
        if configured != "fp32" and self.forward_dtype is None:
            return ""
        torch: Any = sys.modules.get("torch")
        return "fp32" if torch is None or torch.get_float32_matmul_precision() == "highest" else "tf32"


def _restart_count() -> int:
    try:
        return max(0, int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))
    except ValueError:
        return 0


def plain(value: Any) -> Any:
    """Convert a framework's configuration to msgpack types; other values become their ``str``."""
    return msgspec.to_builtins(value, enc_hook=str, str_keys=True)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
