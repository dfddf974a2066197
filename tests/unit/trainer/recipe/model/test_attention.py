"""Documents of a packed row do not see each other, or packing is refused."""

import sys
from functools import partial
from typing import Any, cast

import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.model import attention
from small_shape import SMALL_SHAPE, OneRank
from transformers import AutoConfig, AutoModelForCausalLM


def model_of(kind: str, **values: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL_SHAPE, **values}))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
        ("mistral", {"sliding_window": 5}),
        ("phi", {}),
    ],
)
def test_transformers_own_models_keep_documents_apart(kind, values):
    ranks: Any = OneRank()
    assert attention.set_up(model_of(kind, **values), Config(), ranks) is False
    assert ranks.said == []


def leaking(plain: Any, *inputs: Any, position_ids: Any, **others: Any) -> Any:
    """Without the positions documents see each other."""
    return plain(*inputs, **others)


def shifted(plain: Any, *inputs: Any, position_ids: Any, **others: Any) -> Any:
    """Isolated, but a document's scores depend on the row's length."""
    output = plain(*inputs, position_ids=position_ids, **others)
    output.logits = output.logits * (1.0 + position_ids.shape[1])
    return output


@pytest.mark.parametrize(
    ("kind", "forward", "words"),
    [
        ("llama", leaking, "documents of one row see each other in llama"),
        ("mamba", None, "documents of one row see each other in mamba"),
        ("llama", shifted, r"a document gives other logits in a packed row than alone in llama \(.*\)"),
    ],
)
def test_models_in_which_documents_depend_on_each_other_refuse_packing(kind, forward, words):
    settings = AutoConfig.for_model("mamba", vocab_size=320, hidden_size=32, state_size=4, num_hidden_layers=1)
    model: Any = AutoModelForCausalLM.from_config(settings) if kind == "mamba" else model_of(kind)
    if forward is not None:
        model.forward = partial(forward, model.forward)
    with pytest.raises(ConfigError, match=f"^data.packing: {words}; use data.packing=false$"):
        attention.set_up(model, Config(), OneRank())


MIXTURE = {"hidden_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


WITHIN_ATTENTION = {"num_local_experts": 8, "num_key_value_heads": 4, "kv_channels": 64, "intermediate_size": 512}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "jetmoe"])
def test_a_mixture_whose_experts_round_by_their_number_of_tokens_isolates_documents(kind):
    model = model_of(kind, **MIXTURE, **(WITHIN_ATTENTION if kind == "jetmoe" else {"num_local_experts": 4}))
    ids = torch.arange(10)[None]
    before = model(input_ids=ids).logits
    assert attention.crossing(model, cast(Any, OneRank()), varlen=False) == ""
    assert torch.equal(model(input_ids=ids).logits, before), "its experts are its own again"
    model.forward = partial(leaking, model.forward)
    assert "see each other" in attention.crossing(model, cast(Any, OneRank()), varlen=False)


def test_logits_in_fp32_of_weights_in_bf16_have_the_rounding_of_bf16():
    model = model_of("llama", hidden_size=256, head_dim=64).bfloat16()
    plain = model.forward

    def forward(**inputs: Any) -> Any:
        output = plain(**inputs)
        output.logits = output.logits.float()
        return output

    def halved(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits * (1.0 + 0.5 * (inputs["input_ids"].shape[1] > 13))
        return output

    model.forward = forward
    assert attention.crossing(model, cast(Any, OneRank()), varlen=False) == ""
    model.forward = halved
    assert "other logits in a packed row" in attention.crossing(model, cast(Any, OneRank()), varlen=False)


SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"]}


def by_document(query: Any, key: Any, value: Any, borders: Any, *_: Any, **named: Any) -> Any:
    """Compute what PyTorch's variable-length attention does on GPUs, document by document."""
    parts: list[torch.Tensor] = []
    for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        k, v = (one.repeat_interleave(len(q) // len(one), 0) for one in (k, v))
        apart = torch.arange(end - start)[:, None] - torch.arange(end - start)
        window = named["window_size"][0]
        seen = (apart >= 0) & ((apart <= window) if window >= 0 else True)
        parts.append(((q @ k.mT * named["scale"]).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("mistral", {"sliding_window": 16}, ""),
        ("qwen2_moe", {"sliding_window": 64, "use_sliding_window": True, **SLIDING}, ""),
        ("qwen2_moe", {"sliding_window": 16, "use_sliding_window": True, **SLIDING}, "do not pass"),
        ("llama4_text", {"attention_chunk_size": 16, "intermediate_size_mlp": 48}, "in chunks of 16 tokens"),
        ("llama4_text", {"attention_chunk_size": 64, "intermediate_size_mlp": 48}, ""),
    ],
)
def test_variable_length_attention_is_not_used_where_windows_are_in_masks_alone(kind, values, problem, monkeypatch):
    monkeypatch.setattr(attention, "_varlen_attn", by_document)
    model = model_of(kind, **{**MIXTURE, "hidden_size": 32, "num_local_experts": 4, **values})
    before = model.config._attn_implementation
    found = attention._try_varlen(model, cast(Any, OneRank()), 64)
    assert problem in found
    assert bool(found) == bool(problem)
    assert model.config._attn_implementation == (before if problem else attention.VARLEN)


class Kernels:
    """What cuDNN computes on GPUs, by plain PyTorch."""

    @staticmethod
    def attend(query: Any, key: Any, value: Any, borders: Any, longest: int, scale: float, window: int) -> Any:
        out = by_document(query, key, value, borders, scale=scale, window_size=(window - 1 if window else -1, 0))
        return out.contiguous(), torch.zeros(query.shape[:2])

    @staticmethod
    def attend_backward(grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *settings: Any) -> Any:
        borders, _, scale, window = settings
        grads = [torch.zeros_like(one) for one in (query, key, value)]
        each = query.shape[1] // key.shape[1]
        for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            apart = torch.arange(end - start)[:, None] - torch.arange(end - start)
            seen = (apart >= 0) & ((apart < window) if window else True)
            for head in range(query.shape[1]):
                q, g = query[start:end, head], grad[start:end, head]
                k, v = (one[start:end, head // each] for one in (key, value))
                shares = (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
                scores = shares * (g @ v.mT - (g * out[start:end, head]).sum(-1, keepdim=True)) * scale
                grads[0][start:end, head] = scores @ k
                grads[1][start:end, head // each] += scores.mT @ q
                grads[2][start:end, head // each] += shares.mT @ g
        return tuple(grads)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_cudnn_gets_the_documents_and_its_gradients_arrive(window, compiled, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{attention.__package__}.kernels", cast(Any, Kernels))
    monkeypatch.setattr(attention, "_varlen_attn", by_document)
    torch.manual_seed(0)
    query, key, value = inputs = [torch.randn(2, heads, 12, 8, requires_grad=True) for heads in (4, 2, 2)]
    borders = torch.tensor([0, 7, 12, 24], dtype=torch.int32)

    def attend() -> torch.Tensor:
        named = {"cu_seq_lens_q": borders, "sliding_window": window, "scaling": 0.3}
        return attention.varlen_attention(cast(Any, None), query, key, value, None, **named)[0]

    results: list[list[torch.Tensor]] = []
    for by_cudnn in (False, True):
        monkeypatch.setattr(attention, "_by_cudnn", by_cudnn)
        out = (torch.compile(attend, backend="aot_eager") if compiled and by_cudnn else attend)()
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        assert torch.allclose(expected, found, atol=1e-5)


def test_borders_are_of_documents_rows_and_padding_and_heads_of_a_layer_must_divide_among_ranks():
    numbers = torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]])
    batch = attention.isolate({"input_ids": numbers, "sequence_ids": numbers}, varlen=True)
    assert (batch["cu_seq_lens"].tolist(), batch["cu_seq_lens"].dtype) == ([0, 2, 3, 4, 8], torch.int32)
    named = attention.attention_arguments(batch)
    assert set(named) == {"input_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert named["max_length_q"] == 4
    assert set(attention.isolate(batch, varlen=False)) == {"input_ids", "cu_seq_lens"}
    heads = {"hidden_size": 96, "num_attention_heads": 12, "per_layer_config": {1: {"num_key_value_heads": 3}}}
    settings = AutoConfig.for_model("llama", **SMALL_SHAPE | {"num_key_value_heads": 4} | heads)
    assert "cannot divide the model's 3 key/value heads" in attention.refusal(settings, 64, 4)
    assert attention.refusal(settings, 64, 12) == ""


@pytest.mark.parametrize(("kind", "values"), [("llama", {}), ("mistral", {"sliding_window": 4})])
def test_without_borders_the_registered_attention_is_that_of_sdpa(kind, values):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = model_of(kind, **values)
    ids = torch.randint(1, 300, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    expected = [model(input_ids=ids, attention_mask=mask).logits, model(input_ids=ids).logits]
    answer = model.generate(input_ids=ids[:1], max_new_tokens=5, do_sample=False)
    ALL_ATTENTION_FUNCTIONS.register(attention.VARLEN, attention.varlen_attention)
    model.set_attn_implementation(attention.VARLEN)
    padded = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(padded[mask == 1], expected[0][mask == 1], atol=1e-6)
    assert torch.equal(model(input_ids=ids).logits, expected[1])
    assert torch.equal(model.generate(input_ids=ids[:1], max_new_tokens=5, do_sample=False), answer)
