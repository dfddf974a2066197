"""A loop of one's own on Accelerate, whose DeepSpeed settings are the launcher's alone; knows no ftmon."""

import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM


def main():
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 16
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    open("trained", "w").close()


if __name__ == "__main__":
    main()
