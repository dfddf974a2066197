"""The table of figures keeps the rules of the systems it names figures for."""

import math
import re

import pytest
from ftmon.protocol.figures import FIGURES, PREFIX, Figure, finite_flag, points
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from messages import EXAMPLES

LISTED = [figure for group in FIGURES.values() for figure in group]
ALL = [*LISTED, *(finite_flag(figure) for figure in LISTED if figure.may_be_nan)]
UNITS = ("seconds", "bytes", "ratio", "watts", "celsius", "hertz")
# As emitted by megatron/core/telemetry/training_metrics.py.
MEGATRON = {"step_duration_ms", "loss", "throughput_tflops", "grad_norm", "skipped_iters", "learning_rate"}
MEGATRON |= {"tokens_per_sec", "memory_allocated_gb"}
# As logged by transformers.Trainer: `_maybe_log_save_evaluate`, `log`, `evaluate`, and TrainerState.
TRAINER = {"loss", "grad_norm", "learning_rate", "step", "max_steps", "eval_loss", "eval_runtime"}


def step(**fields: object) -> Step:
    phases = [
        PhaseRecord("forward", 0, 30, Span(1, 5, 9), Span(2, 6, 10)),
        PhaseRecord("eval", 30, 50, *[Span(5, 5, 5)] * 2),
    ]
    return Step(0, 7, 1.0, 80, phases, **fields)  # type: ignore[arg-type]


def test_every_name_is_a_prometheus_one_with_its_base_unit_or_of_trackers_and_is_used_once():
    names = [PREFIX + figure.name for figure in ALL]
    assert [name for name in names if not re.fullmatch("[a-z][a-z0-9_]*", name)] == []
    assert len(set(names)) == len(names)
    for figure in ALL:
        assert not figure.unit or figure.name.endswith(f"_{figure.unit}"), figure.name
        assert figure.unit or not figure.name.endswith(UNITS) or figure.name.endswith("_per_second"), figure.name
        assert figure.name.endswith("_total") == (figure.kind != "gauge"), figure.name
        assert figure.help[0].isupper(), figure.name
        assert not figure.help.endswith("."), figure.name
    names = [figure.tracker for figure in ALL if figure.tracker]
    assert [name for name in names if not re.fullmatch("(train|eval|system)(/[a-z_]+)?", name)] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        ([figure.megatron.removeprefix("megatron.training.") for figure in LISTED if figure.megatron], MEGATRON),
        ([figure.transformers for figure in LISTED if figure.transformers], TRAINER),
    ],
)
def test_the_names_of_other_systems_are_those_they_use(names: list[str], known: set[str]) -> None:
    assert sorted(names) == sorted(known)


@pytest.mark.parametrize(
    "message", [each for each in EXAMPLES if type(each) in FIGURES], ids=lambda each: type(each).__name__
)
def test_every_figure_of_a_message_is_read_with_the_same_labels(message: object) -> None:
    found = list(points(message))  # type: ignore[arg-type]
    assert {point.figure.name for point in found} >= {figure.name for figure in FIGURES[type(message)]}  # type: ignore[index]
    labels: dict[Figure, set[str]] = {}
    for point in found:
        assert labels.setdefault(point.figure, set(point.labels)) == set(point.labels)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 2.5])
def test_a_loss_that_is_no_number_has_a_flag_that_is_one(loss: float) -> None:
    found = {point.figure.name: point.value for point in points(step(loss=loss, grad_norm=-loss))}
    assert found["loss_finite"] == found["grad_norm_finite"] == float(math.isfinite(loss))
    assert all(
        math.isfinite(value)
        for name, value in found.items()
        if name.removesuffix("_finite") not in ("loss", "grad_norm") or name.endswith("_finite")
    )


def test_values_are_in_base_units_and_what_is_unknown_is_left_out() -> None:
    found = {(point.figure.name, point.labels.get("phase", "")): point.value for point in points(step(tokens=6))}
    assert found["step_duration_seconds", ""] == 80e-6
    assert found["phase_duration_seconds", "eval"] == 50e-6
    assert found["tokens_per_second", ""] == pytest.approx(6 / 30e-6), "evaluations do not count"
    assert (found["memory_allocated_bytes", ""], found["memory_allocated_peak_bytes", ""]) == (5, 9)
    assert not {"loss", "loss_finite", "memory_resident_peak_bytes", "step_device_duration_seconds"} & {
        name for name, _ in found
    }
