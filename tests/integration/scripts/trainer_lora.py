"""A Hugging Face Trainer without DeepSpeed on a PEFT model; prints the losses that the Trainer logs."""

import json
import os

from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ROWS = [{"input_ids": [(i * j) % 64 for j in range(8)], "labels": [(i * j) % 64 for j in range(8)]} for i in range(12)]


def main():
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=2, n_head=2))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    arguments = TrainingArguments(
        os.path.join(os.environ["FTMON_RUN"], "out"), max_steps=3, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, use_cpu=True, report_to="none", logging_steps=1, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS)
    trainer.train()
    trained, total = model.get_nb_trainable_parameters()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("logged", json.dumps([losses, total, trained]), flush=True)
