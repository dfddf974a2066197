"""A Hugging Face Trainer script with a DeepSpeed file whose entries say auto; knows no ftmon."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(12) % 7 + index % 3
        return {"input_ids": ids, "labels": ids}


def main():
    folder, config, output = sys.argv[1:4]
    arguments = TrainingArguments(
        output, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        gradient_checkpointing=True, bf16=True, report_to=[], deepspeed=config,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    Trainer(model, arguments, train_dataset=Rows()).train()
    open("trained", "w").close()


if __name__ == "__main__":
    main()
