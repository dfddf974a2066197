"""Reports the trained model and its framework in the rank's hello."""

import weakref
from typing import Any

from ..active import switched_on
from ..loop.training import Training
from ..rank.model import describe_model, dtype_of, own_class, own_model
from ..values.model_flops import model_flops


def register_model(training: Training, model: Any) -> None:
    """Register the trained model: its name and size for the hello, the model itself for its memory."""
    introduction, trained = training.introduction, training.trained
    introduction.facts.update(describe_model(model, trained.tensor_parallel.ranks))
    introduction.facts["flops"] = model_flops(model, trained.tensor_parallel.ranks)
    introduction.parameter_dtype = dtype_of(model)
    trained.model = weakref.ref(getattr(model, "module", model))
    trained.shifts_labels = own_class(own_model(model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def report_framework(framework: str, model: Any = None) -> None:
    """Report the framework in the rank's hello, unless a more specific one is known already."""
    training = switched_on()
    if training is None or training.introduction.facts["framework"] not in ("pytorch", framework):
        return
    try:
        training.introduction.facts["framework"] = framework
        if model is not None:
            register_model(training, model)
        training.outbox.send_hello()
    except Exception as error:
        training.guard.disable(error)
