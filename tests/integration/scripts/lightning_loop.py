"""PyTorch Lightning: DDP in one process, accumulation, validation in between; it knows nothing of ftmon."""

import json
import logging
import os
import time

import lightning
import torch

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
spent = {"forward": 0.0, "optimizer": 0.0}
losses = []


class SlowSgd(torch.optim.SGD):
    """Its own work takes 20 ms, after the closure."""

    def step(self, closure=None):
        loss = super().step(closure)
        before = time.perf_counter()
        time.sleep(0.02)
        spent["optimizer"] += time.perf_counter() - before
        return loss


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def training_step(self, rows, index):
        before = time.perf_counter()
        loss = (self.layer(rows) - rows).pow(2).mean()
        time.sleep(0.03)
        spent["forward"] += time.perf_counter() - before
        losses.append(loss.item())
        return loss

    def validation_step(self, rows, index):
        time.sleep(0.01)
        return (self.layer(rows) - rows).pow(2).mean()

    def configure_optimizers(self):
        return SlowSgd(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_):
        if len(losses) == 2:  # the second micro-batch made the update
            print(json.dumps({"losses": losses[:], **spent}), flush=True)
            losses.clear()
            spent.update(forward=0.0, optimizer=0.0)


loader = torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=4)
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=1, max_epochs=1, accumulate_grad_batches=2, val_check_interval=4,
    num_sanity_val_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=os.environ["FTMON_RUN"],
)  # fmt: skip
trainer.fit(Module(), loader, torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=4))
