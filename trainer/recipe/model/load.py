"""Loads the model: weights from the hub or a folder, or random ones from a bare configuration."""

import copy
import inspect
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..distributed import World
from ..support import in_bf16_optimizer, zero_stage
from . import activations
from .bare import FAILURES, bare_config, first_line
from .loss import use_summed_loss
from .shape import named_config, refuse_quantized


def quiet_bitsandbytes() -> None:
    """Suppress bitsandbytes' log line that it has no kernel from the hub for 4-bit weights on the CPU.

    It is logged at import, and peft imports it for all kinds of adapters.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_lora(model: Any, config: Config) -> Any:
    """Put adapters on a model and freeze the rest; settings that peft cannot use with it are a ``ConfigError``."""
    from peft import LoraConfig, TaskType, get_peft_model

    lora = config.lora
    unfit = unadaptable(model)
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # fractions work too
        lora_dropout=lora.dropout,
        use_dora=lora.kind == "dora",
        target_modules=lora.targets or "all-linear",
        exclude_modules=sorted(unfit) if unfit and not lora.targets else None,
    )
    adapters.target_parameters = taken_for_experts(model, adapters, unfit) or None
    if lora.targets:
        unfit |= _ends(model, lora.merge)
        if wrong := next((name for name in unfit if _is_named(name, lora.targets)), ""):
            raise ConfigError(f"lora.targets: {wrong} cannot be adapted: {unfit[wrong]}; leave it out")
    try:
        with warnings.catch_warnings():
            # peft 0.21 sets them for experts, which it does not count as targeted modules.
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            made = get_peft_model(model, adapters)
    except ValueError as error:
        text = str(error).splitlines()[0]
        if "ParamWrapper" in text:  # peft 0.21, tuners/lora/layer.py: experts that are one parameter
            key, value = ("lora.kind", "lora") if lora.kind == "dora" else ("lora.dropout", "0")
            kind = model.config.model_type
            raise ConfigError(f"{key}: peft cannot use it with the experts of {kind}; use {key}={value}") from None
        raise ConfigError(f"lora.targets: {text}") from None
    if lora.merge:
        _refuse_shared(made)
    if config.zero.stage == 3:
        _gather_together(made, model)
    return made


def _refuse_shared(adapted: Any) -> None:
    """Refuse to merge adapters of several layers that share their weight (Zamba 2's blocks)."""
    names: dict[int, str] = {}
    for name, module in adapted.named_modules():
        if hasattr(module, "lora_A") and (other := names.setdefault(id(_adapted(module)), name)) != name:
            both = " and ".join(one.removeprefix("base_model.model.") for one in (other, name))
            raise ConfigError(f"lora.merge: {both} share a weight, and each has an adapter; use lora.merge=false")


def _gather_together(adapted: Any, model: Any) -> None:
    """Make ZeRO-3 gather adapted parameters and their adapters together where peft adapts them without their modules.

    Its ``ParamWrapper`` reads the weights of its parts without calling them, and moves the parameter to a module made
    for the time of the call (``_activate_lora``): hooks of neither gather anything.
    """
    from deepspeed.utils import set_z3_leaf_module

    inside: set[Any] = set()
    for module in adapted.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "lora_A") and module not in inside:
            set_z3_leaf_module(module, True)
            inside.update(module.modules())
    if inside:
        # DeepSpeed reduces their gradients once the gradient of their input is known, so that must have one.
        model.enable_input_require_grads()


def experts_by_turn(model: Any) -> Iterator[Any]:
    """Yield the experts that call their modules by expert (transformers 5.24: LongCat, whose zero experts are modules).

    Which are called, and in which order, differs between ranks.
    """
    if getattr(model.config.get_text_config(), "_experts_implementation", None) not in (None, "eager"):
        return  # all experts at once
    for name, module in model.named_modules():
        inside = list(module.children()) if name.rpartition(".")[2] == "experts" else []
        if inside and not any(True for each in inside for _ in each.parameters()):
            yield module


def gather_experts_whole(model: Any) -> None:
    """Make ZeRO-3 set no hooks within experts that call their modules by expert.

    It gathers ahead in the order of the modules' last calls: ranks with different orders would gather different
    parameters at the same time.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in experts_by_turn(model):
        set_z3_leaf_module(module, True)


def refuse_left_out(model: Any, by_turn: bool, config: Config, ranks: int) -> None:
    """Refuse, by a ``ConfigError``, a ZeRO stage under which ranks may have gradients of different weights.

    DeepSpeed 0.19 reduces gradients as they come (stages 1 and 2), and gathers the layers that a rank calls (3). Its
    stage 0, and its bf16 optimizer, reduce those of all weights. ``by_turn``: the model had ``experts_by_turn``.
    """
    stage, training, zero = zero_stage(config, ranks), config.training, config.zero
    if ranks == 1 or not stage or in_bf16_optimizer(config, ranks):
        return
    settings, kind = model.config.get_text_config(), model.config.model_type
    if drop := next((name for name in ("layerdrop", "decoder_layerdrop") if getattr(settings, name, 0)), ""):
        raise ConfigError(
            f"model.{'overrides' if config.model.name else 'config'}.{drop}: {kind} leaves out other layers on each "
            f"rank, which cannot be used with zero.stage={zero.stage}; use 0"
        )
    trained = any(one.requires_grad and ".experts." in name for name, one in model.named_parameters())
    if stage < 3 and by_turn and trained:
        raise ConfigError(
            f"zero.stage: {zero.stage} needs a gradient of every weight from each rank, and a rank may have no token "
            f"for the experts of {kind}; use {'3' if training.precision == 'fp16' else '0 or 3'}"
        )


def unadaptable(model: Any) -> dict[str, str]:
    """Return the linear layers that an adapter breaks or does not act on, with the reason, by name."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, torch.nn.Linear) and kind.forward is not torch.nn.Linear.forward:
            # Quantized layers and FalconLinear compute a linear layer; routers return several tensors.
            if kind.__module__.startswith("transformers.models") and kind.__name__ != "FalconLinear":
                found[name] = f"{kind.__name__} is no plain linear layer"
        elif hasattr(module, "A_log") and hasattr(module, "D"):
            for own in ("dt_proj", "out_proj"):
                if hasattr(module, own):
                    found[f"{name}.{own}"] = "Mamba's kernels read its weight without the adapter"
        for own, child in module.named_children():
            if isinstance(child, torch.nn.Linear) and own in _read_weights(kind):
                found.setdefault(f"{name}.{own}", f"{kind.__name__} reads its weight without the adapter")
    return found


@cache
def _read_weights(kind: type[Any]) -> frozenset[str]:
    """Return the names of the linear layers whose weights a module of transformers reads in place of calling them."""
    if not kind.__module__.startswith("transformers.models"):
        return frozenset()
    source = inspect.getsource(kind)
    if "slow_but_exact" in source:  # Bloom's way of computing what tensor-parallel training had computed
        return frozenset()
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:data|device|dtype|shape)\b)", source))


def _ends(model: Any, merges: bool) -> dict[str, str]:
    """Return the embeddings and a tied output layer that get no adapters, with the reason, by name."""
    found = {
        name: "it is an embedding, which is trained with all weights only"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if merges and head is not None and head.weight is embedding.weight:
        name = next(name for name, module in model.named_modules() if module is head)
        found[name] = "it shares its weight with the embeddings, which lora.merge=true would change too"
    return found


def taken_for_experts(model: Any, adapters: Any, unfit: Mapping[str, str]) -> list[str]:
    """Return the weights of targeted linear layers that peft's configuration ``adapters`` would leave without adapters.

    peft 0.21 replaces targets with the names of experts' layers (gate_proj ...) by the parameters that hold all experts
    (``utils/transformers_weight_conversion.py``). Dense layers and shared experts have these names too (DeepSeek,
    GLM-4.5): they are targeted as parameters, which no name of a layer can do.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a peft that does not replace them
        return []
    converted = copy.deepcopy(adapters)
    asked = set() if isinstance(adapters.target_modules, str) else adapters.target_modules
    try:
        convert_peft_config_for_transformers(converted, model, None)
    except ValueError:  # raised by peft again, for the caller
        return []
    if not converted.target_parameters:
        return []
    head = model.get_output_embeddings()
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear  # not in 4 bits, which cannot be adapted as a parameter
        and module is not head
        and name not in unfit
        and (not asked or _is_named(name, asked))
        and not _is_named(name, converted.target_modules)
    ]


def _is_named(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def without_adapters(model: Any) -> str:
    """Return a note on the weights that get no adapter, by kind of layer; empty if they are few.

    Embeddings and the output layer are not counted.
    """
    counted = {id(_adapted(module)) for module in model.modules() if hasattr(module, "lora_A")}
    edges = [model.get_output_embeddings(), *(one for one in model.modules() if isinstance(one, torch.nn.Embedding))]
    counted |= {id(parameter) for edge in edges if edge is not None for parameter in edge.parameters()}
    kinds: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            kind = re.sub(r"^.*\.[0-9]+\.|^base_model\.model\.|\.base_layer|\.weight$", "", name)
            kinds[kind if id(parameter) not in counted else ""] += int(
                getattr(parameter, "ds_numel", parameter.numel())
            )
    total = kinds.total()
    large = sorted(kind for kind, count in kinds.items() if kind and count > total / 50)
    if not large:
        return ""
    share = sum(kinds[kind] for kind in large) / total
    listed = ", ".join(large[:4]) + (", ..." if len(large) > 4 else "")
    return f"lora: {listed} ({100 * share:.0f} % of the weights) get no adapters and stay as they are"


def _adapted(module: Any) -> Any:
    """Return the parameter that an adapter changes."""
    name = getattr(module, "parameter_name", "weight")
    return getattr(module.get_base_layer(), name, None)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROWS = 64
"""Resized embeddings have a multiple of so many rows, for faster matrix products."""
Quantize = Callable[[Any, Any], None]
"""Converts a model's linear layers to 4 bits, by a ``BitsAndBytesConfig``."""


def make(
    config: Config, settings: dict[str, Any], tokenizer: Any, world: World, without_weights: Quantize | None = None
) -> Any:
    """Make the model, partitioned from the start under ZeRO-3; one that cannot be made is a ``ConfigError``.

    ``without_weights`` makes a dry run's model: of the shape of ``model.name``, without weights; it converts them to 4
    bits.
    """
    # transformers finds this object while it lives, and partitions parameters as they are made.
    partitioning = HfDeepSpeedConfig(settings) if config.zero.stage == 3 else None
    torch.manual_seed(config.training.seed)
    if config.model.name:
        model = _from_shape(config, world, without_weights) if without_weights else _from_weights(config, world)
    else:
        model = _from_config(config, tokenizer, world)
    vocabulary = model.config.get_text_config().vocab_size
    if config.tokenizer.special_tokens and len(tokenizer) > vocabulary:
        # New rows are drawn around the mean of the others (transformers), with ``training.seed``.
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=_ROWS)
        vocabulary = model.config.get_text_config().vocab_size
    del partitioning
    if world.on_gpu and config.model.quantization != "none":
        # Several weights at a time were whole on the GPU before their conversion to 4 bits.
        torch.cuda.empty_cache()
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"model: its vocabulary has {vocabulary} tokens, fewer than the tokenizer's {len(tokenizer)}; "
            "use the model's own tokenizer (tokenizer.name empty), or a matching one"
        )
    use_summed_loss(model)
    if config.zero.stage == 3:
        gather_experts_whole(model)
    inner, by_turn = model, next(experts_by_turn(model), None) is not None
    if config.lora.rank:
        model = add_lora(model, config)
        if config.model.overrides and not config.lora.merge:
            world.note("model.overrides: adapters saved alone do not have them; set them where the base is loaded")
        if not config.lora.targets and (note := without_adapters(model)):
            world.note(note)
    refuse_left_out(model, by_turn, config, world.size)
    activations.set_up(inner, config)
    return model


def count_parameters(model: Any) -> int:
    """Return the number of a model's parameters over all ranks.

    ``ds_numel`` is a parameter's whole size under ZeRO-3; bitsandbytes packs two 4-bit weights into a byte.
    """
    return sum(
        int(getattr(parameter, "ds_numel", parameter.numel())) * (2 if hasattr(parameter, "quant_state") else 1)
        for parameter in model.parameters()
    )


def _from_config(config: Config, tokenizer: Any, world: World) -> Any:
    bare = bare_config(config, len(tokenizer))
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(bare, name, getattr(tokenizer, name))
    try:
        # Random numbers are drawn on the weights' device: seconds on a GPU, minutes on a CPU for large models.
        with world.device if config.zero.stage < 3 else torch.device("cpu"):
            return AutoModelForCausalLM.from_config(bare, dtype=DTYPES[config.training.precision], **_attention(config))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # model types raise various errors about their sizes and names
        raise ConfigError(f"model.config: {first_line(error)}") from None


def _from_weights(config: Config, world: World) -> Any:
    name = config.model.name
    given = {"config": named_config(config.model)} if config.model.overrides else {}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=DTYPES[config.training.precision], **given, **_attention(config), **_quantization(config, world)
        )
    except Exception as error:
        if type(error) not in FAILURES and not isinstance(error, OSError | ValueError | ImportError):
            raise
        stage = " with zero.stage=3" if config.zero.stage == 3 else ""
        raise ConfigError(f"model.name: {name} cannot be loaded{stage}: {first_line(error)}") from error
    refuse_quantized(config, model.config)
    _keep_quantized(model, DTYPES[config.training.precision])
    return model


def _keep_quantized(model: Any, dtype: torch.dtype) -> None:
    """Keep bitsandbytes from repacking 4-bit weights when an evaluation runs on a CPU that has AVX512-BF16.

    Scales are rounded to bf16 there, so the frozen base would change under the adapters (``nn/modules.py``,
    ``Linear4bit.forward``), and layers narrower than a block of 64 fail. Weights that were saved in 4 bits would be
    computed in the data type that was saved with them, instead of ``dtype``.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            module.compute_dtype = dtype


def _from_shape(config: Config, world: World, quantize: Quantize) -> Any:
    name = config.model.name
    shape = named_config(config.model)
    try:
        if getattr(shape, "quantization_config", None) is not None:
            raise ConfigError(f"model.name: {name} has quantized weights, which a dry run cannot make")
        quantization = _quantization(config, world).get("quantization_config")
        # Weights in 4 bits are moved to the GPU one by one; the host never holds all of them.
        with torch.device("cpu" if quantization is None else "meta"):
            model = AutoModelForCausalLM.from_config(
                shape, dtype=DTYPES[config.training.precision], **_attention(config)
            )
        if quantization is not None:
            quantize(model, quantization)
        return model
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.name: {name} cannot be made: {first_line(error)}") from None


def _attention(config: Config) -> dict[str, str]:
    return {} if config.model.attention == "auto" else {"attn_implementation": config.model.attention}


def _quantization(config: Config, world: World) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for linear layers in 4 bits (QLoRA, arXiv 2305.14314)."""
    if config.model.quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[config.training.precision],
    )
    # Weights are quantized on their final device.
    return {"quantization_config": settings, "device_map": {"": world.device}}
