"""Variable-length attention on a GPU: isolated documents, with the logits and gradients of each document alone."""

import itertools
from importlib.util import find_spec
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.model import attention
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]


class OneRank:
    has_values = True
    on_gpu = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    note = log

    def all_agree(self, mine: bool) -> bool:
        return mine


def model_of(kind: str, **values: Any) -> Any:
    torch.manual_seed(0)
    settings = AutoConfig.for_model(
        kind, vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, pad_token_id=0, **values,
    )  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)


def in_fp32(query: Any, key: Any, value: Any, borders: list[int], window: int) -> Any:
    """Return causal attention, document by document: a slow reference."""
    parts = []
    for start, end in itertools.pairwise(borders):
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        k, v = (one.repeat_interleave(len(q) // len(one), 0) for one in (k, v))
        apart = torch.arange(end - start, device="cuda")[:, None] - torch.arange(end - start, device="cuda")
        seen = (apart >= 0) & ((apart < window) if window else True)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.skipif(find_spec("cudnn") is None, reason="cuDNN's Python library is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "window"),
    [(4, 4, 64, 0), (8, 2, 64, 0), (14, 2, 64, 0), (4, 2, 128, 0), (4, 1, 80, 0), (4, 2, 64, 33), (2, 2, 32, 200)],
)
def test_cudnns_attention_and_its_gradients_are_those_of_each_document(heads, groups, width, window, dtype):
    if torch.cuda.get_device_capability()[0] not in attention._GENERATIONS:
        pytest.skip("cuDNN is not used on this kind of GPU")
    generator = torch.Generator("cuda").manual_seed(0)
    borders = [0, *itertools.accumulate([1, 2, 63, 64, 65, 128, 300, 511, 7, *[3] * 40])]

    def drawn(count: int) -> Any:
        return torch.randn(borders[-1], count, width, device="cuda", generator=generator).to(dtype).requires_grad_()

    inputs = [drawn(heads), drawn(groups), drawn(groups)]
    grad = torch.randn(borders[-1], heads, width, device="cuda", generator=generator)
    places = torch.tensor(borders, dtype=torch.int32, device="cuda")
    out, _ = attention._attend(*inputs, places, 512, width**-0.5, window)
    found = [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    exact = [one.detach().float().requires_grad_() for one in inputs]
    expected = in_fp32(*exact, borders, window)
    for one, right in zip(found, [expected, *torch.autograd.grad(expected, exact, grad)], strict=True):
        assert float((one.float() - right).norm() / right.norm()) < 5e-3


@pytest.mark.parametrize(("kind", "values"), [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 32})])
def test_documents_of_packed_rows_have_the_logits_and_gradients_they_have_alone(kind, values):
    model = model_of(kind, **values)
    world = cast(Any, OneRank())
    assert attention.set_up(model, Config(), world), world.said
    assert model.config._attn_implementation == attention.VARLEN
    lengths = [[100, 27, 1], [64, 64]]
    ids = torch.randint(1, 512, (2, 128), generator=torch.Generator().manual_seed(1))
    numbers = torch.tensor([[n for n, length in enumerate(row, 1) for _ in range(length)] for row in lengths])
    positions = torch.tensor([[place for length in row for place in range(length)] for row in lengths])
    batch = {"input_ids": ids, "position_ids": positions, "sequence_ids": numbers}
    moved = {name: value.cuda() for name, value in attention.isolate(batch, varlen=True).items()}
    packed = model(**attention.attention_arguments(moved), use_cache=False).logits.float()
    packed.pow(2).sum().backward()
    grads = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = []
    for row, cut in enumerate(lengths):
        alone += [model(input_ids=part[None].cuda(), use_cache=False).logits.float()[0] for part in ids[row].split(cut)]
    together = torch.cat(alone)
    assert float((packed.flatten(0, 1) - together).norm() / together.norm()) < 2e-2
    together.pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        assert float((parameter.grad.float() - grads[name]).norm() / grads[name].norm()) < 5e-2, name
