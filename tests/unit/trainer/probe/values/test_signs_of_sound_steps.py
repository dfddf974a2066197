"""Signs of silent faults: what is sampled of weights, and which batches and modes are no fault."""

from types import SimpleNamespace

import pytest
import torch
from ftmon.trainer.probe.phases.tracker import Notes
from ftmon.trainer.probe.rank.model import Trained
from ftmon.trainer.probe.values.batch import Seen, note, on_host
from ftmon.trainer.probe.values.signs import Attended, SignReader, WeightSampler
from torch import nn


def signs_of(trained: Trained, **figures):
    return SignReader(trained).of_step(1, Notes(**figures))[1]


def trained_on(model, **config) -> Trained:
    if config:
        model.config = SimpleNamespace(**config)
    trained = Trained()
    trained.found = lambda: model
    return trained


@pytest.mark.parametrize(
    ("positions", "mixed"),
    [
        ([0, 1, 2, 3, 4, 5], False),
        ([0, 1, 2, 0, 1, 2], True),
        ([0, 0, 1, 2, 0, 1], True),
        ([0, 1, 2, 40, 41, 42], False),  # a window of a longer context
        ([0, 1, 1, 1, 2, 3], False),  # an image at one position
    ],
)
def test_only_positions_that_go_back_begin_another_document(positions, mixed):
    rows = torch.tensor([positions] * 2)
    found = signs_of(Trained(), attended=[Attended("sdpa", torch.ones_like(rows), rows, False)])
    assert (found is not None) == mixed


@pytest.mark.parametrize(("generates", "ends"), [(None, 2), (True, 2), (False, 0)])
def test_ends_are_counted_for_models_that_generate(generates, ends):
    model = nn.Linear(2, 2)
    if generates is not None:
        model.can_generate = lambda: generates
    ids = torch.tensor([[5, 6, 2], [5, 2, 7]])
    found = signs_of(trained_on(model, eos_token_id=2), seen=[Seen(ids, None, torch.where(ids == 2, -100, ids))])
    assert (found.ends if found is not None else 0) == ends


def changes(model, optimizer, sampler, reader) -> str:
    model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()
    model.zero_grad()
    found = reader.of_step(1, Notes(weights=sampler.take(optimizer)))[1]
    return found.weights if found is not None else ""


def test_weights_are_sampled_of_what_the_optimizer_updates():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    trained = trained_on(model)
    sampler, reader = WeightSampler(trained), SignReader(trained)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert [changes(model, first, sampler, reader) for _ in range(3)] == [""] * 3
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)  # another stage of the training
    assert [changes(model, second, sampler, reader) for _ in range(3)] == [""] * 3
    model[3].requires_grad_(False)
    second.add_param_group({"params": list(model[1].parameters())})
    assert [changes(model, second, sampler, reader) for _ in range(3)] == [""] * 3
    model.requires_grad_(False)
    assert sampler.take(second) is not None, "none is trained any more: those sampled before stand still"
    model.requires_grad_(True)
    frozen = nn.Linear(8, 8).requires_grad_(False)  # none was ever trained
    assert WeightSampler(trained_on(frozen)).take(torch.optim.SGD(frozen.parameters(), lr=0.1)) is not None
    lost = torch.optim.SGD([nn.Parameter(torch.ones(8, 8))], lr=0.1)  # of a model that was copied
    assert [changes(model, lost, sampler, reader) for _ in range(3)] == ["", "same", "same"]


def test_embeddings_are_not_sampled_and_the_mode_is_that_of_the_model_inside_a_wrapper():
    model = nn.ModuleList([nn.Embedding(100, 8), nn.Embedding(100, 8)])
    assert WeightSampler(trained_on(model)).take(torch.optim.SGD(model.parameters(), lr=0.1)) is None
    model.append(nn.Linear(8, 2))
    assert len(WeightSampler(trained_on(model)).take(torch.optim.SGD(model.parameters(), lr=0.1))) == 1
    wrapper = type("DistributedDataParallel", (nn.Module,), {})()
    wrapper.module = nn.Sequential(nn.Dropout(0.1))
    wrapper.module.eval()
    assert wrapper.training
    assert WeightSampler(trained_on(wrapper)).in_evaluation()


def test_a_model_with_parts_in_training_mode_is_not_in_evaluation():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.1)))
    sampler = WeightSampler(trained_on(model))
    assert not sampler.in_evaluation()
    model.eval()
    assert sampler.in_evaluation()
    model[1].train()
    assert not sampler.in_evaluation()


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class Checkpointed(nn.Module):
    gradient_checkpointing = False

    def forward(self, x):
        return x.detach() if self.gradient_checkpointing and self.training else x


@pytest.mark.parametrize(("layer", "differs"), [(Noisy(), True), (Checkpointed(), False), (nn.Linear(2, 2), False)])
def test_a_layer_of_the_script_that_asks_for_its_mode_differs_in_evaluation(layer, differs):
    assert WeightSampler(trained_on(nn.Sequential(layer).eval())).in_evaluation() is differs
    layer.pdrop = 0.1
    assert WeightSampler(trained_on(nn.Sequential(layer).eval())).in_evaluation()


@pytest.mark.parametrize(
    "ids",
    [
        torch.eye(4).to_sparse(), torch.ones(2, 3, dtype=torch.cfloat).conj(),
        torch.ones(2, 3, dtype=torch.cfloat).conj().imag, torch.ones(2, 3, device="meta"), torch.zeros(0, 3),
        torch.ones(1, 1, dtype=torch.bool).expand(2, 3),
    ],
    ids=["sparse", "conjugate", "negative", "meta", "empty", "expanded"],
)  # fmt: skip
def test_a_batch_that_cannot_be_read_ends_no_signs(ids):
    for found, is_forward in (({"input_ids": ids}, False), (((ids,), {}), True), (ids, False)):
        notes = Notes()
        note(notes, found, is_forward, fetched=on_host(found) if not is_forward else None)
        reader = SignReader(Trained())
        reader.of_step(1, notes)
        sound = Notes(seen=[Seen(torch.ones(1, 4, dtype=torch.long), None, None)])
        assert reader.of_step(2, sound)[0], "signs are still read"


def parts() -> nn.Module:
    """Return a model of an encoder and a head, each with a dropout, and batch norms."""
    encoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
    return nn.ModuleDict({"encoder": encoder, "head": nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 2))})


def part_of(model: nn.Module, trained: list[nn.Parameter] | None = None) -> str:
    optimizer = torch.optim.SGD(model.parameters() if trained is None else trained, lr=0.1)
    return WeightSampler(trained_on(model)).part_in_evaluation(optimizer)


def test_a_trained_part_that_is_left_in_evaluation_mode_is_named():
    model = parts()
    assert part_of(model) == ""
    model["encoder"].eval()
    assert part_of(model) == "encoder"
    model.eval()
    assert part_of(model) == "", "the whole model is"
    model["head"].train()
    assert part_of(model) == "encoder"
    sampler, optimizer = WeightSampler(trained_on(model)), torch.optim.SGD(model.parameters(), lr=0.1)
    assert sampler.part_in_evaluation(optimizer) == "encoder"
    model.train()
    assert sampler.part_in_evaluation(optimizer) == ""


def test_a_part_is_in_evaluation_mode_on_purpose_where_it_is_frozen_or_a_batch_norm():
    model = parts()
    model["encoder"][1].eval()
    model["head"][0].eval()
    assert part_of(model) == "", "a batch norm whose statistics stand still, and a dropout that is off"
    model["encoder"].eval()
    assert part_of(model, list(model["head"].parameters())) == "", "the optimizer does not have it"
    model["encoder"].requires_grad_(False)
    model["encoder"].adapter = nn.Linear(8, 2)
    assert part_of(model) == "", "only an adapter of it is trained"


def test_micro_batches_with_the_data_of_the_one_before_are_counted_across_steps() -> None:
    reader, rows = SignReader(Trained()), [torch.full((2, 3), number) for number in range(3)]
    found: list[tuple[int, int]] = []
    for number, places in enumerate([(0, 0), (0, 1), (2, 1), (1, 2)], 1):
        fingerprint, signs = reader.of_step(number, Notes(seen=[Seen(rows[place], None, None) for place in places]))
        found.append((fingerprint, signs.repeated if signs is not None else 0))
    assert [repeated for _, repeated in found] == [1, 1, 0, 1]
    assert len({fingerprint for fingerprint, _ in found}) == 4


ROWS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize(
    ("labels", "shifted"),
    [
        (ROWS, "never"),
        (ROWS[:, 1:], ""),
        (nn.functional.pad(ROWS[:, 1:], (0, 1), value=-100), ""),
        (nn.functional.pad(ROWS[:, 2:], (0, 2), value=-100), "twice"),
        (nn.functional.pad(ROWS[:, 2:], (0, 1), value=-100), "twice"),
        (torch.where(ROWS % 12 < 9, -100, ROWS), ""),  # too few to tell
        (torch.where(ROWS % 3 == 0, -100, ROWS), "never"),
        (ROWS.flip(1), ""),
        (torch.ones(2, 5, dtype=torch.long), ""),
    ],
)
def test_labels_of_a_loss_are_compared_with_the_inputs_two_positions_around(labels, shifted):
    found = signs_of(Trained(), targets=[([ROWS], labels.reshape(1, -1))])
    assert (found.shifted if found is not None else "") == shifted


def test_labels_may_be_an_encoder_s_ids_and_those_of_rows_that_repeat_one_token_are_next_tokens():
    before, again = nn.functional.pad(ROWS[:, :-1], (1, 0)), ROWS.reshape(1, -1)
    assert signs_of(Trained(), targets=[([ROWS, before], again)]) is None
    assert signs_of(Trained(), targets=[([ROWS], again)]).shifted == "never"
    assert signs_of(Trained(), targets=[([torch.ones_like(ROWS)], torch.ones(1, 24, dtype=torch.long))]) is None


@pytest.mark.parametrize("facts", [{"is_encoder_decoder": True}, {}])
def test_labels_of_an_encoder_may_be_its_input(facts):
    model = nn.Linear(2, 2)
    model.can_generate = lambda: bool(facts)
    assert signs_of(trained_on(model, **facts), targets=[([ROWS], ROWS.reshape(1, -1))]) is None


@pytest.mark.parametrize(
    ("decoder", "shifted"),
    [
        (ROWS, "never"),
        (nn.functional.pad(ROWS[:, :-1], (1, 0)), ""),
        (torch.zeros(8, 8, dtype=torch.long), ""),  # relative positions of the encoder: the decoder has no ids
    ],
)
@pytest.mark.parametrize("encoder", [ROWS, ROWS.flip(1)])
def test_labels_are_compared_with_what_a_decoder_is_given(encoder, decoder, shifted):
    trained = trained_on(nn.Linear(2, 2), is_encoder_decoder=True)
    found = signs_of(trained, targets=[([encoder, decoder], ROWS.reshape(1, -1))])
    assert (found.shifted if found is not None else "") == shifted


@pytest.mark.parametrize(
    ("first", "second", "masked", "begin", "twice"),
    [(1, 1, 1, 1, 1), (1, 5, 1, 1, 0), (1, 1, 0, 1, 0), (1, 1, 1, None, 0), (5, 1, 1, 1, 0)],
)
def test_micro_batches_whose_rows_begin_twice_are_counted(first, second, masked, begin, twice):
    ids = torch.tensor([[first, second, 7, 8], [first, 1, 9, 9]])
    mask = torch.ones_like(ids)
    mask[0, 0] = masked
    found = signs_of(trained_on(nn.Linear(2, 2), bos_token_id=begin), seen=[Seen(ids, mask, ids)])
    assert (found.begun_twice if found is not None else 0) == twice


PADDED = torch.tensor([[1, 5, 6, 7, 2, 0, 0, 0], [1, 5, 6, 2, 0, 0, 0, 0]])
LEFT = PADDED.roll(3, 1).masked_fill(torch.arange(8) < 3, 0)


def next_ones(ids):
    return nn.functional.pad(ids[:, 1:], (0, 1), value=-100).reshape(1, -1)


@pytest.mark.parametrize(
    ("ids", "labels", "padding", "of"),
    [
        (PADDED, next_ones(PADDED), 5, 14),
        (PADDED, PADDED[:, 1:].reshape(1, -1), 5, 14),
        (LEFT, next_ones(LEFT), 2, 14),  # the second row has padding on both sides, which is unusual
        (PADDED, next_ones(PADDED.masked_fill(PADDED == 0, -100)), 0, 0),
        (PADDED, next_ones(PADDED + 1), 0, 0),
        (PADDED, torch.zeros(1, 5, dtype=torch.long), 0, 0),
    ],
)
def test_labels_that_are_padding_after_padding_are_counted_in_the_loss(ids, labels, padding, of):
    batch, other = Seen(ids, (ids != 0).long(), ids), Seen(ids + 1, torch.ones_like(ids), None)
    positions = torch.arange(8)[None]
    found = signs_of(Trained(), seen=[other, batch], targets=[([positions, ids], labels)])
    assert ((found.padding, found.padding_of) if found is not None else (0, 0)) == (padding, of)
    encoded = trained_on(nn.Linear(2, 2), is_encoder_decoder=True)
    again = signs_of(encoded, seen=[batch], targets=[([ids, ids], labels)])
    assert again is None or again.padding == 0
    assert signs_of(Trained(), seen=[batch]) is None, "the script may mask its loss"
    unknown = signs_of(Trained(), seen=[other], targets=[([ids], labels)])
    assert unknown is None or unknown.padding == 0


def test_hidden_tokens_are_no_padding_and_rows_begin_after_theirs():
    ids = torch.arange(3, 19).reshape(2, 8)
    for mask in ([1, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1], [1] * 8):
        batch = Seen(ids, torch.tensor([mask] * 2), ids)
        assert signs_of(Trained(), seen=[batch], targets=[([ids], next_ones(ids))]) is None
    trained = trained_on(nn.Linear(2, 2), bos_token_id=1)
    ids = torch.tensor([[0, 0, 1, 1, 7], [0, 1, 1, 8, 9], [1, 1, 8, 9, 0]])
    for mask, twice in ((ids != 0, True), (torch.ones_like(ids), False), (torch.zeros_like(ids), False)):
        assert (signs_of(trained, seen=[Seen(ids, mask, ids)]) is not None) == twice
