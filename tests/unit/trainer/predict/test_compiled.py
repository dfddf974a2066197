"""Compiled code in a dry run: kernels of libraries one by one, what lies between them fused, and what is saved."""

import importlib
from typing import Any

import pytest
import torch
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.trainer.predict import compiled as compiled_module
from ftmon.trainer.predict.compiled import Plan, compiling
from ftmon.trainer.predict.record import Counting, Recorder, Trace
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

TOKENS, WIDTH, INNER = 512, 64, 256
WIDE, NARROW = TOKENS * INNER * 4, TOKENS * WIDTH * 4
"""Bytes of an activation inside, and of the input and the output."""


class Block(torch.nn.Module):
    """A gated block, as in a decoder layer, with a residual connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


class Ran:
    """A step of two such blocks, compiled or not, on fake tensors in host memory."""

    def __init__(self, compiles: bool) -> None:
        mode = FakeTensorMode()
        self.trace, counting, self.notes = Trace(Settings()), Counting(1), []
        recorder = Recorder(self.trace, {}, counting, mode)
        with mode:
            blocks = [Block(), Block()]
            x = torch.empty(TOKENS, WIDTH, requires_grad=True)
        with compiling(recorder, self.notes.append):
            plain = Block.forward
            forward: Any = torch.compile(plain, dynamic=False) if compiles else plain
        with mode, recorder, self.trace.taped() as self.tape:
            for weight in (x, *(one for block in blocks for one in block.parameters())):
                recorder.follow(weight)
            before = self.trace.current["cpu"]
            out = x
            for block in blocks:
                out = forward(block, out)
            self.kept = self.trace.current["cpu"] - before
            loss = out.sum()
            self.forward_work = counting.work()
            counting.clear()
            self.trace.host_peak = 0
            forward_end = self.trace.current["cpu"]
            loss.backward()
            self.above = self.trace.host_peak - forward_end
            self.after = self.trace.current["cpu"] - before
        self.work = counting.work()


@pytest.fixture(scope="module")
def compiled() -> Ran:
    return Ran(True)


@pytest.fixture(scope="module")
def plain() -> Ran:
    return Ran(False)


def test_a_compiled_block_keeps_what_its_backward_reads_and_then_the_gradients_as_the_plain_one(compiled, plain):
    """Of each block: gate's and up's outputs and their product, the input of both, the output and the norm's factor."""
    assert compiled.notes == []
    assert compiled.kept == 2 * (3 * WIDE + 2 * NARROW + TOKENS * 4)
    assert plain.kept >= compiled.kept + 2 * WIDE  # also the gate after its function
    gradients = 2 * 3 * WIDTH * INNER * 4 + NARROW
    assert plain.after - compiled.after == 0
    assert compiled.after == pytest.approx(gradients + NARROW, rel=0.01)  # and the output
    assert compiled.above < plain.above


def test_a_repeated_call_allocates_frees_and_counts_what_running_it_does(compiled, monkeypatch):
    monkeypatch.setattr(Plan, "_repeat", lambda *_: pytest.fail("repeated"))
    monkeypatch.setattr("ftmon.trainer.predict.compiled._call", lambda *_: None)
    torch._dynamo.reset()  # it would take the traced block, with its calls
    every = Ran(True)
    assert every.tape == compiled.tape
    assert (every.forward_work, every.work) == (compiled.forward_work, compiled.work)


def test_a_layer_that_an_earlier_dry_run_has_traced_is_not_traced_again(compiled, monkeypatch):
    torch._dynamo.reset()
    first = Ran(True)
    monkeypatch.setattr(Plan, "__init__", lambda *_: pytest.fail("traced"))
    again = Ran(True)
    assert (again.kept, again.above, again.after, again.work) == (first.kept, first.above, first.after, first.work)
    assert again.work == compiled.work


def test_operations_between_products_are_fused(compiled, plain):
    """Counted are kernels on GPUs, and launches of compiled code on any device."""
    fused = [one for one in compiled.work.operations if one.memory == "fused"]
    count = sum(one.count for one in fused)
    assert count <= 8
    # Gradients of gate and up, from both and their product's gradient.
    assert any(one.count == 2 and one.bytes_moved == 5.0 * WIDE for one in fused)
    assert (compiled.work.graphs, plain.work.graphs) == (2, 0)
    assert compiled.work.launches == 12 + count  # two products for each of six weights
    assert compiled.work.calls < plain.work.calls / 2


def test_patterns_of_attention_are_searched_where_something_is_a_softmax():
    fused: Any = importlib.import_module("torch._inductor.fx_passes.fuse_attention")
    real, searched = fused._sfdp_init, []
    functions: list[Any] = [lambda x: x.sigmoid(), lambda x: torch.softmax(x, -1), lambda x: x.amax(-1)]
    for function in functions:
        module = make_fx(function)(torch.empty(2, 2))
        compiled_module._partition(lambda _: searched.append(fused._sfdp_init is real), module)
    assert searched == [False, True, True]
    assert fused._sfdp_init is real


def test_what_cannot_be_traced_runs_as_it_is_with_the_reason():
    notes: list[str] = []
    mode = FakeTensorMode()
    recorder = Recorder(Trace(Settings()), {}, Counting(1), mode)

    def branches(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with compiling(recorder, notes.append):
        compiled: Any = torch.compile(branches, fullgraph=True)
    with mode, recorder:
        assert compiled(torch.empty(4)).shape == (4,)
        assert compiled(torch.empty(4)).shape == (4,)
    assert len(notes) == 1
