"""A rank's part of the batches that several ranks train on together (tensor and pipeline parallelism).

Steps count a batch once: sums over ranks of samples, tokens and FLOPs are those of the whole job.
"""

import sys
from typing import Any, NamedTuple


class BatchShare(NamedTuple):
    """A rank's equal part of the counts of a batch."""

    place: int
    """The rank's place among those that train on the batch."""
    ranks: int
    """Their number; 0: the batch is counted elsewhere."""

    def of(self, count: int) -> int:
        """Return this rank's part of a count; the parts of all ranks add up to it."""
        if not self.ranks:
            return 0
        return (self.place + 1) * count // self.ranks - self.place * count // self.ranks


WHOLE = BatchShare(0, 1)
"""No other rank trains on the batch."""
COUNTED_ELSEWHERE = BatchShare(0, 0)
"""The first stage of the pipeline counts the batch."""


def of_optimizer(optimizer: Any) -> BatchShare:
    """Return the rank's part by the device mesh of an optimizer's parameters, if that has a dimension named ``tp``."""
    if "torch.distributed.tensor" not in sys.modules:
        return WHOLE
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = getattr(parameter, "device_mesh", None)
            names = getattr(mesh, "mesh_dim_names", None) or ()
            place = mesh.get_coordinate() if mesh is not None and "tp" in names else None
            if mesh is not None and place is not None:
                dimension = names.index("tp")
                return BatchShare(place[dimension], mesh.size(dimension))
    return WHOLE
