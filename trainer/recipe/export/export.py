"""Writes the final model into a temporary folder, compares it, then renames the folder."""

import contextlib
import copy
import importlib.metadata
import os
import shutil
import sqlite3
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from ....protocol.errors import FtmonError
from ....protocol.run.environment import RUN_ENV
from ....protocol.run.rundir import RunDir
from ....protocol.text import duration
from ..config import write
from ..config.schema import Config
from ..distributed import World
from ..model.load import add_lora
from ..model.tokenizer import set_end_tokens
from ..monitor import Progress, activity, probe
from ..state import TrainState
from ..support import replace_folder


class ExportError(FtmonError):
    """The written model differs from the trained one."""


def gathered_weights(engine: Any, model: Any, config: Config, world: World) -> dict[str, torch.Tensor] | None:
    """Return all weights and buffers by name, on the CPU of rank 0; None elsewhere. All ranks call this."""
    if config.zero.stage == 3:
        whole = engine._zero3_consolidated_16bit_state_dict()
        # Merging adapters changes weights in place: on the CPU those of the training itself, without a copy.
        if whole and _merges(config, world):
            clones = {id(one): one.clone() for one in whole.values()}
            return {name: clones[id(one)] for name, one in whole.items()}
        return whole
    if not world.is_first:
        return None
    quantized = config.model.quantization != "none"
    own = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    copies: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if quantized and not is_adapter(name) and (name not in own or not config.lora.merge):
            continue  # bitsandbytes' auxiliary tensors; and the base, if adapters alone are saved
        if is_quantized(tensor):
            copies[id(tensor)] = dequantized(tensor).cpu()
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=_merges(config, world))
        result[name] = copies[id(tensor)]
    return result


def _merges(config: Config, world: World) -> bool:
    return config.lora.rank > 0 and config.lora.merge and not world.on_gpu


def live(model: Any, config: Config) -> Generator[tuple[str, Any]]:
    """Yield every parameter of the training, whole, one by one, not from what a file was written from. All ranks."""
    import deepspeed

    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]) if config.zero.stage == 3 else contextlib.nullcontext():
            yield name, dequantized(parameter) if is_quantized(parameter) else parameter.detach()


def is_quantized(tensor: Any) -> bool:
    """Return whether a parameter is held in 4 bits."""
    return type(tensor).__name__ == "Params4bit"


def dequantized(parameter: Any) -> torch.Tensor:
    """Return the dequantized weights of a parameter in 4 bits, as the forward uses them."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def plain_name(name: str) -> str:
    """Return the name of a parameter of an adapted model in the model without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is part of an adapter."""
    return ".lora_" in name or ".modules_to_save." in name


def empty_model(model: Any) -> Any:
    """Return a model like this one without adapters and without allocated weights."""
    from transformers import AutoModelForCausalLM

    settings = copy.deepcopy(model.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config  # dequantized weights are written
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(settings, dtype=model.dtype)
    made.generation_config = model.generation_config
    return made


def merged(model: Any, weights: dict[str, torch.Tensor], config: Config) -> Any:
    """Return the model with its adapters merged, on the CPU: the same for every ZeRO stage; else ``ExportError``."""
    fresh = add_lora(empty_model(model.get_base_model()), config)
    missing, unexpected = fresh.load_state_dict(weights, strict=False, assign=True)
    if missing or unexpected:
        what = f"missing {', '.join(missing[:3])}" if missing else f"unknown {', '.join(unexpected[:3])}"
        raise ExportError(f"the adapters cannot be merged: {what}")
    return fresh.merge_and_unload()


def compare(model: Any, folder: Path, config: Config, world: World, progress: Progress | None = None) -> int:
    """Compare a written model with the training's weights; return the number of equal tensors. All ranks call this.

    A difference is an ``ExportError`` in every rank.
    """
    adapts = config.lora.rank > 0 and not config.lora.merge
    written: _Written | None = None
    if world.is_first:
        # The base was loaded by its name, unless it has none.
        base = _reload(folder / "base") if adapts and (folder / "base").is_dir() else None
        tensors = load_file(folder / "adapter_model.safetensors") if adapts else _reload(folder)
        written = _Written(tensors, model, config, base)
    for done, (name, tensor) in enumerate(live(model, config)):
        if progress is not None:
            progress.report(done, "comparing tensors")
        if written is not None:
            written.compare(name, tensor.cpu)
    problem = world.share_text(written.result() if written is not None else "")
    if problem:
        raise ExportError(f"the written model differs from the trained one: {problem}")
    return written.count if written is not None else 0


class _Written:
    """Compares the tensors of a written model with those of a training, one by one, until one differs."""

    def __init__(self, tensors: dict[str, torch.Tensor], model: Any, config: Config, base: Any = None) -> None:
        self._tensors = tensors
        self._adapters = config.lora.rank > 0 and not config.lora.merge
        self._base: dict[str, torch.Tensor] | None = base
        self._layers = adapted(model) if config.lora.rank and config.lora.merge else {}
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        self._seen: set[str] = set()
        self._problem = ""
        self.count = 0  # Number of equal tensors

    def compare(self, name: str, read: Callable[[], torch.Tensor]) -> None:
        """Compare a parameter of the training, which ``read`` returns."""
        if self._problem:
            return
        layer, part = self._layers.get(name, (None, ""))
        if layer is not None:
            parts = self._pending.setdefault(layer.name, {})
            parts[part] = read()
            if len(parts) < layer.parts:
                return
            self._problem = self._differs_merged(layer, self._pending.pop(layer.name))
        elif not self._layers or not is_adapter(name):
            self._problem = self._differs(name, read())
        self.count += not self._problem

    def result(self) -> str:
        """Return the first difference in words, or an empty text."""
        if not self._problem and self._adapters:  # in a whole model a tied weight has two names
            rest = sorted(set(self._tensors) - self._seen)
            return f"{rest[0]} was not trained" if rest else ""
        return self._problem

    def _differs(self, name: str, tensor: torch.Tensor) -> str:
        if self._adapters and not is_adapter(name):
            return "" if self._base is None else _difference(name, tensor, self._base.get(plain_name(name)))
        key = name.replace(".default", "") if self._adapters else plain_name(name)
        if key.endswith(".lora_magnitude_vector.weight"):
            key = key.removesuffix(".weight")  # as peft writes it
        self._seen.add(key)
        return _difference(key, tensor, self._read(key, tensor.dtype))

    def _read(self, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a written tensor as it was trained: transformers reads some (routers, sinks) as fp32 from any file."""
        found = self._tensors.get(key)
        if found is None or found.dtype != torch.float32 or found.is_meta:
            return found
        written = found.to(dtype)
        return written if torch.equal(written.float(), found) else found

    def _differs_merged(self, layer: "Adapted", parts: dict[str, torch.Tensor]) -> str:
        found = self._read(layer.name, parts["base"].dtype)
        self._seen.add(layer.name)
        return f"{layer.name} is missing" if found is None else layer.difference(found, parts)


def _difference(name: str, wanted: torch.Tensor, found: torch.Tensor | None) -> str:
    if found is None:
        return f"{name} is missing"
    if found.is_meta and found.shape == wanted.shape:
        return ""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{name} is {list(found.shape)} {found.dtype}, not {list(wanted.shape)} {wanted.dtype}"
    return "" if torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)) else name


def _reload(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a written model as ``from_pretrained`` reads them."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", device_map={"": "cpu"})
    return model.state_dict()


@dataclass(frozen=True)
class Adapted:
    """A weight with a low-rank adapter."""

    name: str  # Its name in the model without adapters
    scaling: float
    parts: int  # Number of tensors: the base, A, B and with DoRA the magnitudes
    transposed: bool  # Whether the weight is stored as inputs x outputs
    experts: int = 1

    def difference(self, found: torch.Tensor, parts: dict[str, torch.Tensor]) -> str:
        """Return how a written tensor differs from base + scaling x B A, to the rounding of the data type, in words."""
        base = parts["base"]
        if found.shape != base.shape:
            return f"{self.name} is {list(found.shape)}, not {list(base.shape)}"
        if found.is_meta:
            return ""
        for one, before, delta in self._slices(found, parts):
            wanted = before.float() + delta
            size = before.float().abs() + delta.abs()
            if "magnitude" in parts:  # DoRA: the norm of each row is replaced by a trained magnitude
                factor = parts["magnitude"].float().view(-1, 1) / wanted.norm(dim=1, keepdim=True)
                wanted, size = wanted * factor, 4 * size * factor
            # One rounding of the delta and one of the sum, each half a unit in the last place.
            room = torch.finfo(found.dtype).eps * (size + wanted.abs()) + 1e-6 * wanted.abs().max()
            if bool(((one.float() - wanted).abs() > room).any()):
                return f"{self.name} is not its base plus its adapter"
        return ""

    def _slices(
        self, found: torch.Tensor, parts: dict[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield, by expert, the written weight, the base and scaling x B A, each as outputs x inputs.

        The rows of A are grouped by expert, and the columns of B by rank (peft 0.21, ``ParamWrapper``).
        """
        base, a, b = parts["base"], parts["A"].float(), parts["B"].float()
        rank = len(a) // self.experts
        for expert in range(self.experts):
            one, before = (found[expert], base[expert]) if base.ndim == 3 else (found, base)
            delta = self.scaling * (b[:, expert :: self.experts] @ a[expert * rank : (expert + 1) * rank])
            yield (one.T, before.T, delta) if self.transposed else (one, before, delta)


_PARTS = {"lora_A": "A", "lora_B": "B", "lora_magnitude_vector": "magnitude"}


def adapted(model: Any) -> dict[str, tuple[Adapted, str]]:
    """Return for each parameter of an adapted linear layer or of experts the layer, and which part it is.

    Layers with other kinds of adapters are left out.
    """
    from peft.tuners.lora.layer import ParamWrapper

    result: dict[str, tuple[Adapted, str]] = {}
    for name, module in model.named_modules():
        if "default" not in getattr(module, "lora_A", ()):
            continue
        wraps = isinstance(module, ParamWrapper)
        parameter = module.parameter_name if wraps else "weight"
        base, inner = module, name
        while hasattr(base, "base_layer"):
            base, inner = base.base_layer, f"{inner}.base_layer"
        if not wraps and not isinstance(base, torch.nn.Linear | Conv1D):
            continue
        names = [own for own in _PARTS if "default" in getattr(module, own, ())]
        layer = Adapted(
            f"{plain_name(name)}.{parameter}",
            float(module.scaling["default"]),
            len(names) + 1,
            bool(getattr(base, "is_transposed", False)) if wraps else isinstance(base, Conv1D),
            module.num_experts if wraps else 1,
        )
        result[f"{inner}.{parameter}"] = layer, "base"
        for own in names:
            result[f"{name}.{own}.default.weight"] = layer, _PARTS[own]
    return result


def rehearse_export(model: Any, config: Config, world: World) -> None:
    """Check, without the weights, that the final model will be written, read back and compared. All ranks call this.

    Names and shapes go the whole way on the meta device, and one small layer of each adapted kind is merged. A failure
    is an ``ExportError`` in every rank.
    """
    problem = ""
    if world.is_first:
        try:
            with torch.random.fork_rng(devices=[]):
                problem = _rehearse(model, config) or (_merge_small(model, config) if config.lora.merge else "")
        except Exception as error:  # transformers and peft raise their own, by model type
            problem = (str(error).strip() or repr(error)).splitlines()[0]
    problem = world.share_text(problem)
    if problem:
        raise ExportError(
            f"rehearsal: the final model could not be written after the training: {problem}; set "
            f"lora.merge={str(not config.lora.merge).lower()}, other lora.targets, or output.save_model=false with "
            "checkpoint.at_end=true"
        )


def _rehearse(model: Any, config: Config) -> str:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    whole = empty_model(model.get_base_model() if config.lora.rank else model)
    if config.lora.rank:
        whole = add_lora(whole, config)
        known = set(model.state_dict())
        if other := next((name for name in whole.state_dict() if name not in known), ""):
            return f"{other} is not trained"
    if config.lora.rank and not config.lora.merge:
        adapters = {name: tensor for name, tensor in whole.state_dict().items() if is_adapter(name)}
        tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(whole, adapters)
        lost = next(filter(is_adapter, set_peft_model_state_dict(whole, tensors).missing_keys), "")
        if lost:
            return f"peft {importlib.metadata.version('peft')} would not load {lost}"
    else:
        whole = whole.merge_and_unload() if config.lora.rank else whole
        content = revert_weight_conversion(whole, whole.state_dict())
        settings = {"config": whole.config, "dtype": whole.dtype, "device_map": {"": "meta"}}
        tensors = type(whole).from_pretrained(None, state_dict=content, **settings).state_dict()
    written = _Written(tensors, model, config)
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None) if is_quantized(parameter) else None
        shape = getattr(parameter, "ds_shape", parameter.shape) if state is None else state.shape
        written.compare(name, lambda shape=shape: torch.empty(shape, device="meta"))
    return written.result()


def _merge_small(model: Any, config: Config) -> str:
    """Merge a small layer of each kind that has adapters; return a difference from base + scaling x B A in words."""
    from peft import LoraConfig, inject_adapter_in_model

    for experts, transposed in {(layer.experts > 1, layer.transposed) for layer, _ in adapted(model).values()}:
        small: Any = torch.nn.Module()
        target: dict[str, Any] = {"target_modules": ["layer"]}
        if experts:
            target = {"target_modules": [], "target_parameters": ["layer.weight"]}
            layer: Any = torch.nn.Module()
            layer.weight, layer.is_transposed = torch.nn.Parameter(torch.randn(3, 6, 4)), transposed
            small.layer = layer
        else:
            small.layer = Conv1D(6, 4) if transposed else torch.nn.Linear(4, 6)
        made: Any = inject_adapter_in_model(LoraConfig(r=2, use_dora=config.lora.kind == "dora", **target), small)
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.uniform_(parameter, 0.1, 1)
        layers = adapted(made)
        parts = {layers[name][1]: one.detach().clone() for name, one in made.named_parameters() if name in layers}
        made.layer.merge()
        ((layer, _), *_) = layers.values()
        base = made.layer.get_base_layer().weight
        if problem := layer.difference(base.detach(), parts):
            return f"peft {importlib.metadata.version('peft')} merges adapters in another way: {problem}"
    return ""


_GIB = 1 << 30


@dataclass(frozen=True)
class Results:
    """Results of a run."""

    state: TrainState
    model_type: str
    parameters: int
    trained: int
    loss: float | None = None  # Loss of the last printed step, over all ranks
    evaluation_loss: float | None = None
    best_evaluation_loss: float | None = None
    step: int = 0  # The step that the model is of; 0: the last


def text(config: Config, results: Results) -> str:
    """Return the card in Markdown, with the hub's metadata on top."""
    state, lora = results.state, config.lora
    source = config.model.name or f"random weights ({results.model_type})"
    how = "all weights"
    if lora.rank:
        how = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, {'merged' if lora.merge else 'adapters only'}"
    earlier = f"; the model is that of step {results.step:,}" if results.step not in (0, state.step) else ""
    rows: list[tuple[str, str]] = [
        ("base model", source),
        ("parameters", f"{results.parameters:,}, of which {results.trained:,} were trained ({how})"),
        ("data", f"{_data(config)}: {state.examples:,} examples (content {state.data_key})"),
        ("optimizer steps", f"{state.step:,} of {state.global_batch} examples{earlier}"),
        ("tokens", f"{state.tokens:,}, of which {state.label_tokens:,} carried loss"),
        ("precision", f"{config.training.precision}, ZeRO-{config.zero.stage}, {state.ranks} ranks"),
    ]
    if results.loss is not None:
        rows.append(("loss of the last step", f"{results.loss:.4f}"))
    for name, loss in (("last", results.evaluation_loss), ("best", results.best_evaluation_loss)):
        if loss is not None:
            at = f" (step {state.best_evaluation_step:,})" if name == "best" and state.best_evaluation_step else ""
            rows.append((f"{name} evaluation loss", f"{loss:.4f}{at}"))
    rows += _recorded()
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    name = config.output.push.rpartition("/")[2] or config.run.name or "model"
    return (
        f"{_metadata(config)}# {name}\n\nTrained with ftmon.\n\n| | |\n| --- | --- |\n{table}\n\n"
        f"## Configuration\n\n```yaml\n{write.dump(config).strip()}\n```\n"
    )


def _data(config: Config) -> str:
    data = config.data
    return data.path or data.name or ", ".join(f"{file.path} (weight {file.weight:g})" for file in data.files)


def _metadata(config: Config) -> str:
    lines = ["---", "pipeline_tag: text-generation", "tags:", "- ftmon"]
    lines.append(f"library_name: {'peft' if config.lora.rank and not config.lora.merge else 'transformers'}")
    if config.model.name and not Path(config.model.name).exists():
        lines.append(f"base_model: {config.model.name}")
    if config.data.name and not Path(config.data.name).exists():
        lines += ["datasets:", f"- {config.data.name}"]
    return "\n".join([*lines, "---", "", ""])


def _recorded() -> list[tuple[str, str]]:
    """Return figures of this run's recording, as far as it is written; empty without one."""
    run = os.environ.get(RUN_ENV)
    if not run:
        return []
    place = f"{RunDir(run).recording.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(place, uri=True, timeout=2.0)) as connection:
            return _figures(connection)
    except sqlite3.Error:
        return []


def _figures(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    ranks, tokens, training_us, mfu = connection.execute(
        "SELECT count(DISTINCT rank), sum(tokens), sum(training_us), avg(mfu) FROM throughput"
    ).fetchone()
    if not training_us:
        return []
    seconds = training_us / 1e6 / ranks
    found = [("time in steps", duration(seconds)), ("tokens a second", f"{tokens / seconds:,.0f} over all ranks")]
    if mfu:
        found.append(("MFU", f"{100 * mfu:.1f} %"))
    (peak,) = connection.execute("SELECT max(allocated_peak) FROM steps").fetchone()
    if peak:
        found.append(("peak memory of a rank", f"{peak / _GIB:.2f} GiB"))
    return found


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a model repository, created (private) if it does not exist; return a line on the result.

    The token is the one of ``hf auth login`` or ``HF_TOKEN``. Raises ``FtmonError`` if it could not be uploaded; the
    model is on the disk.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload model trained with ftmon")
    except Exception as error:  # network, hub, token and name errors have classes of their own
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise FtmonError(
            f"the model could not be pushed to {repository}: {why}; it is whole in {folder}: "
            f"hf upload {repository} {folder}"
        ) from None
    return f"pushed to {api.endpoint}/{repository}"


_TOKEN_BYTES = 150  # Of a token in tokenizer.json: 70 to 130 with merges
_CARD_BYTES = 1 << 16  # The model's card, its configuration and the like


def export_bytes(model: Any, tokenizer: Any, config: Config) -> int:
    """Return the bytes that ``save_model`` writes, those beside the weights roughly."""
    lora = config.lora
    whole = not lora.rank or lora.merge
    total = _CARD_BYTES + _TOKEN_BYTES * len(tokenizer)
    for name, one in model.named_parameters():
        if is_adapter(name) != whole or (not whole and not config.model.name):
            state = getattr(one, "quant_state", None) if is_quantized(one) else None
            count = state.shape.numel() if state is not None else int(getattr(one, "ds_numel", one.numel()))
            total += count * (one.dtype if state is None else state.dtype).itemsize
    return total


def save_model(
    engine: Any,
    model: Any,
    tokenizer: Any,
    config: Config,
    folder: Path,
    world: World,
    results: Results,
    progress: Progress | None = None,
) -> int:
    """Write the final model, its tokenizer and its card, for ``AutoModelForCausalLM.from_pretrained``.

    All ranks call this. It returns the number of tensors that were compared with the training's and are equal. Files
    that cannot be written, or contain other weights, are an ``ExportError`` in every rank.
    """
    part = folder.with_name(folder.name + ".part")
    gathered = gathered_weights(engine, model, config, world)
    problem = ""
    if world.is_first and gathered is not None:
        try:
            shutil.rmtree(part, ignore_errors=True)
            _write(model, gathered, tokenizer, config, part, folder)
            (part / "README.md").write_text(text(config, results), encoding="utf-8")
        except Exception as error:  # safetensors raises its own, tokenizers a bare one
            shutil.rmtree(part, ignore_errors=True)
            problem = (str(error).strip() or repr(error)).splitlines()[0]
    del gathered
    problem = world.share_text(problem)
    if problem:
        raise ExportError(f"the final model cannot be written to {folder}: {problem}")
    try:
        equal = compare(model, part, config, world, progress)
    except ExportError:
        if world.is_first:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if world.is_first:
        replace_folder(folder, part)
    world.barrier()
    return equal


def push_last(folder: Path, repository: str, world: World) -> None:
    """Leave the process group, then upload a folder from rank 0. All ranks call this, and do not communicate after it.

    An upload may take hours: ranks that wait for it in a collective would end the run at its timeout.
    """
    world.leave()
    if world.is_first:
        with probe().phase("checkpoint"), activity("export", f"pushing to {repository}"):
            try:
                world.log(push(folder, repository))
            except FtmonError as error:
                world.note(str(error))


def _write(model: Any, gathered: dict[str, Any], tokenizer: Any, config: Config, part: Path, final: Path) -> None:
    plain = model.get_base_model() if config.lora.rank else model
    _settle_config(plain, tokenizer, config)
    if not config.lora.rank:
        model.save_pretrained(str(part), state_dict=gathered)
    elif config.lora.merge:
        merged(model, gathered, config).save_pretrained(str(part))
    else:
        if not config.model.name:
            # Random weights have no name to load them by, and adapters are useless without them.
            base = {plain_name(name): tensor for name, tensor in gathered.items() if not is_adapter(name)}
            plain.save_pretrained(str(part / "base"), state_dict=base)
            model.peft_config["default"].base_model_name_or_path = str(final.absolute() / "base")
        adapters = {name: tensor for name, tensor in gathered.items() if is_adapter(name)}
        model.save_pretrained(str(part), state_dict=adapters)
    tokenizer.save_pretrained(str(part))


def _settle_config(plain: Any, tokenizer: Any, config: Config) -> None:
    """Undo training's changes of the model's configuration, and set the tokens that end an answer."""
    own = config.model.config.get("use_cache", True)
    if config.model.name:
        from transformers import AutoConfig

        own = getattr(AutoConfig.from_pretrained(config.model.name), "use_cache", True)
    plain.config.use_cache = own
    set_end_tokens(plain, tokenizer)
    generation = plain.generation_config
    if generation is not None and generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
