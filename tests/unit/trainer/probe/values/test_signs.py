"""The signs of silent faults in tensors, as the publisher reads them."""

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.messages.telemetry import Signs
from ftmon.trainer.probe.phases.tracker import Notes
from ftmon.trainer.probe.rank.model import Trained
from ftmon.trainer.probe.values.batch import Seen
from ftmon.trainer.probe.values.signs import (
    PUT_BACK,
    SAMPLED,
    SignReader,
    WeightSampler,
    attended,
    ids_of,
    labels_of,
    left_out,
    received,
)
from torch.nn.functional import cross_entropy

RESTARTS = torch.arange(8).repeat(2)[None]
ONES = torch.ones(1, 16, dtype=torch.long)
NUMBERS = torch.tensor([[1] * 8 + [2] * 8])
CAUSAL = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
ONE_DOCUMENT = NUMBERS[0][:, None] == NUMBERS[0]
PADDED_LEFT = torch.tensor([[0] * 8 + [1] * 8])


def trained_on(model: torch.nn.Module) -> Trained:
    trained = Trained()
    trained.model = weakref.ref(model)
    return trained


def read(reader: SignReader, **notes: Any) -> tuple[int, Signs]:
    number, signs = reader.of_step(1, Notes(**notes))
    return number, signs or Signs()


@pytest.mark.parametrize(
    ("implementation", "mask", "positions", "cached", "by"),
    [
        ("sdpa", ONES, RESTARTS, False, "mask"),
        ("eager", ONES.bool(), RESTARTS, False, "mask"),
        ("sdpa", None, RESTARTS, True, "cache"),
        ("sdpa", None, RESTARTS, False, ""),
        ("sdpa", ONES, torch.arange(16)[None], False, ""),
        ("sdpa", PADDED_LEFT, RESTARTS, False, ""),
        ("sdpa", CAUSAL, RESTARTS, False, "4-D mask"),
        ("eager", torch.zeros(CAUSAL.shape).masked_fill(~CAUSAL, -1e4), RESTARTS, False, "4-D mask"),
        ("sdpa", CAUSAL & ONE_DOCUMENT, RESTARTS, False, ""),
        ("sdpa", CAUSAL & (torch.arange(16) < 8), RESTARTS, False, ""),  # the second half is padding
        ("flash_attention_2", CAUSAL, RESTARTS, False, ""),
        ("sdpa", CAUSAL, torch.arange(16)[None], False, ""),
        ("sdpa", NUMBERS, torch.arange(16)[None], False, "numbers"),
        ("sdpa", NUMBERS - 1, torch.arange(16)[None], False, ""),  # padding, and one document
        ("flash_attention_2", NUMBERS, torch.arange(16)[None], False, ""),
        ("flash_attention_2", ONES, RESTARTS, False, ""),
        ("flash_attention_2", None, RESTARTS.repeat(2, 1), False, "batch"),
        (None, ONES, RESTARTS, False, ""),
    ],
)
def test_documents_see_each_other_where_the_model_ignores_their_beginnings(implementation, mask, positions, cached, by):
    found = attended(SimpleNamespace(_attn_implementation=implementation), mask, positions, cached)
    _, signs = read(SignReader(Trained()), attended=[] if found is None else [found])
    assert (signs.mixed_by, signs.mixed) == (by, int(bool(by)))


@pytest.mark.parametrize(
    ("implementation", "position_ids", "encoder_hidden_states", "by"),
    [
        ("sdpa", RESTARTS, None, "encoder"), ("sdpa", torch.arange(16)[None], None, ""), ("sdpa", None, None, ""),
        ("sdpa", RESTARTS, ONES, ""), ("flash_attention_2", RESTARTS, None, ""),
    ],
    ids=["packed", "one document", "no positions", "attention to another model", "kernels for packed rows"],
)  # fmt: skip
def test_documents_of_an_encoder_s_row_see_each_other(implementation, position_ids, encoder_hidden_states, by):
    found: list[Any] = []

    def create_bidirectional_mask(encoder_hidden_states: Any) -> None:
        config = SimpleNamespace(_attn_implementation=implementation)
        found.append(attended(config, ONES, None, False, sys._getframe()))

    def forward(position_ids: Any) -> None:
        create_bidirectional_mask(encoder_hidden_states)

    forward(position_ids)
    _, signs = read(SignReader(Trained()), attended=[each for each in found if each is not None])
    assert (signs.mixed_by, signs.mixed) == (by, int(bool(by)))


def test_a_batch_has_one_number_however_held_and_unforeseen_tensors_end_the_signs_alone():
    reader = SignReader(Trained())
    ids = torch.arange(64).reshape(4, 16)
    numbers = [read(reader, seen=[Seen(each, None, None)])[0] for each in (ids, ids.t().contiguous().t(), ids + 1)]
    assert numbers[0] == numbers[1] != numbers[2]
    assert all(numbers)
    assert read(reader, seen=[Seen(None, None, None)])[0] == 0
    assert read(reader, seen=[Seen(ids.bfloat16(), None, None)])[0]
    reader = SignReader(Trained())
    assert reader.of_step(1, Notes(seen=[Seen(torch.ones(2, 3).to_sparse(), None, None)])) == (0, None)
    assert reader.of_step(2, Notes(seen=[Seen(ONES, None, None)])) == (0, None)


def test_weights_are_sampled_at_three_places_and_a_change_or_a_value_that_is_not_finite_is_seen():
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(5)))
    trained = trained_on(model)
    sampler, reader = WeightSampler(trained), SignReader(trained)

    def after(place: int, value: float) -> str:
        with torch.no_grad():
            model[place].weight.view(-1)[SAMPLED - 1] += value
        return read(reader, weights=sampler.take(None))[1].weights

    assert [after(1, 0.0), after(1, 0.0), after(1, 0.1), after(4, 0.1), after(2, 0.1)] == ["", "same", "", "", ""]
    assert after(3, 0.1) == "same", "not sampled"
    assert after(4, float("nan")) == "nan"
    assert not sampler.in_evaluation()
    model.eval()
    assert not sampler.in_evaluation(), "no layer behaves differently"
    model.append(torch.nn.Dropout(0.1).eval())
    assert not sampler.in_evaluation(), "looked at once for each model"
    assert WeightSampler(trained).in_evaluation()


@pytest.mark.parametrize(
    ("undone", "changes", "put_back"), [(True, 0.5, True), (False, 0.5, False), (True, 0.0, False)]
)
def test_weights_that_are_the_same_before_updates_that_change_them_are_put_back(undone, changes, put_back):
    model = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight)
    trained = trained_on(model)
    sampler, reader, found = WeightSampler(trained), SignReader(trained), list[bool]()
    for number in range(1, PUT_BACK + 3):
        before = sampler.take(None) if number <= PUT_BACK else None
        with torch.no_grad():
            model.weight += changes
        found.append(read(reader, weights_before=before, weights=sampler.take(None))[1].put_back)
        with torch.no_grad():
            model.weight -= changes * undone
    assert found == [False] * (PUT_BACK - 1) + [put_back, False, False]


@pytest.mark.parametrize(
    ("kind", "dtype", "moved", "overwritten"),
    [
        (torch.optim.AdamW, torch.bfloat16, 0.5, True),
        (torch.optim.AdamW, torch.float32, 0.003, False),  # without its bias correction
        (torch.optim.AdamW, torch.bfloat16, 0.01, False),  # rounded
        (torch.optim.SGD, torch.float32, 0.5, False),
    ],
)
def test_an_engine_s_update_that_moves_weights_further_than_adam_overwrote_others(kind, dtype, moved, overwritten):
    model = torch.nn.Linear(4, 4).to(dtype)
    torch.nn.init.ones_(model.weight)
    trained, engine = trained_on(model), SimpleNamespace(optimizer=kind(model.parameters(), lr=1e-3))
    trained.engine = lambda: SimpleNamespace(optimizer=engine)
    sampler, reader = WeightSampler(trained), SignReader(trained)
    before = sampler.take(None)
    with torch.no_grad():
        model.weight += moved
    after = sampler.take(None)
    assert read(reader, weights_before=before, weights=after)[1].overwritten == overwritten
    assert not read(reader, weights_before=before, weights=after, lr=0.1)[1].overwritten, "the rate has fallen since"
    assert not read(reader, weights=after)[1].overwritten


@pytest.mark.parametrize(
    ("gradients", "zero"), [((torch.zeros(3),), True), ((torch.ones(3),), False), ((), False), ((None,), False)]
)
def test_sampled_gradients_that_are_all_0_are_told(gradients, zero):
    assert read(SignReader(Trained()), gradients=(gradients, gradients))[1].zero_gradients == zero


@pytest.mark.parametrize("owner", [torch.nn.Linear(1, 1), None, SimpleNamespace()])
def test_only_a_module_s_forward_has_received_labels(owner):
    def forward(self: Any, labels: Any) -> Any:
        return received(sys._getframe(), lambda module: module is owner)

    assert (forward(owner, ONES) is not None) == isinstance(owner, torch.nn.Module)
    assert forward(owner, torch.ones(2)) is None
    assert received(sys._getframe(), lambda _: True) is None


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda logits, ids: cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / 4, 10),
        (lambda logits, ids: cross_entropy(logits.transpose(1, 2), ids, reduction="sum") * 0.5, 12),
        (lambda logits, ids: cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=3), 12),
        (lambda logits, ids: cross_entropy(logits.transpose(1, 2), ids) + logits.square().mean(), 12),
        (lambda logits, ids: cross_entropy(logits[:, 2:].transpose(1, 2), ids[:, 2:]), 8),
        (lambda logits, ids: cross_entropy(logits[0], ids[0]) + logits.square().mean(), 0),
        (lambda logits, ids: sum(cross_entropy(each, one) for each, one in zip(logits, ids, strict=True)), 0),
        (lambda logits, ids: logits.square().mean(), 0),
        (lambda logits, ids: torch.zeros(()), 0),
    ],
    ids=[
        *("flat and shifted", "a sum over rows", "another ignored label", "beside another term", "the answers alone"),
        *("a part beside another term", "row by row", "no labels", "no graph"),
    ],
)
def test_the_labels_of_a_loss_are_those_of_its_whole_batch(make, found):
    ids = torch.arange(12).reshape(2, 6)
    labels = labels_of(make(torch.randn(2, 6, 12, requires_grad=True), ids), ids)
    assert (0 if labels is None else labels.numel()) == found
    assert labels is None or (3 in labels) == (-100 not in labels), "the ignored label is the one of ftmon"


def test_the_token_ids_of_a_loss_are_the_rows_that_its_graph_has_embedded():
    ids, source = torch.arange(12).reshape(2, 6), torch.arange(8).reshape(2, 4)
    words, places = (torch.nn.Embedding(number, 4) for number in (12, 40))
    loss = (words(ids) + places(torch.arange(6)) + words(source).mean() + places(ids)).square().mean()
    assert {each.shape for each in ids_of(loss)} == {ids.shape, source.shape}
    assert len(ids_of(loss)) == 2
    assert ids_of(places(torch.arange(6)).sum()) == ids_of(torch.zeros(())) == []


def test_parameters_of_a_loss_that_are_no_part_of_the_model_may_be_left_out():
    model, hidden = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
    hidden(model(torch.ones(4))).sum().backward()
    updated = {id(each) for each in model.parameters()}
    assert left_out(model, updated) == (0, "")
    assert left_out(model, updated, list(hidden.parameters())) == (2, "a parameter [3, 4] outside of the model")
    hidden.bias._is_flat_param = True  # type: ignore[attr-defined]
    assert left_out(model, updated, list(hidden.parameters()))[0] == 1, "FSDP1 updates others in its place"
    assert left_out(model, updated, list(hidden.double().parameters()))[0] == 0, "of a type that none updated has"
    assert left_out(model, {id(model.bias)})[1] == "weight"


def test_tokens_whose_losses_are_multiplied_by_0_have_no_label_nor_have_ends_of_a_batch_without_any():
    ids, mask = torch.arange(12).reshape(2, 6), torch.tensor([[0.0] * 4 + [0.5, 1.0], [1.0] * 6])
    each = cross_entropy(torch.randn(2, 12, 6, requires_grad=True), ids, reduction="none")
    loss = (each * mask).sum() / mask.sum().clamp(min=1)
    assert labels_of(loss, None).tolist() == [[-100] * 4 + list(range(4, 12))]
    ids = torch.full((2, 8), 2)
    trained = Trained()
    trained.found = lambda: SimpleNamespace(config=SimpleNamespace(eos_token_id=2))
    _, signs = read(SignReader(trained), seen=[Seen(ids, None, torch.full_like(ids, -100))])
    assert (signs.unlabelled, signs.ends) == (1, 0)


def test_a_step_with_packed_documents_names_the_last_one_that_was_examined_before():
    reader = SignReader(Trained())
    config = SimpleNamespace(_attn_implementation="sdpa")
    fine, packed = (attended(config, ONES, each, False) for each in (torch.arange(16)[None], RESTARTS))
    for number, each, after in ((8, fine, 0), (9, packed, 0), (50, fine, 0), (100, packed, 50)):
        _, signs = reader.of_step(number, Notes(attended=[each]))
        assert signs is None or signs.mixed_after == after


def test_labels_that_are_lost_in_the_loop_may_be_lost_since_the_loss_was_looked_at_last():
    ids, ignored = torch.ones(2, 4, dtype=torch.long), torch.full((1, 8), -100)
    looked_at, changed = Seen(ids, None, ids, ids.reshape(1, -1)), Seen(ids, None, ids, ignored)
    reader = SignReader(Trained())
    for number, seen in enumerate([looked_at, *[Seen(ids, None, ids)] * 18], 1):
        _, signs = reader.of_step(number, Notes(seen=[seen]))
        assert signs is None or not signs.unlabelled
    _, signs = reader.of_step(20, Notes(seen=[changed]))
    assert (signs.unlabelled, signs.labelled_after) == (1, 1)
    _, signs = reader.of_step(21, Notes(seen=[changed]))
    assert (signs.unlabelled, signs.labelled_after) == (1, 0)


def test_labels_of_a_forward_count_where_the_noted_batch_has_none():
    reader = SignReader(Trained())
    ids = torch.arange(16).reshape(2, 8)
    ignored = torch.full_like(ids, -100)
    _, signs = read(reader, seen=[Seen(ids, None, None)], received=[Seen(ids, None, ignored)])
    assert (signs.labelled, signs.unlabelled) == (1, 1)
    assert reader.unlabelled, "the next micro-batches are examined too"
    assert read(reader)[1].unlabelled == 0
    assert reader.unlabelled, "nothing was examined"
    _, signs = reader.of_step(9, Notes(received=[Seen(ids, None, ignored)]))
    assert signs.labelled_after == 1
    assert read(reader, received=[Seen(None, None, ids)])[1].unlabelled == 0
    assert not reader.unlabelled
