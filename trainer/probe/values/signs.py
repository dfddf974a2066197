"""Finds, in a step's batches and weights, the signs of faults that raise no error (``telemetry.Signs``).

The training thread only keeps references (``batch.Seen``) and copies a few weights; the publisher thread examines them.
Tensors on a device are examined only where a dataloader returned them on the host: nothing here waits for a device.
"""

import weakref
import zlib
from collections.abc import Callable, Sequence, Set
from types import FrameType
from typing import Any, NamedTuple

import numpy
import torch

from ....protocol.messages.telemetry import Signs
from ..device import cuda
from ..guard import frame_locals, log_error, nothing
from ..phases.tracker import Notes
from ..rank.model import Trained, nodes_under, number_of_elements, own_model, parameters_of
from .batch import IGNORED, Seen, is_dense

FIRST = 64  # Micro-batches at the beginning whose tokens are examined
ALIGNED = 4  # Steps at the beginning in which the labels of a loss are compared with the inputs
ALIGNED_EVERY = 500  # Steps between later comparisons: the loop stays what it is
_LABELS = 8  # Labels of a micro-batch that are enough for that
_ALIKE = 0.98  # Share of equal ones that is no accident
EVERY = 50  # Steps between later examinations, at least: the steps that are examined are full ones (``phases.budget``)
SAMPLED = 256  # Elements of one sampled parameter
SPREAD = 3  # Sampled parameters: the first matrix, one in the middle, the last
PUT_BACK = 4
FARTHEST = 10  # Times the learning rate that Adam moves no weight: 1 or, without its bias correction, 3 at first
ROUNDED = 64  # An update rounds a 16-bit weight by less than such a part of it
"""Updates at the beginning before which weights are sampled, too."""
_BIDIRECTIONAL = ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask")
_MOST_NODES = 12  # Operations between a cross entropy and the loss that goes backward
_MOST_ROWS = 8  # Tensors of token ids in the graph of a loss
_MOST_FRAMES = 32  # Frames between the function that makes a mask and the forward with the labels
_LIBRARIES = frozenset(("torch", "torchvision", "timm", "transformers", "peft", "diffusers", "deepspeed", "fairscale"))
"""Whose layers with a dropout are known by their names and attributes."""
_MOST_BYTES = 1 << 18  # Bytes of a tensor of which a batch's fingerprint is made: evenly spaced ones of a larger one


def is_examined(number: int, every: int) -> bool:
    """Return whether a later step is examined; one of ``every`` steps is a full one."""
    return number % max(EVERY, every) == 0


class Attended(NamedTuple):
    """What a transformers model makes its attention mask from."""

    implementation: str  # Of the attention: ``sdpa``, ``eager``, ``flash_attention_2`` ..
    mask: Any
    """The 2-D mask, here or on its way from the device; of a 4-D one which tokens but the first see the one before;
    None: none was passed."""
    positions: Any
    cached: bool
    bidirectional: bool = False  # Attention without a causal mask, as in encoders


def attended(config: Any, mask: Any, positions: Any, cached: bool, frame: FrameType | None = None) -> Attended | None:
    """Return what a mask is made from, without waiting for a device; None: the model is told nothing of documents.

    ``frame`` makes the mask: with an encoder's the positions are those that the model's forward received.
    """
    bidirectional = False
    if positions is None and frame is not None and frame.f_code.co_name in _BIDIRECTIONAL:
        bidirectional = frame_locals(frame).get("encoder_hidden_states") is None
    if bidirectional and frame is not None:
        positions = _forward(frame, "position_ids").get("position_ids")
        positions = positions if is_dense(positions) else None
    implementation = getattr(config, "_attn_implementation", None)
    wanted = isinstance(implementation, str) and positions is not None and positions.dim() == 2
    if mask is not None and mask.dim() == 4 and mask.shape[-1] == mask.shape[-2]:
        before, own = (mask[:, 0].diagonal(offset, -2, -1) for offset in (-1, 0))
        mask = _is_seen(before) & _is_seen(own)[:, 1:]  # not where the token is padding
    if not wanted or (mask is not None and mask.dim() != 2):
        return None
    here = [None if each is None else to_host(each) for each in (mask, positions)]
    if here[1] is None or (mask is not None and here[0] is None):
        return None  # too many copies are under way
    return Attended(str(implementation), here[0], here[1], cached, bidirectional)


def _is_seen(mask: Any) -> Any:
    return mask >= 0 if mask.is_floating_point() else mask != 0


def _forward(frame: FrameType, receives: str) -> dict[str, Any]:
    """Return the variables of the innermost forward around a frame that has one of this name; empty: there is none."""
    inside: FrameType | None = frame
    for _ in range(_MOST_FRAMES):
        if inside is None:
            break
        if inside.f_code.co_name == "forward" and receives in inside.f_code.co_varnames:
            return frame_locals(inside)
        inside = inside.f_back
    return {}


def received(frame: FrameType, is_trained: Callable[[Any], bool]) -> Seen | None:
    """Return what a trained model's forward received, by a frame inside it, without waiting for a device.

    Its labels are None if the script computes the loss itself. None: no model that may learn from labels.
    """
    given = _forward(frame, "labels")
    owner, labels = given.get("self"), given.get("labels")
    if not isinstance(owner, torch.nn.Module) or (labels is not None and not _are_labels(labels)):
        return None
    if not is_trained(owner):
        return None
    given = [each if is_dense(each) else None for each in map(given.get, ("input_ids", "attention_mask"))]
    return Seen(*(None if each is None else to_host(each) for each in (*given, labels)))


def labels_of(loss: Any, ids: Any = None) -> Any:
    """Return the labels from which PyTorch's cross entropy computed the loss of a batch; None: unknown.

    The graph keeps them until its backward, and so it does a mask by which the losses of the tokens were multiplied:
    masked ones count as ignored. Shape [1, labels]: they are flat, and those of causal models are shifted. Beside other
    terms of the loss, labels of a part of the tokens ``ids`` are not returned: others may have a loss of their own.
    """
    node, alone, masks = getattr(loss, "grad_fn", None), True, list[Any]()
    try:
        for _ in range(_MOST_NODES):
            if node is None or type(node).__name__.startswith("NllLoss"):
                break
            if type(node).__name__ == "MulBackward0":
                masks += (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
            before = [each for each, _ in node.next_functions if each is not None]
            alone, node = alone and len(before) == 1, next(iter(before), None)
        labels: Any = getattr(node, "_saved_target", None)
        ignored = int(getattr(node, "_saved_ignore_index", IGNORED))
        ignored -= (ignored >= 1 << 63) << 64  # it is given without its sign
    except RuntimeError:  # they were changed in place since
        return None
    if not _are_labels(labels):
        return None
    is_whole = ids is not None and len(ids.shape) == 2 and labels.numel() in (ids.numel(), ids[:, 1:].numel())
    if not (alone or is_whole):
        return None
    labels = labels.detach().reshape(1, -1)
    for mask in masks:
        if is_dense(mask) and mask.numel() == labels.numel() > 1:
            labels = torch.where(mask.detach().reshape(1, -1) == 0, ignored, labels)
    return to_host(labels if ignored == IGNORED else torch.where(labels == ignored, IGNORED, labels))


def ids_of(loss: Any) -> list[Any]:
    """List the rows of token ids that a loss's graph has embedded: of an encoder and a decoder, both."""
    found: dict[int, Any] = {}
    for node in nodes_under([loss]):
        if type(node).__name__ == "EmbeddingBackward0" and len(found) < _MOST_ROWS:
            try:
                ids = node._saved_indices
            except RuntimeError:  # they were changed in place since
                continue
            if _are_labels(ids) and ids.dim() == 2:
                found.setdefault(ids.data_ptr(), ids)
    return list(map(to_host, found.values()))


def _are_labels(value: Any) -> bool:
    return is_dense(value) and not value.is_floating_point()


def to_host(tensor: Any) -> Any:
    """Return a tensor without its graph, on the host or on its way there; None: too many copies are under way."""
    return cuda.fetch(tensor) if tensor.is_cuda else tensor.detach()


class WeightSampler:
    """Copies a few weights after each update; for the training thread."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._of: Callable[[], Any] = nothing
        self._parameters: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        """Sampled ones of the present owner, by what updates them."""
        self._gradients_of: list[Any] = []
        self._looked_at: Callable[[], Any] = nothing
        self._differing: list[weakref.ref[Any]] = []
        """Modules of that model that behave differently in evaluation mode."""
        self._off: list[int] = []
        self._part = ""  # Those in evaluation mode in a model that trains, by place, and the part they were taken for

    def in_evaluation(self) -> bool:
        """Return whether the model is in evaluation mode, and has layers that behave differently there."""
        model = own_model(self._trained.any_model())  # a script may switch the model inside a wrapper
        if model is None or model.training:
            return False
        self._look_at(model)
        # A part in training mode: the modes were chosen for each part, as for a backbone that is frozen.
        return bool(self._differing) and not any(child.training for child in model.children())

    def part_in_evaluation(self, updater: Any) -> str:
        """Return the name of a part that is trained in evaluation mode while others are not in it; empty: none."""
        model = own_model(self._trained.any_model())
        if model is None or not (model.training or any(child.training for child in model.children())):
            return ""
        self._look_at(model)
        modules = [reference() for reference in self._differing]
        off = [place for place, module in enumerate(modules) if module is not None and not module.training]
        if off != self._off:
            self._off, self._part = off, _trained_part(model, updater, [modules[place] for place in off])
        return self._part

    def _look_at(self, model: Any) -> None:
        if model is not self._looked_at():
            self._looked_at, self._off, self._part = weakref.ref(model), [], ""
            self._differing = [weakref.ref(each) for each in model.modules() if _differs_in_evaluation(each)]

    def take(self, updater: Any) -> tuple[Any, ...] | None:
        """Return weights after an update by ``updater``, on the host or on their way there; None: nothing to sample."""
        owner = self._trained.any_model()
        owner = self._trained.primary() or updater if owner is None else owner
        if owner is not self._of():
            self._of = weakref.ref(owner) if owner is not None else nothing
            self._parameters.clear()
        by = owner if updater is None else updater
        if by is None:
            return None
        references = self._parameters.get(by)
        if references is None:
            references = self._parameters[by] = [weakref.ref(each) for each in _spread(owner, updater)]
        parameters = [parameter for reference in references if (parameter := reference()) is not None]
        if not all(parameter.requires_grad for parameter in parameters) and _trained_by(owner, updater):
            del self._parameters[by]  # others are trained now
            return None
        values = tuple(map(_copy, parameters))
        return values if values and all(value is not None for value in values) else None

    def gradients(self, updater: Any = None) -> tuple[Any, ...]:
        """Return the gradients of the weights that were sampled last, like ``take``; of ``updater``, or of the last."""
        if updater is not None:
            own = set(map(id, parameters_of(updater)))
            self._gradients_of = [each for each in self._parameters.get(updater, ()) if id(each()) in own]
        return tuple(_gradient(each) for reference in self._gradients_of if (each := reference()) is not None)


def _gradient(parameter: Any) -> Any:
    gradient = parameter.grad
    return None if gradient is None or gradient.layout is not torch.strided else _copy(gradient)


def left_out(model: Any, updated: Set[int], others: Sequence[Any] = ()) -> tuple[int, str]:
    """Return how many parameters of a model have gradients and are not ``updated``, by ids, and the first one's name.

    ``others`` are parameters of its loss, which may be no part of it, as in a Python list of layers. Not those of a
    data type of which none is updated: an optimizer may update copies of them in another one.
    """
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    own = {id(each) for each in model.parameters()}
    # FSDP1 trains flat parameters in place of those that the optimizer has.
    others = [each for each in others if id(each) not in own and not getattr(each, "_is_flat_param", False)]
    trained += [(f"a parameter {list(each.shape)} outside of the model", each) for each in others]
    kinds = {each.dtype for _, each in trained if id(each) in updated}
    found = [
        name for name, each in trained if id(each) not in updated and each.grad is not None and each.dtype in kinds
    ]
    return len(found), next(iter(found), "")


def has_gradients(updater: Any) -> bool:
    """Return whether a parameter of an optimizer has a gradient; True for an engine, which keeps them elsewhere."""
    groups = getattr(updater, "param_groups", None)
    return groups is None or any(each.grad is not None for group in groups for each in group["params"])


def gradient_of(updater: Any) -> Callable[[], Any]:
    """Return a weak reference to an optimizer's first gradient, which shows whether a script has replaced it."""
    groups = getattr(updater, "param_groups", ())
    gradients = (each.grad for group in groups for each in group["params"] if each.grad is not None)
    first = next(gradients, None)
    return nothing if first is None else weakref.ref(first)


def _are_zero(gradients: Sequence[Any]) -> bool:
    return bool(gradients) and not any(each is None or bool(_on_host(each).any()) for each in gradients)


def _were_kept(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return whether sampled gradients of an update, some not 0, were the same before the next backward."""
    if not before or len(before) != len(now) or any(each is None for each in (*before, *now)):
        return False
    pairs = [(_on_host(own), _on_host(other)) for own, other in zip(before, now, strict=True)]
    is_same = all(_bytes(own).tobytes() == _bytes(other).tobytes() for own, other in pairs)
    return is_same and any(bool(own.any()) for own, _ in pairs)


def has_lost_weights(trained: Trained) -> bool:
    """Return whether a weight on the host is not finite: all are looked at, as a loss is lost but once."""
    owner = trained.any_model() or trained.primary()
    if owner is None:
        return False
    parameters = parameters_of(owner) if hasattr(owner, "param_groups") else owner.parameters()
    try:
        return not all(bool(torch.isfinite(each).all()) for each in map(_local, parameters) if each.is_cpu)
    except (RuntimeError, TypeError):  # of a kind whose values cannot be read
        return False


def _local(parameter: Any) -> Any:
    """Return this rank's part of a parameter, without its graph."""
    return getattr(parameter, "_local_tensor", getattr(parameter, "ds_tensor", parameter)).detach()


def _spread(owner: Any, updater: Any) -> list[Any]:
    """Return the first, a middle and the last matrix that is trained and updated; else other parameters.

    ``owner`` is a model or an optimizer. What ``updater`` does not have may stand still on purpose; embeddings change
    in the rows that a step uses.
    """
    model = None if hasattr(owner, "param_groups") else owner
    trained = _trained_by(owner, updater) or parameters_of(updater)
    modules = () if model is None else model.modules()
    rows = {id(each.weight) for each in modules if isinstance(each, torch.nn.Embedding)}
    trained = [each for each in trained if id(each) not in rows]
    shapes = [getattr(each, "ds_shape", each.shape) for each in trained]
    matrices = [each for each, shape in zip(trained, shapes, strict=True) if len(shape) >= 2] or trained
    places = sorted({min(1, len(matrices) - 1), len(matrices) // 2, len(matrices) - 1})
    return [matrices[place] for place in places[:SPREAD] if matrices]


def _trained_by(owner: Any, updater: Any) -> list[Any]:
    parameters = parameters_of(owner) if hasattr(owner, "param_groups") else owner.parameters()
    trained = [each for each in parameters if each.requires_grad]
    updated = [each for each in parameters_of(updater) if each.requires_grad]
    own = set(map(id, updated))
    return [each for each in trained if id(each) in own] or updated or trained


def _copy(parameter: Any) -> Any:
    flat = _local(parameter).reshape(-1)[:SAMPLED]
    if not flat.numel():
        return None
    return cuda.fetch(flat) if flat.is_cuda else flat.clone()


class SignReader:
    """Examines steps in their order; for the publisher thread."""

    def __init__(self, trained: Trained) -> None:
        self.unlabelled = False
        """Whether the labels examined last were all ignored: every micro-batch is examined until there are others."""
        self._trained = trained
        self._examined = self._attended_in = self._labelled_in = self._of_loss_in = 0
        """Micro-batches whose tokens were read, and the last steps whose masks, labels and labels of the loss were."""
        self._broken = False
        self._weights: dict[int, bytes] = {}
        self._before: list[bytes] = []  # Those before the latest update before which weights were sampled
        self._put_back = 0  # How often they were the same as before the update before, which had changed them
        self._shifted = ""  # How labels were shifted when they were looked at last, if not once
        self._batch = self._repeated = 0  # Fingerprint of the last micro-batch; how many of the step repeat one before

    def of_step(self, number: int, notes: Notes, every: int = 1) -> tuple[int, Signs | None]:
        """Return the fingerprint of a step's data, 0 if unknown, and its signs, None if there are none.

        After an error, of tensors that nobody foresaw, there are none in any step.
        """
        if not self._broken:
            try:
                return self._batch_id(notes.seen), self._read(number, notes, every)
            except Exception as error:
                self._broken = True
                log_error("the signs of silent faults", error)
        return 0, None

    def _batch_id(self, seen: Sequence[Seen]) -> int:
        found = self._repeated = 0
        for each in seen:
            ids = each.ids
            if ids is None or ids.is_cuda:
                self._batch = 0
                return 0
            content = _bytes(ids)
            before, self._batch = self._batch, zlib.crc32(content[:: 1 + len(content) // _MOST_BYTES].tobytes())
            self._repeated += self._batch == before
            found = zlib.crc32(self._batch.to_bytes(4), found)
        return found

    def _read(self, number: int, notes: Notes, every: int) -> Signs | None:
        if notes.weights_before is not None:
            self._of_weights(notes.weights_before)
            before, self._before = self._before, list(self._weights.values())
            self._put_back = self._put_back + 1 if self._before == before else 0
        weights = self._of_weights(notes.weights)
        self._put_back *= weights != "same"
        figures: dict[str, Any] = {
            "overwritten": notes.weights_before is not None and self._are_overwritten(notes),
            "unloaded": notes.unloaded,
            "pending": notes.pending,
            "dropped": notes.dropped,
            "left_out": notes.left_out[0],
            "left_out_first": notes.left_out[1],
            "detached": notes.detached[0],
            "detached_first": notes.detached[1],
            "clipped": "kept" if notes.gradients and _were_kept(*notes.gradients) else notes.clipped,
            "evaluating": notes.evaluating,
            "evaluating_part": notes.evaluating_part,
            "weights_lost": notes.weights_lost,
            "no_gradients": notes.no_gradients,
            "zero_gradients": notes.gradients is not None and _are_zero(notes.gradients[0]),
            "apart": notes.never_reduced,
            "repeated": self._repeated,
            "weights": weights,
            "put_back": notes.weights_before is not None and self._put_back == PUT_BACK - 1,
        }
        batches = [Seen(*map(_on_host, each)) for each in (*notes.seen, *notes.received)]
        arrived = [each for each in batches if each.labels is not None]
        if seen := [each if each.of_loss is None else each._replace(labels=each.of_loss) for each in arrived]:
            figures |= _labels(seen)
            self.unlabelled = "unlabelled" in figures
            # The steps between, of which the batches alone were looked at, may have lost their labels in the loop.
            lost = _labels(arrived) != _labels(seen)
            before = self._of_loss_in if lost else self._labelled_in
            if self.unlabelled and before < number - 1:
                figures["labelled_after"] = before
            self._labelled_in = number
            if any(each.of_loss is not None for each in arrived):
                self._of_loss_in = number
        pair = next(iter(notes.targets), None)
        model = own_model(self._trained.any_model())
        if pair is not None and _continues(model, pair[0]):
            shifted = _shifted_of(*pair)
            figures["shifted"] = shifted if shifted != "once" or self._shifted else ""
            self._shifted = shifted if shifted != "once" else ""
            if not _has_encoder(model):
                figures |= _padding_in(batches, *pair)
        if seen and (self._examined < FIRST or is_examined(number, every)):
            self._examined += len(seen)
            figures |= self._tokens(seen)
        if reasons := list(filter(None, map(_mixed, notes.attended))):
            before = self._attended_in if self._attended_in < number - 1 else 0
            figures |= {"mixed": len(reasons), "mixed_by": reasons[0], "mixed_after": before}
        if notes.attended:
            self._attended_in = number
        told = {name: value for name, value in figures.items() if value}
        return Signs(**told) if told else None

    def _are_overwritten(self, notes: Notes) -> bool:
        """Return whether an engine's update moved half of the weights further than Adam can."""
        own: Any = getattr(getattr(self._trained.engine(), "optimizer", None), "optimizer", None)
        if notes.weights is None or "adam" not in type(own).__name__.lower():
            return False
        # The groups may have the next step's rates by now.
        rate = max(cuda.read(notes.lr) or 0, *(float(group.get("lr") or 0) for group in own.param_groups))
        if not rate:
            return False
        far = total = 0
        for one, other in zip(notes.weights_before, notes.weights, strict=False):
            before, after = _on_host(one).float(), _on_host(other).float()
            far += int(((after - before).abs() > FARTHEST * rate + before.abs() / ROUNDED).sum())
            total += before.numel()
        return far >= total / 2 > 0

    def _of_weights(self, sample: tuple[Any, ...] | None) -> Any:
        if sample is None:
            return ""
        unchanged = True
        for place, value in enumerate(sample):
            tensor = _on_host(value)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return "nan"
            content = _bytes(tensor).tobytes()
            unchanged &= self._weights.get(place) == content
            self._weights[place] = content
        return "same" if unchanged else ""

    def _tokens(self, seen: Sequence[Seen]) -> dict[str, Any]:
        model = own_model(self._trained.any_model())
        config = getattr(model, "config", None)
        figures: dict[str, Any] = {}
        begin = _of_generation("bos_token_id", config, model)
        if _generates(model) and isinstance(begin, int):
            figures["begun_twice"] = sum(_begins_twice(each, begin) for each in seen)
        if (
            _generates(model)
            and (ends := _ends_of(config, model))
            and all(_here(each.ids) and _here(each.labels) for each in seen)
        ):
            inputs = learned = 0
            for each in seen:
                ids, labels = each.ids.numpy(), each.labels.numpy()
                if not numpy.any(labels != IGNORED):
                    continue  # another finding names these
                if ids.shape != labels.shape and labels.size not in (ids.size, ids[:, 1:].size):
                    return figures
                real = numpy.ones(ids.shape, bool) if not _here(each.mask) else each.mask.numpy() != 0
                if real.shape != ids.shape:
                    return figures
                # No label before the first position; as a first token it is often the beginning, too.
                inputs += int(numpy.count_nonzero((numpy.isin(ids, ends) & real)[:, 1:]))
                labels = labels[:, 1:] if ids.shape == labels.shape else labels
                learned += int(numpy.count_nonzero(numpy.isin(labels, ends)))
            figures |= {"ends": inputs, "learned_ends": learned}
        return figures


def _on_host(value: Any) -> Any:
    return value.tensor() if isinstance(value, cuda.Fetched) else value


def _bytes(tensor: Any) -> Any:
    """Return a tensor's bytes as a NumPy array; PyTorch's operations give up the interpreter's lock, NumPy's do not."""
    if not tensor.is_floating_point():
        return numpy.ascontiguousarray(tensor.numpy()).reshape(-1).view(numpy.uint8)
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _here(tensor: Any) -> bool:
    return tensor is not None and not tensor.is_cuda and tensor.dim() == 2 and not tensor.is_floating_point()


def _labels(seen: Sequence[Seen]) -> dict[str, int]:
    labelled = [each.labels for each in seen if _here(each.labels)]
    empty = sum(not numpy.any(labels.numpy() != IGNORED) for labels in labelled)
    return {"labelled": len(labelled), "unlabelled": empty} if empty else {}


def _shifted_of(rows: Sequence[Any], targets: Any) -> str:
    """Return how far the labels of a loss are shifted against the ids of its batch: of several, the next ones count."""
    ids, labels = map(_on_host, rows), _on_host(targets)
    found = [how for each in ids if (how := _shifted(each, labels))]
    return "once" if "once" in found else next(iter(found), "")


def _shifted(ids: Any, targets: Any) -> str:
    """Return how far the labels of a loss are shifted against the ids of its batch; empty: they are other ones.

    ``ids`` have the shape [rows, tokens]; ``targets`` are as many, or one less in each row, in their order.
    """
    if ids is None or targets is None or ids.is_cuda or ids.dim() != 2 or ids.is_floating_point():
        return ""
    ids = ids.numpy()
    if targets.numel() not in (ids.size, ids[:, 1:].size):
        return ""
    labels = targets.numpy().reshape(len(ids), -1)
    for by, name in ((1, "once"), (0, "never"), (2, "twice")):
        width = min(labels.shape[1], ids.shape[1] - by)
        counted = labels[:, :width] != IGNORED
        number = numpy.count_nonzero(counted)
        alike = numpy.count_nonzero((labels[:, :width] == ids[:, by : by + width]) & counted)
        if number < _LABELS or alike >= (0.5 if by == 1 else _ALIKE) * number:
            return name if number >= _LABELS else ""
    return ""


def _generates(model: Any) -> bool:
    """Return whether a model may learn where to end: masked language models and classifiers do not."""
    can_generate = getattr(model, "can_generate", None)
    return not callable(can_generate) or bool(can_generate())


def _continues(model: Any, rows: Sequence[Any]) -> bool:
    """Return whether a model may predict what follows its input: an encoder's labels may be the input itself.

    Beside an encoder's input, what its decoder is given must be among ``rows``: square ones are relative positions.
    """
    if not _generates(model) or not _has_encoder(model):
        return _generates(model)
    shapes = [list(each.shape) for each in map(_on_host, rows) if each is not None]
    lengths = [shape[0] for shape in shapes if len(shape) == 2 and shape[0] != shape[1]]
    return len(set(lengths)) < len(lengths)


def _has_encoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _begins_twice(seen: Seen, begin: int) -> bool:
    """Return whether each row of a micro-batch begins with two such tokens, after its padding."""
    if not _here(seen.ids) or seen.ids.shape[1] < 2:
        return False
    ids, first = seen.ids.numpy(), numpy.zeros(len(seen.ids), int)
    if _here(seen.mask) and seen.mask.shape == seen.ids.shape:
        first = numpy.minimum((seen.mask.numpy() != 0).argmax(1), ids.shape[1] - 2)
    rows = numpy.arange(len(ids))
    return bool((ids[rows, first] == begin).all() and (ids[rows, first + 1] == begin).all())


def _padding_in(batches: Sequence[Seen], rows: Sequence[Any], targets: Any) -> dict[str, int]:
    """Count the labels of a loss that are padding after padding, and all of them; empty: there are none such.

    The mask is that of the batch whose ids the loss's graph has embedded.
    """
    labels, embedded = _on_host(targets), [each for each in map(_on_host, rows) if _here(each)]
    if labels is None or labels.is_cuda:
        return {}
    masked = [each for each in batches if _here(each.ids) and _here(each.mask) and each.mask.shape == each.ids.shape]
    seen = next((each for each in masked if any(torch.equal(each.ids, ids) for ids in embedded)), None)
    if seen is None or labels.numel() not in (seen.ids.numel(), seen.ids[:, 1:].numel()):
        return {}
    real, ids = seen.mask.numpy() != 0, seen.ids.numpy()
    labels = labels.numpy().reshape(len(ids), -1)[:, : ids.shape[1] - 1]
    counted = labels != IGNORED
    edges = (real[:, 1:] != real[:, :-1]).sum(1, keepdims=True)
    padding = ~real[:, 1:] & ~real[:, :-1] & (edges == 1) & counted & (labels == ids[:, 1:])
    if len(numpy.unique(ids[:, 1:][padding])) != 1:
        return {}  # tokens that the attention leaves out on purpose
    return {"padding": int(padding.sum()), "padding_of": int(counted.sum())}


def _ends_of(config: Any, model: Any) -> list[int]:
    """Return the ids of a model's end-of-sequence tokens: those at which it stops, if it says."""
    ends = _of_generation("eos_token_id", config, model)
    return [] if ends is None else [int(end) for end in (ends if isinstance(ends, list | tuple) else [ends])]


def _of_generation(name: str, config: Any, model: Any) -> Any:
    for holder in (getattr(model, "generation_config", None), config, getattr(config, "text_config", None)):
        if (found := getattr(holder, name, None)) is not None:
            return found
    return None


def _mixed(attended: Attended) -> str:
    """Return why the documents of a row attend to each other; empty: they do not.

    transformers reads documents from ``position_ids`` only where it makes the mask itself: without a mask and a cache
    (``masking_utils._preprocess_mask_arguments``); Flash Attention's variants only for a batch of one row
    (``modeling_flash_attention_utils._is_packed_sequence``).
    """
    mask, positions = map(_on_host, (attended.mask, attended.positions))
    positions = positions.numpy()
    flash = "flash" in attended.implementation
    restarts = positions[:, 1:] < positions[:, :-1]  # a skip, or an image at one position, is no other document
    if mask is not None and mask.shape[1] == restarts.shape[1]:
        return "4-D mask" if (restarts & (mask.numpy() != 0)).any() and not flash else ""
    if mask is not None:
        numbers = mask.numpy()
        if numbers.shape[1] != positions.shape[1]:
            return ""
        real = numbers != 0
        real = real[:, 1:] & real[:, :-1]
        if not flash and (real & (numbers[:, 1:] != numbers[:, :-1])).any():  # kernels for packed rows may read them
            return "numbers"
        restarts = restarts & real  # positions of padding count anew, too
    if not restarts.any():
        return ""
    if attended.bidirectional:
        return "" if flash else "encoder"
    if flash:
        return "batch" if len(positions) > 1 else ""
    return "mask" if mask is not None else "cache" if attended.cached else ""


def _trained_part(model: Any, updater: Any, off: Sequence[Any]) -> str:
    """Return the name of the first part of a model in evaluation mode that has some of the modules ``off``.

    Not of one whose parameters are mostly frozen, as below adapters, or of batch norms alone, which scripts freeze so.
    """
    names, updated = {id(each) for each in off}, set(map(id, parameters_of(updater)))
    if not any(id(each) in updated for each in model.parameters()):
        updated = set(map(id, model.parameters()))  # ZeRO and FSDP update others in their place
    inside: tuple[str, ...] = ()
    for name, part in model.named_modules():
        if part.training or not name or name.startswith(inside):
            continue
        inside += (f"{name}.",)
        modules = list(part.modules())
        if names.isdisjoint(map(id, modules)):
            continue
        own = [one for each in modules if not _is_norm(each) for one in each.parameters(recurse=False)]
        sizes = [(number_of_elements(each), each.requires_grad and id(each) in updated) for each in own]
        if 2 * sum(size for size, is_trained in sizes if is_trained) > sum(size for size, _ in sizes):
            return name
    return ""


def _is_norm(module: Any) -> bool:
    return "BatchNorm" in type(module).__name__


def _differs_in_evaluation(module: Any) -> bool:
    kind = type(module)
    if _is_norm(module) or ("Dropout" in kind.__name__ and getattr(module, "p", 0.0)):
        return True
    if any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(module).items()):
        return True
    # A script's own layer that asks for its mode, but for libraries' layers, which ask for other reasons, too.
    read = getattr(getattr(kind.forward, "__code__", None), "co_names", ())
    is_own = kind.__module__.partition(".")[0] not in _LIBRARIES
    return is_own and "training" in read and "gradient_checkpointing" not in read
