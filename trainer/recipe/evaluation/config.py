"""Configuration of evaluation."""

from typing import Annotated

import msgspec

from ..config.fields import AtLeast0, AtLeast1, Section
from ..data.config import Data


class Evaluation(Section, frozen=True):
    """Loss on examples that are not trained on. One of `path`, `split` and `share` turns it on."""

    path: str = ""
    """A local file, in the form of `data.path`."""
    split: str = ""
    """A split of the data set `data.name`, such as validation."""
    share: Annotated[float, msgspec.Meta(ge=0.0, le=0.5)] = 0.0
    """Share of the training records that is set aside for evaluation, drawn from `training.seed`."""
    every: AtLeast0 = 0
    """Steps between evaluations; 0: at the end alone."""
    at_end: bool = True
    """Evaluate after the last step."""
    limit: AtLeast0 = 0
    """Evaluate on the first so many examples; 0: all."""
    micro_batch: AtLeast0 = 0
    """Sequences in one forward pass of one rank; 0: `training.micro_batch`."""
    patience: AtLeast0 = 0
    """Stop after so many evaluations in a row without a new lowest loss; 0: never."""
    samples: AtLeast0 = 0
    """Prompts of the first so many examples that are answered at each evaluation, and logged."""
    sample_tokens: AtLeast1 = 64
    """Longest answer, in tokens."""

    @property
    def on(self) -> bool:
        """There is something to evaluate on."""
        return bool(self.path or self.split or self.share)

    def data(self, trained: Data) -> Data:
        """Return the evaluation's own file or split as data that are read as those of the training are."""
        # A packed row would mix documents in one loss; padding is left out of the loss anyway.
        data = msgspec.structs.replace(trained, packing=False, limit=0, files=[])
        if self.path:
            return msgspec.structs.replace(data, path=self.path, name="", subset="")
        return msgspec.structs.replace(data, split=self.split)
