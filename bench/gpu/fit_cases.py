"""Configurations and caps whose fit verdicts are predicted (``fit_predict.py``) and measured (``fit_verdicts.py``)."""

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

GB = 10**9
SHARES = (0.99, 1.01, 0.95, 1.05)
"""Of the largest length, in the order in which they are measured."""
POSITIONS = 40_960
"""Of every model: GPT-2's table of positions is as long as the longest sequence."""


class Case(NamedTuple):
    """A configuration and a cap."""

    model: str
    zero_stage: int
    cap_gb: int
    micro_batch: int = 1
    gradient_checkpointing: bool = False
    adam: str = "deepspeed"
    lora_r: int | None = None
    offload_optimizer: bool = False
    expandable_segments: bool = False
    ranks: int = 1

    @property
    def name(self) -> str:
        """What the files call it."""
        words = [self.model, f"ZeRO-{self.zero_stage}", f"batch {self.micro_batch}"]
        words += ["checkpointing"] * self.gradient_checkpointing + ["offload"] * self.offload_optimizer
        words += [f"LoRA {self.lora_r}"] * bool(self.lora_r) + ["expandable"] * self.expandable_segments
        words += [f"{self.ranks} ranks"] * (self.ranks > 1)
        return " ".join([*words, f"{self.adam} AdamW", f"{self.cap_gb} GB"])

    @property
    def needs(self) -> str:
        """The operation that DeepSpeed compiles for it; empty: none."""
        if self.offload_optimizer:
            return "CPUAdamBuilder"
        return "FusedAdamBuilder" if self.adam == "deepspeed" else ""


QWEN, LLAMA, TINY, GPT2 = "qwen1.5-0.5b", "llama-3.2-1b", "tinyllama-1.1b", "gpt2-medium"
CASES = [
    Case(QWEN, 0, 24),
    Case(LLAMA, 0, 40),
    Case(QWEN, 2, 80, 4, True),
    Case(QWEN, 0, 40, adam="torch"),
    Case(GPT2, 0, 24, adam="torch"),
    Case(TINY, 0, 80, adam="torch"),
    Case(GPT2, 1, 40, 4, True, adam="torch"),
    Case(TINY, 1, 40, 4, True, adam="torch"),
    Case(LLAMA, 2, 80, 4),
    Case(QWEN, 1, 24),
    Case(TINY, 2, 40, 4),
    Case(GPT2, 3, 24),
    Case(LLAMA, 0, 24, lora_r=16),
    Case(QWEN, 3, 40, 4),
    Case(QWEN, 2, 24, 4, offload_optimizer=True),
    Case(LLAMA, 1, 80, 4, True),
    Case(QWEN, 3, 24, expandable_segments=True),
    Case(TINY, 2, 24, 4, True, lora_r=16),
    Case(QWEN, 0, 80),
    Case(LLAMA, 2, 40, offload_optimizer=True),
    Case(GPT2, 2, 24, 4, expandable_segments=True),
    Case(QWEN, 1, 40, 4, adam="torch", expandable_segments=True),
    Case(QWEN, 2, 24, 1, True),
    Case(TINY, 3, 40, expandable_segments=True),
    Case(LLAMA, 3, 80, 4, True),
    Case(GPT2, 2, 40),
    Case(LLAMA, 2, 40, 4, True, lora_r=16),
    Case(QWEN, 0, 24, 4, True),
    Case(LLAMA, 3, 40),
    Case(GPT2, 0, 80, 4, adam="torch"),
    Case("llama-3-8b", 0, 40, 1, True, lora_r=16),
    Case(TINY, 0, 24, lora_r=16),
    Case(LLAMA, 0, 80, adam="torch", expandable_segments=True),
    Case(QWEN, 1, 24, ranks=2),
    Case(QWEN, 3, 24, ranks=2),
    Case(GPT2, 2, 24, 4, expandable_segments=True, ranks=2),
    Case(TINY, 3, 24, 4, True, ranks=2),
    Case(QWEN, 2, 24, 4, ranks=2),
    Case(LLAMA, 0, 24, lora_r=16, ranks=2),
    Case(GPT2, 0, 40, adam="torch", ranks=2),
    Case(LLAMA, 2, 40, 4, True, ranks=2),
    Case(TINY, 1, 40, ranks=2),
    Case(LLAMA, 3, 40, ranks=2),
    Case(LLAMA, 2, 40, offload_optimizer=True, ranks=2),
    Case(QWEN, 3, 40, 4, adam="torch", ranks=2),
]


def fields_of(case: Case, tiny: bool = False) -> dict[str, Any]:
    """Return the fields of the model's ``config.json``."""
    found = dict(bench().MODELS[case.model])
    if found["model_type"] == "gpt2":
        found["n_positions"] = POSITIONS
        return found | {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4} if tiny else found
    found["max_position_embeddings"] = POSITIONS
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return found | small | {"num_attention_heads": 4, "num_key_value_heads": 4} if tiny else found


def bench() -> Any:
    """Return the module of the neighbouring ``bench/predict.py``: its models and DeepSpeed's configurations."""
    if str(Path(__file__).resolve().parents[1]) not in sys.path:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    return importlib.import_module("predict")


@contextlib.contextmanager
def files_of(case: Case, tiny: bool = False) -> Generator[tuple[str, str]]:
    """Write the model's and DeepSpeed's configuration, as a person has them, and return where."""
    with tempfile.TemporaryDirectory() as folder:
        model, settings = Path(folder) / "config.json", Path(folder) / "ds.json"
        model.write_text(json.dumps(fields_of(case, tiny)))
        settings.write_text(json.dumps(bench().settings(case._asdict())))
        yield str(model), str(settings)


def environment(case: Case, **more: str) -> dict[str, str]:
    """Return the environment of a process that runs or predicts a case."""
    conf = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{case.expandable_segments}"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTORCH_ALLOC_CONF", *conf)}
    return kept | conf | more


def around(largest: int, shares: Sequence[float]) -> list[int]:
    """Return lengths around the largest."""
    return [largest + max(1, round(largest * (share - 1))) if share > 1 else round(largest * share) for share in shares]
