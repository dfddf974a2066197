"""A Hugging Face Trainer that is asked to end in the middle of its second evaluation, and saves a checkpoint then."""

import os
import signal
import sys
import time
from typing import Any

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    """Evaluates slowly; ends its own process as a scheduler would, at a row of the second evaluation."""

    rows = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.training:
            Model.rows += 1
            if Model.rows == 24:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return {"loss": (self.layer(x) - labels).square().mean()}


def main() -> None:
    rows: Any = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(40)]
    arguments = TrainingArguments(
        sys.argv[1], max_steps=8, per_device_train_batch_size=1, per_device_eval_batch_size=1,
        eval_strategy="steps", eval_steps=2, enable_jit_checkpoint=True, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=Model(), args=arguments, train_dataset=rows, eval_dataset=rows[:20]).train()


if __name__ == "__main__":
    main()
