"""A Hugging Face ``Trainer`` with DeepSpeed that knows nothing of ftmon: ``hf_trainer.py OUTPUT STEPS``."""

import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
OUTPUT, STEPS = [word for word in sys.argv[1:] if not word.startswith("--")]

arguments = TrainingArguments(
    output_dir=OUTPUT,
    max_steps=int(STEPS),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
)
tokens = torch.randint(0, 128, (64, 16))
data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
Trainer(model=model, args=arguments, train_dataset=data).train()
