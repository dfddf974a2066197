"""What a step's loss is, from real graphs: against the sum or mean that a person would write down."""

import pytest
import torch
from ftmon.trainer.probe.phases.marks import Notes
from ftmon.trainer.probe.values.losses import ALONE_STEPS, LossNotes, note_loss, step_loss

VALUES = (4.0, 8.0, 12.0, 16.0)


def losses(scale, values=VALUES):
    """Losses of micro-batches of one model, each scaled by ``scale(loss)``."""
    return [scale((torch.full((6,), value, requires_grad=True) * 1).mean()) for value in values]


def in_place(operation):
    def scale(loss):
        operation(loss)
        return loss

    return scale


def step(found, **known):
    notes = Notes()
    for name, value in known.items():
        setattr(notes, name, value)
    for loss in found:
        if isinstance(loss, tuple):
            notes.losses.append(note_loss(*loss))
        else:
            notes.losses.append(note_loss(loss))
    notes.micro_steps = len(notes.losses)
    return step_loss(notes)


SCALED = {
    "divided": lambda loss: loss / 4,
    "multiplied": lambda loss: loss * (1 / 4),
    "multiplied from the left": lambda loss: 0.25 * loss,
    "divided in place": in_place(lambda loss: loss.div_(4)),
    "multiplied in place": in_place(lambda loss: loss.mul_(0.25)),
    "divided by a tensor": lambda loss: loss / torch.tensor(4),
    "divided, then weighted": lambda loss: loss / 4 * 2,
    "weighted, cast, then divided": lambda loss: (loss * 2).double() / 4,
}


@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED)
def test_losses_that_the_script_divides_by_its_micro_batches_add_up(scale):
    expected = sum(loss.item() for loss in losses(scale))
    assert step(losses(scale)) == pytest.approx(expected)
    assert step(losses(scale), fetches={1: 4}) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [lambda loss: loss, lambda loss: loss * 3, lambda loss: loss * 0.01 + 1])
def test_losses_that_are_not_divided_are_averaged_over_micro_batches(scale):
    expected = sum(loss.item() for loss in losses(scale)) / 4
    assert step(losses(scale)) == pytest.approx(expected)
    assert step(losses(scale), fetches={1: 5, 2: 1}) == pytest.approx(expected)


def test_the_shorter_last_step_of_an_epoch_is_normalised_as_the_others():
    divisors = set()
    assert step(losses(lambda loss: loss / 4), divisors=divisors) == pytest.approx(10)
    assert step(losses(lambda loss: loss / 4, VALUES[:3]), divisors=divisors) == pytest.approx(6)


def test_different_losses_of_one_batch_add_up():
    weights = torch.ones(3, requires_grad=True)
    pair = [(weights**2).mean(), weights.abs().mean() * 3]
    assert step(pair) == step(pair, fetches={1: 1}) == pytest.approx(4)
    alike = [(weights**2).mean(), (weights**2).mean()]
    assert step(alike, fetches={1: 1}) == pytest.approx(2)  # real and fake batches of a discriminator


def test_several_losses_in_each_of_several_micro_batches_are_summed_in_each_and_averaged_over_them():
    weights = torch.ones(3, requires_grad=True)
    pairs = [loss for _ in range(2) for loss in ((weights**2).mean(), weights.abs().mean() * 3)]
    assert step(pairs) == step(pairs, fetches={1: 2}) == pytest.approx(4)


def test_sums_over_the_tokens_of_all_micro_batches_add_up_and_means_over_their_own_do_not():
    def summed(value, divisor):
        return (torch.full((10,), value, requires_grad=True) * 1).sum() / divisor

    whole = [summed(value, 40) for value in VALUES]
    assert step(whole) == pytest.approx(sum(VALUES) / 4)
    own = [summed(value, torch.tensor(10)) for value in VALUES]
    assert step(own) == pytest.approx(sum(VALUES) / 4)
    masked = [summed(value, torch.tensor(tokens)) for value, tokens in zip(VALUES, (5, 7, 10, 2), strict=True)]
    assert step(masked) == pytest.approx(sum(loss.item() for loss in masked) / 4)


def test_an_engine_divides_by_its_accumulation_whatever_the_script_did():
    assert step(losses(lambda loss: loss), accumulation=4) == pytest.approx(10)
    assert step(losses(lambda loss: loss / 4), accumulation=4) == pytest.approx(2.5)
    assert step(losses(lambda loss: loss), accumulation=2) == pytest.approx(20)
    assert step(losses(lambda loss: loss), accumulation=4, sum_losses=True) == pytest.approx(40)


@pytest.mark.parametrize(("divided_by", "micro_steps"), [(2, 2), (4, 4), (8, 4), (1, 4), (0, 4)])
def test_a_micro_batch_that_goes_backward_once_for_each_output_is_one(divided_by, micro_steps):
    notes = Notes()
    notes.micro_steps, notes.accumulation = 4, divided_by
    assert step_loss(notes) is None
    assert notes.micro_steps == micro_steps


def test_a_scaled_loss_counts_as_what_it_was_scaled_from():
    found = [(loss * 65536.0, None, loss) for loss in losses(lambda loss: loss / 4)]
    assert step(found) == pytest.approx(10)


def test_what_a_trainer_s_step_returned_comes_before_what_was_backpropagated_and_a_report_before_both():
    found = losses(lambda loss: loss)
    assert step(found, trainer_losses=[1.0, 2.0]) == 3
    assert step(found, trainer_losses=[1.0, 2.0], reported=[5.0, 7.0]) == 6
    assert step(found, reported_loss=0.5) == 0.5


def after_single_losses(found, is_divided=False, **known):
    """Notes of a step with these losses, after a run in which every step had one."""
    noting = LossNotes()
    for loss in losses(lambda loss: loss / 4, [1.0] * ALONE_STEPS):
        noting.note(Notes(), loss, None, None, False)
    return noted(noting, found, is_divided, **known)


def noted(noting, found, is_divided=False, **known):
    notes = Notes()
    for name, value in known.items():
        setattr(notes, name, value)
    for loss in found:
        noting.note(notes, loss, None, None, is_divided)
    return notes


def test_the_graph_of_a_step_s_first_loss_is_not_read_after_steps_of_one_loss_each():
    notes = after_single_losses(losses(lambda loss: loss / 4))
    assert [loss.factors is None for loss in notes.losses] == [True, False, False, False]
    engine = noted(LossNotes(), losses(lambda loss: loss), is_divided=True, accumulation=4)
    assert all(loss.factors is None for loss in engine.losses), "an engine's division needs no graph"


def test_losses_times_their_label_tokens_are_averaged_over_label_tokens():
    counts = (3, 1, 8, 4)
    labels = [torch.tensor([5] * count + [-100] * (9 - count)) for count in counts]
    mean = sum(value * count for value, count in zip(VALUES, counts, strict=True)) / sum(counts)
    several = [loss * torch.tensor(count) for loss, count in zip(losses(lambda loss: loss), counts, strict=True)]
    assert step(several, labels=labels) == pytest.approx(mean)
    assert step(several[:1], labels=labels[:1]) == pytest.approx(VALUES[0])
    assert step(several[:1], labels=labels[1:2]) == pytest.approx(VALUES[0] * counts[0]), "not its own number"
    assert step(several, labels=labels[:3]) == pytest.approx(sum(loss.item() for loss in several) / 4)
    noting = LossNotes()
    for _ in range(ALONE_STEPS + 5):
        notes = noted(noting, [losses(lambda loss: loss)[0] * torch.tensor(3)], labels=labels[:1])
        assert step_loss(notes) == pytest.approx(VALUES[0])


def test_a_mean_computed_from_a_sum_and_multiplied_by_its_label_tokens_is_averaged_over_label_tokens():
    counts = (3, 1, 8, 4)
    labels = [torch.tensor([5] * count + [-100] * (9 - count)) for count in counts]

    def chunked(value, count):
        rows = torch.full((count,), value, requires_grad=True) * 1
        return sum(chunk.sum() for chunk in rows.chunk(2)) / torch.tensor(count)

    chunks = list(map(chunked, VALUES, counts))
    mean = sum(value * count for value, count in zip(VALUES, counts, strict=True)) / sum(counts)
    several = [loss * torch.tensor(count) for loss, count in zip(chunks, counts, strict=True)]
    assert step(several, labels=labels) == pytest.approx(mean)
    assert step(several[:1], labels=labels[:1]) == pytest.approx(VALUES[0])
    of_a_step = losses(lambda loss: loss / sum(counts) * counts[0], VALUES[:1])
    assert step(of_a_step, labels=labels[:1]) == pytest.approx(of_a_step[0].item())


@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED)
def test_losses_that_add_up_do_so_in_the_first_step_that_has_several(scale):
    expected = sum(loss.item() for loss in losses(scale))
    assert step_loss(after_single_losses(losses(scale))) == pytest.approx(expected)
    assert step_loss(after_single_losses(losses(scale), fetches={1: 4})) == pytest.approx(expected)


def test_the_first_step_of_several_losses_is_averaged_over_its_micro_batches_and_sums_different_losses():
    assert step_loss(after_single_losses(losses(lambda loss: loss))) == pytest.approx(10)
    weights = torch.ones(3, requires_grad=True)
    pair = [(weights**2).mean(), weights.abs().sum()]
    assert step_loss(after_single_losses(pair)) == pytest.approx(4)
    pairs = [loss for _ in range(2) for loss in ((weights**2).mean(), weights.abs().sum())]
    assert step_loss(after_single_losses(pairs, fetches={1: 2})) == pytest.approx(4)


def test_graphs_are_read_again_once_a_step_had_several_losses():
    noting = LossNotes()
    for loss in losses(lambda loss: loss, [1.0] * ALONE_STEPS):
        noting.note(Notes(), loss, None, None, False)
    assert noted(noting, losses(lambda loss: loss / 2, VALUES[:1])).losses[0].factors is None
    noted(noting, losses(lambda loss: loss / 2, VALUES[:2]))
    assert noted(noting, losses(lambda loss: loss / 2, VALUES[:1])).losses[0].factors is not None


class PassedOn(torch.autograd.Function):
    """The loss of a micro-batch whose gradients are known already, as in torchtitan's chunked loss."""

    @staticmethod
    def forward(ctx, hidden, gradient, loss):
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None, None


def chunked(value, divide, chunks=4):
    """Losses that go backward for one micro-batch of 40 tokens: those of its chunks, then the whole one."""
    hidden = torch.full((40,), value, requires_grad=True) * 1
    parts = [divide((part.detach().requires_grad_() * 1).sum()) for part in hidden.chunk(chunks)]
    return [*parts, PassedOn.apply(hidden, torch.ones(40), sum(parts).detach())]


def followed(found, **known):
    """Return the loss of a step with these losses, and its micro-steps."""
    notes = Notes()
    for name, value in known.items():
        setattr(notes, name, value)
    notes.losses = [note_loss(loss) for loss in found]
    notes.micro_steps = len(found)
    return step_loss(notes), notes.micro_steps


@pytest.mark.parametrize("chunks", [1, 4])
def test_losses_of_chunks_are_parts_of_the_loss_that_passes_their_gradients_on(chunks):
    for fetched in ({}, {1: 4}):
        of_a_step = [loss for value in VALUES for loss in chunked(value, lambda loss: loss / 160, chunks)]
        assert followed(of_a_step, fetches=fetched) == (pytest.approx(sum(VALUES) / 4), 4)
        of_each = [loss for value in VALUES for loss in chunked(value, lambda loss: loss * 0.025, chunks)]
        assert followed(of_each, fetches=fetched) == (pytest.approx(sum(VALUES) / 4), 4)
    auxiliary = (torch.ones(3, requires_grad=True) ** 2).mean()
    alone = chunked(3.0, lambda loss: loss / 40, chunks)
    assert followed([auxiliary, *alone], fetches={1: 1}) == (pytest.approx(4), 2)


def test_a_loss_that_went_backward_in_parts_to_cached_embeddings_is_one():
    parts = [(torch.full((3,), value, requires_grad=True) * 1).mean() for value in VALUES]
    whole = sum(part.detach() for part in parts).requires_grad_()  # sentence-transformers computes gradients in a hook
    assert followed([*parts, whole]) == (pytest.approx(40), 1)


def test_a_trainer_s_micro_steps_are_counted_by_what_its_step_returned():
    parts = [(torch.full((3,), value, requires_grad=True) * 1).mean() for value in VALUES]
    assert followed(parts, trainer_losses=[4.0, 6.0]) == (pytest.approx(10), 2)


def test_losses_that_happen_to_be_equal_are_not_joined():
    equal = [PassedOn.apply(torch.ones(2, requires_grad=True), torch.ones(2), torch.tensor(3.0)) for _ in range(2)]
    assert followed(equal) == (pytest.approx(3), 2)
    weights = torch.ones(3, requires_grad=True)
    assert followed([(weights**2).mean(), weights.abs().mean()]) == (pytest.approx(2), 2)
    other = chunked(3.0, lambda loss: loss / 40)[-1]
    assert followed([(weights**2).mean(), other]) == (pytest.approx(4), 2), "of another value"
