"""Real DeepSpeed steps of one rank at a cap, for ``fit_verdicts.py``.

    python bench/gpu/fit_steps.py --case JSON --length N [--stand-in] [--tiny]
    python bench/gpu/fit_steps.py --build CPUAdamBuilder

Prints ``ready`` once it has imported everything and made what needs no GPU, waits for a line on standard input, takes
``STEPS`` steps with a limited allocator, and prints one line of JSON. The environment has the rank, as torchrun sets
it.
"""

import argparse
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fit_cases import GB, Case, files_of

STEPS = 3
FULL = GB // 2
"""Where less than this is free on the GPU after a failure, it may not have been the cap that was reached."""


def take_steps(case: Case, length: int, stand_in: bool, tiny: bool) -> None:
    """Get ready, wait for the word, take the steps and say in one line what came of it."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    import deepspeed
    import torch
    from ftmon.trainer.predict import result as models

    cuda: bool = torch.cuda.is_available()
    if stand_in:
        no_compiled_operations()
    cheap_numbers(torch)
    with files_of(case, tiny) as (model_file, settings_file):
        config = models.read_config(model_file)
        settings: dict[str, Any] = json.loads(Path(settings_file).read_text())
    settings["train_micro_batch_size_per_gpu"] = case.micro_batch
    settings["train_batch_size"] = case.micro_batch * case.ranks
    settings["gradient_accumulation_steps"] = 1
    settings["steps_per_print"] = 1 << 30
    vocabulary = int(config.vocab_size)

    def make() -> Any:
        return models.make(config, torch.bfloat16, case.gradient_checkpointing, case.lora_r, "sdpa")

    model = None if case.zero_stage == 3 else make()
    print("ready", file=said)
    sys.stdin.readline()
    phases: dict[str, list[int]] = {}
    highest = [0, 0]
    row: dict[str, Any] = {"fitted": True, "fails_in": "", "stand_in": stand_in}
    phase = "init"

    def note() -> None:
        if cuda:
            phases[phase] = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            highest[:] = [max(pair) for pair in zip(highest, phases[phase], strict=True)]
            torch.cuda.reset_peak_memory_stats()

    if cuda:
        torch.cuda.set_device(0)
        torch.cuda.set_per_process_memory_fraction(case.cap_gb * GB / torch.cuda.mem_get_info()[1])
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False)
    seconds: list[float] = []
    device = "cuda" if cuda else "cpu"
    try:
        if model is None:
            with deepspeed.zero.Init(config_dict_or_path=settings):
                model = make()
        trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
        del model, trained
        note()
        for _ in range(STEPS):
            begun = time.perf_counter()
            tokens = torch.randint(0, vocabulary, (case.micro_batch, length), device=device)
            phase = "forward"
            loss = engine(input_ids=tokens, labels=tokens).loss
            note()
            phase = "backward"
            engine.backward(loss)
            del loss
            note()
            phase = "optimizer"
            engine.step()
            note()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - begun, 3))
    except torch.OutOfMemoryError as error:
        row |= {"fitted": False, "fails_in": phase, "message": str(error)[:400]}
        note()
        if torch.cuda.mem_get_info()[0] < FULL:
            row["error"] = f"the GPU itself was full: {row['message']}"
    row |= {"allocated": highest[0], "reserved": highest[1], "phases": phases, "step_s": seconds}
    if cuda:
        row["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        row["versions"] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    print(json.dumps(row), file=said)
    os._exit(0)


def cheap_numbers(torch: Any) -> None:
    """Fill large host tensors from a small pool of random numbers: some seconds less for a billion of them."""
    pool = torch.randn(1 << 20) * 0.02

    def instead(plain: Callable[..., Any]) -> Callable[..., Any]:
        def fill(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if tensor.device.type != "cpu" or tensor.numel() < len(pool) or not tensor.is_contiguous():
                return plain(tensor, *arguments, **named)
            flat, whole = tensor.view(-1), tensor.numel() // len(pool) * len(pool)
            flat[:whole].view(-1, len(pool)).copy_(pool)
            flat[whole:].copy_(pool[: tensor.numel() - whole])
            return tensor

        return fill

    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, instead(getattr(torch.Tensor, name)))


def no_compiled_operations() -> None:
    """Let functions that do nothing take the place of compiled optimizers, which allocate nothing on the GPU."""
    builders: Any = importlib.import_module("deepspeed.ops.op_builder.builder")

    class Nothing:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_, **__: 0

    builders.OpBuilder.load = lambda *_, **__: Nothing()


def build(operation: str) -> None:
    """Let DeepSpeed compile an operation."""
    import deepspeed.ops.op_builder as builders

    getattr(builders, operation)().load()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=lambda text: Case(**json.loads(text)))
    parser.add_argument("--length", type=int)
    parser.add_argument("--stand-in", action="store_true", help="functions that do nothing for compiled optimizers")
    parser.add_argument("--tiny", action="store_true", help="a shrunken model")
    parser.add_argument("--build", metavar="BUILDER", help="let DeepSpeed compile an operation")
    args = parser.parse_args()
    if args.build:
        build(args.build)
    else:
        take_steps(args.case, args.length, args.stand_in, args.tiny)


if __name__ == "__main__":
    main()
