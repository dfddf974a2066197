"""Low-rank adapters on a frozen model (peft)."""

import logging
from typing import Any

from ....protocol.errors import ConfigError
from ..config.schema import Config


def quiet_bitsandbytes() -> None:
    """Suppress bitsandbytes' log line that it has no kernel from the hub for 4-bit weights on the CPU.

    It is logged at import, and peft imports it for all kinds of adapters.
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
