"""Gradient checkpointing and activation offload change what is held, and no gradient."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.model import activations
from ftmon.trainer.recipe.model.activations import HostOffload, compile_ahead, mark_varying
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

ROWS, LENGTH, HIDDEN, MLP, HEADS, GROUPS = 2, 24, 32, 96, 4, 2
TOKENS = ROWS * LENGTH
FLOAT = 4
INPUT = TOKENS * HIDDEN * FLOAT
"""Bytes of a layer's input."""
SIZES = {"vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": MLP}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
MODES = {
    "none": [],
    "layers": ["model.gradient_checkpointing=layers"],
    "every-2": ["model.gradient_checkpointing=layers", "model.checkpoint_every=2"],
    "selective": ["model.gradient_checkpointing=selective"],
    "offload-inputs": ["model.gradient_checkpointing=layers", "model.activation_offload=inputs"],
    "offload-all": ["model.activation_offload=all", "model.offload_bytes=1000"],
    "offload-every-2": [
        *("model.gradient_checkpointing=selective", "model.checkpoint_every=2"),
        *("model.activation_offload=all", "model.offload_bytes=0"),
    ],
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(mode: str, kind: str = "llama", depth: int = 4, more: list[str] | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    values = {**SIZES, "num_hidden_layers": depth, **settings}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).train()
    words = [f"model.config={{model_type: {kind}}}", "model.compile=off", *MODES[mode], *(more or [])]
    activations.set_up(model, load(None, words).config)
    return model


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(TOKENS).reshape(ROWS, LENGTH) % 64
    torch.manual_seed(3)
    total = 0.0
    for _ in range(2):  # gradients accumulate
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def held_bytes(mode: str, depth: int) -> int:
    """Return the bytes alive after a forward through the decoder layers, parameters not counted."""
    model, tracker = made(mode, depth=depth), MemTracker()
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    tracker.track_external(model)
    with tracker:
        hidden = model.model(input_ids=ids, use_cache=False)[0]
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    del hidden
    return int(held["Total"]) - sum(value.nbytes for value in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_dropout": 0.3}),
        ("llama", {"attention_dropout": 0.3, "attn_implementation": "eager"}),
        ("qwen3", {"head_dim": 8}),
        ("gpt_neox", {"hidden_dropout": 0.2, "attention_dropout": 0.2}),
    ],
    ids=["llama", "attention-dropout", "eager-dropout", "qwen3", "hidden-dropout"],
)
def test_gradients_are_bitwise_those_without(kind: str, settings: dict[str, Any]) -> None:
    loss, grads = step(made("none", kind, **settings))
    for mode in MODES:
        other_loss, others = step(made(mode, kind, **settings))
        assert other_loss == loss, mode
        different = [name for name in grads if not torch.equal(grads[name], others[name])]
        assert not different, (mode, different)


def test_an_output_that_is_changed_in_place_is_kept_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)  # adds a bias in place

    def result(mode: str) -> tuple[float, dict[str, torch.Tensor]]:
        model = made(mode, "qwen2")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight += "bias" in name
        return step(model)

    (loss, grads), (kept_loss, kept) = result("none"), result("selective")
    assert kept_loss == loss
    assert not [name for name in grads if not torch.equal(grads[name], kept[name])]


def test_what_a_layer_keeps_is_what_its_mode_says() -> None:
    head = HIDDEN // HEADS
    products = HIDDEN + 2 * GROUPS * head + HIDDEN + 2 * MLP + HIDDEN  # q, k and v, o, gate and up, down
    attention = HIDDEN + HEADS  # and the log-sum-exp of each head
    # What one more layer adds, averaged over two, of which checkpoint_every=2 recomputes one.
    modes = ("none", "layers", "every-2", "selective")
    held = {mode: (held_bytes(mode, 4) - held_bytes(mode, 2)) // 2 for mode in modes}
    assert held["layers"] == INPUT
    assert held["selective"] == INPUT + TOKENS * (products + attention) * FLOAT < 0.7 * held["none"]
    assert held["every-2"] == (held["none"] + held["layers"]) // 2


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[HostOffload, torch.Tensor]]:
    """Return the tensors that are moved, each with what moves it."""
    found: list[tuple[HostOffload, torch.Tensor]] = []
    plain = HostOffload._copy_out

    def record(offload: HostOffload, tensor: torch.Tensor, *others: Any) -> None:
        found.append((offload, tensor))
        plain(offload, tensor, *others)

    monkeypatch.setattr(HostOffload, "_copy_out", record)
    return found


def test_inputs_of_recomputed_layers_are_moved_once_each_and_no_more(moved: list[Any]) -> None:
    step(made("offload-inputs"))
    assert sum(one.nbytes for _, one in moved) == 2 * 4 * INPUT  # two micro-steps, four layers


def test_everything_is_moved_once_and_never_a_parameter(moved: list[Any]) -> None:
    model = made("offload-all")
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    assert not moved
    hidden = model.model(input_ids=torch.arange(TOKENS).reshape(ROWS, LENGTH) % 64, use_cache=False)[0]
    (offload,), tensors = {one for one, _ in moved}, [one for _, one in moved]
    assert len({(one.data_ptr(), one.shape, one.stride()) for one in tensors}) == len(tensors)
    assert all(one.untyped_storage().data_ptr() not in parameters for one in tensors)
    assert all(one.nbytes >= 1000 for one in tensors)
    # What the attention and the MLP of each layer save is more than its input.
    assert sum(one.nbytes for one in tensors) > 4 * 8 * INPUT
    hidden.sum().backward()
    assert len(offload._known) == 0
    assert not offload._leaving


def test_a_model_whose_layers_are_not_marked_is_refused_and_the_setting_takes_a_boolean():
    model: Any = torch.nn.Module()
    model.config = AutoConfig.for_model("llama")
    config = load(None, ["model.config={model_type: llama}", "model.gradient_checkpointing=true"]).config
    with pytest.raises(ConfigError, match=r"^model\.gradient_checkpointing: llama has no decoder layers"):
        activations.set_up(model, config)
    for words, mode in ((("true", "yes"), "layers"), (("False", "off"), "none"), (("selective",), "selective")):
        for word in words:
            assert load(None, [f"model.gradient_checkpointing={word}"]).config.model.gradient_checkpointing == mode


@pytest.fixture
def graphs(compiling: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compile without generating code; give the function that returns how many graphs were compiled."""
    import torch._dynamo

    torch._dynamo.reset()
    eager: Any = torch._dynamo.lookup_backend("aot_eager")
    compiled: list[None] = []

    def backend(*graph: Any) -> Any:
        compiled.append(None)
        return eager(*graph)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield lambda: len(compiled)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["none", "layers", "offload-inputs", "offload-all"])
def test_all_layers_share_one_compiled_graph_and_keep_gradients_and_names(graphs: Any, mode: str) -> None:
    loss, grads = step(made(mode))
    model = made(mode, more=["model.compile=layers"])
    compiled_loss, compiled = step(model)
    assert graphs() == 1
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert grads.keys() == compiled.keys() == dict(made(mode).named_parameters()).keys()
    for name, grad in grads.items():
        torch.testing.assert_close(compiled[name], grad, rtol=1e-4, atol=1e-6)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=False)
    assert graphs() == 1, "evaluation runs the plain layers"


def test_pytorch_keeps_the_compiled_code_of_a_layer_with_chosen_rows(compiling, monkeypatch):
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    eager: Any = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        check_cacheable(graph)
        return eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = made("none", more=["model.compile=layers"])
    mlp = model.model.layers[-1].mlp
    mlp.forward = activations.ChosenRows(mlp)
    mlp.forward.chosen = torch.tensor([0, 3, 4])
    try:
        _, grads = step(model)
    finally:
        torch._dynamo.reset()
    assert all(grad is not None for grad in grads.values())


@pytest.mark.parametrize("mode", ["none", "layers"])
def test_layers_above_frozen_embeddings_share_one_graph_too(graphs: Any, mode: str) -> None:
    model = made(mode, more=["model.compile=layers", "lora.rank=2"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    _, grads = step(model)
    assert graphs() == 1
    plain = made(mode)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    for name, grad in step(plain)[1].items():
        if grad is not None:
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


class OneRank:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.log = self.note = self.lines.append

    def all_agree(self, mine: bool) -> bool:
        return mine


def broken(*_: Any) -> Any:
    raise RuntimeError("no code for this layer\nand more")


def without_gradients(graph: Any, _: Any) -> Any:
    return lambda *inputs: tuple(one.detach() + 0.0 * one for one in graph(*inputs))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (broken, "cannot be compiled: .*no code for this layer.*"),
        (without_gradients, "have other gradients compiled .*relative difference 1.0e.00.*"),
    ],
)
def test_layers_that_cannot_be_compiled_run_as_they_are_unless_it_was_asked_for(compiling, monkeypatch, broken, said):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    batch = {"input_ids": torch.zeros(1, 5, dtype=torch.long)}
    world: Any = OneRank()
    loss, grads = step(made("none"))
    try:
        with pytest.raises(ConfigError, match=rf"model\.compile: layers of llama {said}; use off$"):
            compile_ahead(made("none", more=["model.compile=layers"]), batch, world, required=True)
        model = made("none", more=["model.compile=auto"])
        compile_ahead(model, batch, world, required=False)
        assert re.match(rf"model\.compile: layers of llama {said}; nothing is compiled$", world.lines[-1])
        again, others = step(model)
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
    assert again == loss
    assert all(torch.equal(others[name], grad) for name, grad in grads.items())


def test_batches_with_other_numbers_of_documents_are_not_compiled_anew(graphs: Any) -> None:
    function = torch.compile(lambda hidden, borders: hidden * borders.sum(), dynamic=False)
    for documents in (2, 3, 7, 12):
        borders = torch.arange(documents + 1, dtype=torch.int32)
        mark_varying({"cu_seq_lens_q": borders})
        function(torch.ones(3, 4), borders)
    assert graphs() == 1
