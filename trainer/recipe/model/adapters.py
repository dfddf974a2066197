"""Low-rank adapters on a frozen model (peft)."""

import logging
from typing import Any

from ....protocol.errors import ConfigError
from ..config.schema import Config


def quiet_bitsandbytes() -> None:
    """Leave out of the log that bitsandbytes has no kernel from the hub for 4-bit weights on the CPU.

    It logs that when it is imported, which peft does for adapters of any kind.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_lora(model: Any, config: Config) -> Any:
    """Put adapters on a model and freeze the rest.

    Raises:
        ConfigError: ``lora.targets`` names no layer of the model.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    lora = config.lora
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # fractions work too
        lora_dropout=lora.dropout,
        use_dora=lora.kind == "dora",
        target_modules=lora.targets or "all-linear",
    )
    try:
        return get_peft_model(model, adapters)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {str(error).splitlines()[0]}") from None
