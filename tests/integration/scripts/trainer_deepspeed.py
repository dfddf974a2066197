"""A Hugging Face Trainer with a DeepSpeed config, evaluation and a checkpoint; it knows nothing of ftmon."""

import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

OUTPUT = sys.argv[-1]
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(12) % 7 + index % 3
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([1] * 9 + [0] * 3)}


def main():
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in deepspeed_loop.py
    arguments = TrainingArguments(
        OUTPUT, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=2, save_steps=2, logging_steps=1, report_to=[], deepspeed=CONFIG, use_cpu=True,
        dataloader_num_workers=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows()).train()


if __name__ == "__main__":
    main()
