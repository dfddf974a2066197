"""The demo: trains a small model with random weights on a small instruction data set of the package."""

from pathlib import Path

from .config.load import Loaded, load
from .hardware import usable_gpus

DATA = Path(__file__).parent / "data" / "instructions.jsonl"

_BOTH = """
tokenizer: {vocab_size: 2048}
data: {packing: true}
zero: {stage: 2}
"""
_CPU = """
model:
  config: {model_type: qwen2, hidden_size: 256, intermediate_size: 768, num_hidden_layers: 6, num_attention_heads: 4,
           num_key_value_heads: 2, tie_word_embeddings: true}
evaluation: {share: 0.05, every: 40, samples: 1}
optimizer: {lr: 1.5e-3, weight_decay: 0.05}
schedule: {warmup_steps: 8}
training: {max_steps: 120, micro_batch: 2, grad_accumulation: 2, sequence_length: 128}
output: {log_every: 5}
run: {name: demo, ranks: 2, device: cpu}
"""
_GPU = """
model:
  config: {model_type: qwen2, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 16,
           num_attention_heads: 16, num_key_value_heads: 8, tie_word_embeddings: true}
evaluation: {share: 0.05, every: 100, samples: 1}
optimizer: {lr: 3.0e-4, weight_decay: 0.05}
schedule: {warmup_steps: 20}
training: {max_steps: 400, micro_batch: 4, grad_accumulation: 2, sequence_length: 128}
run: {name: demo, device: cuda}
"""


def demo_config(overrides: list[str]) -> Loaded:
    """Return the demo's configuration: all GPUs if there are any, else two CPU ranks.

    Raises:
        ConfigError: an override is wrong.
    """
    on_cpu = "run.device=cpu" in overrides or not usable_gpus()
    return load(None, [f"data.path={DATA}", *overrides], _BOTH + (_CPU if on_cpu else _GPU))
