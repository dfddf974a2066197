"""State of the training loop, and what its parts share."""

from dataclasses import dataclass, field

from ..phases.forwards import Forwards
from ..phases.tracker import Tracker
from ..rank.context import RankContext
from ..rank.trained import Trained
from .phases import Phases


class LoopState:
    """Flags of the training thread; hooks, micro-steps and updates read and write them."""

    def __init__(self) -> None:
        self.in_forward = False
        """A forward that a hook has seen is under way; forwards of modules inside it are parts of it."""
        self.in_backward = False
        self.in_update = False
        self.closures = 0
        """Running closures of the update under way; their work is no part of the update."""
        self.evaluations = 0
        """Number of calls of its closure by the update under way."""
        self.rehearsing = False
        """A rehearsal is under way: updates end no steps."""
        self.engine_steps = False
        """A DeepSpeed engine makes the updates, so a bare optimizer's step is a part of one."""
        self.making_engine = False
        """A DeepSpeed engine is being made; some optimizers step on zero gradients meanwhile."""
        self.forward_by = ""
        """Reporter of the forward's begin (``engine``, ``trainer``, ``parallel``), so that ``data`` lasts until
        then; empty: none does, and the forward is the time between a batch and its backward.
        """
        self.calls_module = False
        """The script calls the module inside its engine, so that no hook reports the forward."""
        self.sum_losses = False
        """The script is known to divide its micro-steps' losses itself."""
        self.normalised_over_ranks = False
        """The loss is divided by the label tokens of all ranks, so ranks count alike in its mean."""
        self.added_ranks = 1.0
        """Ranks whose gradients are added up without a division; their losses add up too. 1: it is their mean."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What the parts that follow the training thread share."""

    rank: RankContext
    trained: Trained
    """Engine, model and optimizer that the rank trains."""
    tracker: Tracker
    phases: Phases
    forwards: Forwards
    state: LoopState = field(default_factory=LoopState)
