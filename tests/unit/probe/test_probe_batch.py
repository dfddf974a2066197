import torch
from ftmon.trainer.probe.device import device_values
from ftmon.trainer.probe.phases.marks import Notes
from ftmon.trainer.probe.values import batch


def noted(*args, **kwargs):
    notes = Notes()
    batch.note(notes, (args, kwargs), is_forward=True)
    return notes


def tokens(notes):
    return sum(device_values.read_count(count) for count in notes.tokens)


def test_pads_are_not_tokens_where_a_mask_says_so():
    ids = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    notes = noted(input_ids=ids, attention_mask=mask)
    assert (notes.shape, notes.samples, tokens(notes), notes.padded_tokens) == ([2, 8], 2, 13, 16)


def test_without_a_mask_every_position_counts():
    notes = noted(torch.zeros(2, 8, dtype=torch.long))
    assert (tokens(notes), notes.padded_tokens) == (16, 16)


def test_a_dictionary_given_as_argument_is_looked_into():
    ids = torch.zeros(4, 3, dtype=torch.long)
    notes = noted({"labels": ids, "input_ids": ids, "attention_mask": torch.ones(4, 3, dtype=torch.bool)})
    assert (notes.shape, tokens(notes)) == ([4, 3], 12)


def test_a_causal_mask_of_four_dimensions_is_no_list_of_pads():
    ids = torch.zeros(2, 8, dtype=torch.long)
    assert tokens(noted(input_ids=ids, attention_mask=torch.zeros(2, 1, 8, 8))) == 16


def test_pictures_have_samples_and_no_tokens():
    notes = noted(torch.zeros(5, 3, 4, 4))
    assert (notes.shape, notes.samples, notes.padded_tokens, notes.tokens) == ([5, 3, 4, 4], 5, 0, [])


def test_the_largest_micro_batch_gives_the_shape():
    notes = Notes()
    for length in (4, 9, 6):
        batch.note(notes, ((torch.zeros(2, length, dtype=torch.long),), {}), is_forward=True)
    assert (notes.shape, notes.samples, notes.padded_tokens) == ([2, 9], 6, 38)


def test_a_call_without_tensors_leaves_nothing():
    assert noted("text", [], None, flag=True).shape == []


def test_scalars_are_read_as_they_were_when_fetched():
    loss = torch.tensor(1.5, requires_grad=True)
    fetched = device_values.fetch(loss * 2)
    norm = torch.tensor([7.0])
    held = device_values.fetch(norm)
    norm.zero_()
    assert (device_values.read(fetched), device_values.read(held)) == (3.0, 7.0)
    assert device_values.fetch(torch.zeros(3)) is None
    assert device_values.read(device_values.fetch(None)) is None


def test_a_mask_may_be_counted_later_and_is_then_counted_as_it_is():
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = 0
    notes = Notes()
    batch.note(notes, {"input_ids": ids, "attention_mask": mask}, is_forward=False, later=True)
    assert not isinstance(notes.tokens[0], int)
    assert tokens(notes) == 14
