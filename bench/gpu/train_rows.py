"""Rows of the trainer's tables: models, configurations, and the weights and documents that they run on."""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEED = 7

QWEN_05B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}
LLAMA_12B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

SHARED = ["training.sequence_parallel_size=2"]
BF16 = ["zero.stage=0", "optimizer={kind: adamw_bf16, master_weights: none}", "training.precision=bf16"]


@dataclass(frozen=True)
class Row:
    """One configuration to measure."""

    model: dict[str, Any]
    length: int = 4096
    micro_batch: int = 4
    gpus: int = 1
    words: list[str] = field(default_factory=list[str])
    """Overrides of the trainer's configuration."""
    trl: dict[str, Any] | None = field(default_factory=dict[str, Any])
    """Arguments of SFTConfig besides the common ones; None: TRL does not run this row."""
    lora: int = 0
    defaults: bool = False
    """ftmon gets the model, the data, the micro-batch, the length and the number of steps, and chooses the rest.

    It does not evaluate, as TRL does not. Its step has 32 rows; TRL's is one micro-batch, if ``trl`` says no more.
    """
    chats: bool = False
    """The records are conversations: each trains on them as by default, ftmon on the answers, TRL on every token."""


QWEN_DEFAULT = QWEN_05B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
ROWS = {
    "0.5b-defaults": Row(QWEN_DEFAULT, length=2048, micro_batch=8, defaults=True),
    "0.5b-defaults-same-step": Row(
        QWEN_DEFAULT, length=2048, micro_batch=8, defaults=True, trl={"gradient_accumulation_steps": 4}
    ),
    "0.6b-defaults": Row(QWEN3_06B, length=2048, micro_batch=8, defaults=True),
    "1.2b-defaults": Row(LLAMA_12B, length=2048, micro_batch=8, defaults=True),
    "1.2b-defaults-2": Row(LLAMA_12B, length=2048, micro_batch=8, gpus=2, defaults=True),
    "0.5b-chats": Row(QWEN_DEFAULT, length=2048, micro_batch=8, defaults=True, chats=True),
    "0.6b-chats": Row(QWEN3_06B, length=2048, micro_batch=8, defaults=True, chats=True),
    "1.2b-chats": Row(LLAMA_12B, length=2048, micro_batch=8, defaults=True, chats=True),
    "1.2b-chats-2": Row(LLAMA_12B, length=2048, micro_batch=8, gpus=2, defaults=True, chats=True),
    "0.5b": Row(QWEN_05B, micro_batch=8),
    "1.2b": Row(LLAMA_12B),
    "8b-lora": Row(LLAMA_8B, micro_batch=2, words=["lora={rank: 16, merge: false}"], lora=16),
    "8b-lora-compiled": Row(
        LLAMA_8B,
        micro_batch=2,
        words=["lora={rank: 16, merge: false}", "model.compile=layers"],
        lora=16,
    ),
    "8b-qlora": Row(
        LLAMA_8B,
        micro_batch=1,
        words=["lora={rank: 16, merge: false}", "model.quantization=nf4", "model.gradient_checkpointing=true"],
        trl=None,
    ),
    # What fp32 sums of gradients cost (zero.grad_accum_dtype, zero.communication_dtype), and what full logits cost.
    "1.2b-fp32-grads": Row(LLAMA_12B, gpus=2, words=["training.grad_accumulation=4"], trl=None),
    "1.2b-bf16-grads": Row(
        LLAMA_12B,
        gpus=2,
        words=["training.grad_accumulation=4", "zero.grad_accum_dtype=bf16", "zero.communication_dtype=bf16"],
        trl=None,
    ),
    "0.5b-full-logits": Row(QWEN_05B, micro_batch=8, words=["model.fused_loss=off"], trl=None),
    # What compiled layers give, and what recomputing and offloading activations costs and frees.
    "0.5b-compiled": Row(QWEN_05B, micro_batch=8, words=["model.compile=layers"], trl=None),
    "0.5b-compiled-budget": Row(
        QWEN_05B, micro_batch=8, words=["model.compile=layers", "model.activation_memory_budget=0.8"], trl=None
    ),
    "1.2b-compiled": Row(LLAMA_12B, words=["model.compile=layers"], trl=None),
    # Weights, gradients and running averages in bf16, as TRL's row of the same model has them.
    "0.5b-bf16": Row(QWEN_05B, micro_batch=8, words=[*BF16, "model.compile=layers"]),
    "1.2b-bf16": Row(LLAMA_12B, words=[*BF16, "model.compile=layers"]),
    "1.2b-layers": Row(LLAMA_12B, words=["model.gradient_checkpointing=layers"], trl=None),
    "1.2b-every-2": Row(LLAMA_12B, words=["model.gradient_checkpointing=layers", "model.checkpoint_every=2"], trl=None),
    "1.2b-selective": Row(LLAMA_12B, words=["model.gradient_checkpointing=selective"], trl=None),
    "1.2b-layers-offload": Row(
        LLAMA_12B, words=["model.gradient_checkpointing=layers", "model.activation_offload=inputs"], trl=None
    ),
    "1.2b-offload": Row(LLAMA_12B, words=["model.activation_offload=all"], trl=None),
    # bf16 weights, gradients and running averages: 8 bytes a parameter, 64 GB.
    "8b-full-bf16": Row(
        LLAMA_8B,
        micro_batch=2,
        words=[
            *BF16,
            "model.gradient_checkpointing=true",
        ],
        trl=None,
    ),
    # The same with all activations kept, which takes a GPU of more than 80 GB.
    "8b-full-bf16-kept": Row(
        LLAMA_8B,
        micro_batch=2,
        words=[
            *BF16,
            "model.compile=layers",
        ],
        trl=None,
    ),
    # Sequences on one GPU and shared by two; what 98,304 tokens need is more than one GPU has.
    "1.2b-32k": Row(LLAMA_12B, length=32_768, micro_batch=1, trl=None),
    "1.2b-32k-shared": Row(LLAMA_12B, length=32_768, micro_batch=1, gpus=2, words=SHARED, trl=None),
    "1.2b-96k": Row(LLAMA_12B, length=98_304, micro_batch=1, trl=None),
    "1.2b-96k-shared": Row(LLAMA_12B, length=98_304, micro_batch=1, gpus=2, words=SHARED, trl=None),
    "8b-zero3-2-compiled": Row(
        LLAMA_8B, micro_batch=2, gpus=2, words=["zero.stage=3", "model.compile=layers"], trl=None
    ),
    **{
        f"8b-zero3-{gpus}-compiled-recomputed": Row(
            LLAMA_8B,
            micro_batch=2,
            gpus=gpus,
            words=["zero.stage=3", "model.compile=layers", "model.gradient_checkpointing=true"],
            trl=None,
        )
        for gpus in (2, 4)
    },
    "8b-zero3-2-compiled-bf16-reduced": Row(
        LLAMA_8B,
        micro_batch=2,
        gpus=2,
        words=["zero.stage=3", "model.compile=layers", "zero.communication_dtype=bf16"],
        trl=None,
    ),
    "8b-zero3-2-kept": Row(LLAMA_8B, micro_batch=2, gpus=2, words=["zero.stage=3"], trl=None),
    **{
        f"8b-zero3-{gpus}": Row(
            LLAMA_8B,
            micro_batch=2,
            gpus=gpus,
            words=["zero.stage=3", "model.gradient_checkpointing=true"],
            trl={"gradient_checkpointing": True},
        )
        for gpus in (1, 2, 4, 8)
    },
    # The same with bf16 states: with 8b-full-bf16, how the trainer scales on GPUs of 80 GB; and with compiled layers.
    **{
        f"8b-zero3-bf16-{gpus}{compiled}": Row(
            LLAMA_8B,
            micro_batch=2,
            gpus=gpus,
            words=[
                *BF16,
                "zero.stage=3",
                "zero.grad_accum_dtype=bf16",
                "zero.communication_dtype=bf16",
                "model.gradient_checkpointing=true",
                *(["model.compile=layers"] if compiled else []),
            ],
            trl=None,
        )
        for gpus in (2, 4, 8)
        for compiled in ("", "-compiled")
    },
}


def shrunk(row: Row) -> Row:
    """Return a row that a CPU can run, on two ranks at most."""
    return replace(row, model={**row.model, **TINY}, length=128, gpus=min(row.gpus, 2), lora=min(row.lora, 4))


def overrides(row: Row, folder: Path, data: Path, steps: int, tiny: bool) -> list[str]:
    """Return the row as overrides of the trainer's configuration."""
    if row.defaults:
        sizes = f"training={{max_steps: {steps}, micro_batch: {row.micro_batch}, sequence_length: {row.length}}}"
        device = ["run.device=cpu"] if tiny else []
        return [
            f"model.name={folder}",
            f"data.path={data}",
            sizes,
            "evaluation=off",
            *device,
        ]
    return [
        f"model.name={folder}",
        f"data.path={data}",
        "data.packing=true",
        "model.compile=off",
        f"training={{max_steps: {steps}, micro_batch: {row.micro_batch}, sequence_length: {row.length}, seed: {SEED}}}",
        "training.grad_accumulation=1",
        "evaluation=off",
        "optimizer.lr=1e-4",
        "output={save_model: false, log_every: 20}",
        "checkpoint.rehearse=false",
        f"run={{ranks: {row.gpus}, device: {'cpu' if tiny else 'cuda'}}}",
        *row.words,
    ]


def documents(path: Path, tokens: int, chats: bool = False) -> None:
    """Write documents of some ``tokens`` tokens in all: the repository's own text in pieces of log-normal length.

    ``chats``: conversations of one to four questions, of 40 words in the median, with answers of 150.
    """
    chance = random.Random(SEED)
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("trainer/**/*.py")])
    words = " ".join(file.read_text(encoding="utf-8") for file in files).split(" ")
    written = 0

    def piece(middle: float, spread: float) -> str:
        nonlocal written
        # A word of this text is about one and a half tokens.
        length = min(2500, max(5 if chats else 20, int(chance.lognormvariate(middle, spread))))
        start = chance.randrange(len(words) - length)
        written += length
        return " ".join(words[start : start + length])

    def record() -> dict[str, Any]:
        if not chats:
            return {"text": piece(5.5, 1.0)}
        pairs = [
            ({"role": "user", "content": piece(3.7, 0.9)}, {"role": "assistant", "content": piece(5.0, 0.8)})
            for _ in range(chance.randint(1, 4))
        ]
        return {"messages": [message for pair in pairs for message in pair]}

    with path.open("w", encoding="utf-8") as file:
        while written < tokens:
            file.write(json.dumps(record()) + "\n")


def texts_of(path: Path) -> Iterator[str]:
    """Yield the text of each document."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            yield record["text"] if "text" in record else "\n".join(each["content"] for each in record["messages"])


def prepare(row: Row, folder: Path, data: Path) -> None:
    """Write random weights and a tokenizer trained on the documents."""
    import torch
    from ftmon.trainer.recipe.model.tokenizer import train
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train(lambda: texts_of(data), 8192)
    if not row.chats:
        tokenizer.chat_template = None
    values = dict(row.model, max_position_embeddings=row.length)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.bos_token_id = None
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def folder_of(work: Path, row: Row) -> Path:
    """Return where the weights of a row's model are; rows of the same model share them."""
    facts = [row.model, row.length, *(["chats"] if row.chats else [])]
    return work / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
