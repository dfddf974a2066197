"""Run models folded from frames or from messages."""

from collections.abc import Iterable

from ftmon.protocol.messages.wire import Frame, Message
from ftmon.tui.model.run import RunModel
from streams import STARTED


def folded(frames: Iterable[Frame]) -> RunModel:
    model = RunModel()
    for frame in frames:
        model.apply(frame)
    return model


def model_of(*messages: Message, t: float = STARTED, every: float = 0.001) -> RunModel:
    """Fold messages that the hub received at ``t`` and later, one each ``every`` seconds."""
    return folded(Frame(seq, t + seq * every, message) for seq, message in enumerate(messages, 1))
