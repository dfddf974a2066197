#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0, torch 2.13.0: with enable_jit_checkpoint a Trainer that gets SIGTERM goes on for 3
# seconds, then saves a checkpoint before the update of the step under way (on_pre_optimizer_step, or on_step_begin) and
# finishes that step: the last update is trained and in no checkpoint, and the training ends without an error.
#
# Seen: SIGTERM in the second of 12 steps of a second each; the training ends after step 4, the only checkpoint is that of
# step 3. Where SIGTERM comes and a scheduler kills after fewer than 3 seconds and a step, no checkpoint is made at all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
"$folder/venv/bin/python" - "$folder/out" <<'PY'
import os
import signal
import sys
import time

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.steps = 0

    def forward(self, x, labels):
        self.steps += 1
        if self.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
        return {"loss": (self.layer(x) - labels).square().mean()}


model = Model()
rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 20
arguments = TrainingArguments(
    sys.argv[1],
    max_steps=12,
    per_device_train_batch_size=1,
    enable_jit_checkpoint=True,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
saved = sorted(os.listdir(sys.argv[1]))
print(f"forwards {model.steps}, step {trainer.state.global_step}, checkpoints {saved}")
last = trainer.state.global_step
assert 4 <= last <= 6, "it ends at once now, or waits longer"
assert saved == [f"checkpoint-{last - 1}"], "the last step is in the checkpoint now"
PY
