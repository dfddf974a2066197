"""Changes of gathered parameters that are lost."""

import sys
from types import SimpleNamespace

import pytest
import torch
from ftmon.trainer.probe.rank.model import Trained
from ftmon.trainer.probe.values.edits import Edits


def scale(parameter):
    parameter.data[0] *= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("value", [1.0, float("nan")])
@pytest.mark.parametrize("change", [None, scale])
def test_only_parameters_that_were_changed_are_told(dtype, value, change):
    values = torch.ones(8, 4, dtype=dtype)
    if dtype.is_floating_point:
        values[1, 1] = value
    parameter = torch.nn.Parameter(values, requires_grad=False)
    owner, edits = SimpleNamespace(params=[parameter]), Edits()
    edits.entered(owner, sys._getframe())
    if change is not None:
        change(parameter)
    found = edits.leaving(owner, False, Trained(), 0, 7)
    if values.isnan().any():
        assert found is None  # sums of such values tell nothing
    else:
        assert (found is not None) == (change is not None)
