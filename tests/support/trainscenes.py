"""Recorded trainings with evaluations, checkpoints and FLOPs: a Llama of 1.2B parameters on H200s, or on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from ftmon.protocol.host.machine import ModelFlops, causal_pairs_of_rows
from ftmon.protocol.messages.telemetry import Checkpoint, Evaluation, Hello, Plan, Step
from ftmon.protocol.messages.wire import Frame, Message
from streams import Stream, write

FLOPS = ModelFlops(token=6 * 1_235_814_400, pair=12 * 16 * 32 * 64)
EVERY = 50


def frames(
    ranks: int = 4, steps: int = 400, planned: int = 600, cuda: bool = True, devices: bool = True
) -> list[Frame]:
    stream = Stream(ranks=ranks, steps=steps, step_s=0.62, cuda=cuda, devices=devices, finished=False, spike_every=130)
    found: list[Frame] = []
    for frame in stream.frames():
        for message in _messages(frame, planned, cuda):
            found.append(Frame(len(found) + 1, frame.t, message))
    return found


def _messages(frame: Frame, planned: int, cuda: bool) -> Iterator[Message]:
    message = frame.message
    if isinstance(message, Hello):
        yield msgspec.structs.replace(message, flops=FLOPS, matmul_precision="bf16" if cuda else "fp32")
    elif isinstance(message, Plan):
        yield msgspec.structs.replace(
            message, total_steps=planned, epochs=3.0, evaluate_every=EVERY, evaluate_at_end=True, checkpoint_every=100
        )
    elif isinstance(message, Step):
        flops = FLOPS.of(message.tokens, causal_pairs_of_rows(message.tokens, message.samples))
        yield msgspec.structs.replace(message, flops=flops, label_tokens=message.tokens // 2)
        if message.rank == 0 and message.step % EVERY == 0 and message.loss is not None:
            loss = message.loss + 0.05 + 0.0008 * max(0, message.step - 250)
            figures = {"label_tokens": 48_000, "seconds": 4.2, "best": message.step <= 250}
            yield Evaluation(0, message.step, frame.t, "validation", loss, **figures)
        if message.rank == 0 and message.step % 100 == 0:
            path = f"out/llama3/checkpoints/step-{message.step}"
            yield Checkpoint(0, message.step, frame.t, path, 7 * 2**30, 9.5, best=message.step == 200)
    else:
        yield message


def trained(path: Path, **options: int | bool) -> Path:
    return write(path, frames(**options))  # pyright: ignore[reportArgumentType]
