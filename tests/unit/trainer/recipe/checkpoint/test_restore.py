"""What DeepSpeed's universal format leaves undone."""

import pytest
import torch
from ftmon.trainer.recipe.checkpoint.restore import move_step_counts


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_step_counts_are_beside_the_weights_of_fused_optimizers_alone(fused: bool, device: str, stage: int) -> None:
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([weight], fused=None)
    optimizer.param_groups[0]["fused"] = fused
    optimizer.state[weight]["step"] = torch.tensor(6.0)
    if stage == 3:  # its groups are empty between steps
        optimizer.param_groups[0]["params"] = []
    move_step_counts(optimizer)
    assert optimizer.state[weight]["step"].device.type == device
