"""One rank that exports adapters which were changed at random: prints how far the loaded model's logits are off."""

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.export.export import is_adapter, save_model
from ftmon.trainer.recipe.trainer import Trainer
from recipe_ranks import runs
from transformers import AutoModelForCausalLM

IDS = torch.arange(3, 51).reshape(2, 24)


def work(world: World, jobs: list[str]) -> None:
    for _, run in runs(world, jobs):
        before = logits(run.model)
        generator = torch.Generator().manual_seed(3)
        changed = [parameter for name, parameter in run.model.named_parameters() if is_adapter(name)]
        gathered = GatheredParameters(changed, modifier_rank=0, enabled=run.config.zero.stage == 3)
        with torch.no_grad(), gathered:
            for name, parameter in run.model.named_parameters():
                if is_adapter(name):
                    parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
                    if "lora_B" in name:
                        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        trained = logits(run.model)
        folder = run.output / "model"
        equal = save_model(run.engine, run.model, run.tokenizer, run.config, folder, world, run._results(1))
        exported = logits(loaded(folder, run))
        world.log(f"compared: {equal}")
        world.log(f"changed: {(trained - before).abs().max():.6f}")
        world.log(f"off: {(exported - trained).abs().max():.6f}")


def loaded(folder: Path, run: Trainer) -> Any:
    """Load what was written with the libraries that others use."""
    if run.config.lora.merge:
        return AutoModelForCausalLM.from_pretrained(folder)
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run.config.model.name), str(folder))


def logits(model: Any) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        found = model(input_ids=IDS, use_cache=False).logits.float()
    model.train(training)
    return found
