"""The systems of ``--report-to``: one line each, in ``REPORT_TARGETS``. The command line imports it, so it is light."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import NamedTuple

from ..errors import UsageError


class ReportTarget(NamedTuple):
    """A system that a run can be sent to. The extra with its packages has the same name as the target."""

    target: str  # `module:name` in `ftmon.trainer.exporters` of what makes the `report.Target`: a class or a function
    package: str  # what must be importable


REPORT_TARGETS = {
    "otel": ReportTarget("otel:OpenTelemetry", "opentelemetry.exporter.otlp.proto.http"),
    "wandb": ReportTarget("tracker_clients:wandb", "wandb"),
    "trackio": ReportTarget("tracker_clients:trackio", "trackio"),
    "tensorboard": ReportTarget("tracker_clients:tensorboard", "tensorboard"),
    "mlflow": ReportTarget("tracker_clients:mlflow", "mlflow"),
}
"""By name in ``--report-to``."""
EXPORTERS_END_SECONDS = 35.0
"""Time for the exporters to end after the hub, which the command that started the run waits too: a container or a job
of a cluster ends with it. Most need less than a second."""
METRICS = "metrics"  # the exporter of `--metrics`
TRACKERS = ("wandb", "trackio", "tensorboard", "mlflow")  # those that take a recording afterwards, too (`ftmon export`)


def parse_targets(text: str) -> list[str]:
    """Parse ``TARGET[,TARGET...]``; each name once, and not checked."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def is_installed(package: str) -> bool:
    """Return whether a package, or a module of a package, can be imported."""
    try:
        return find_spec(package) is not None
    except ImportError:  # a package above it is missing
        return False


def check_report_to(names: Iterable[str], setting: str = "--report-to") -> None:
    """Raise ``UsageError`` for an unknown target of a setting, and for one whose packages are not installed."""
    for name in names:
        if name not in REPORT_TARGETS:
            raise UsageError(f"{setting} {name}: must be one of {', '.join(REPORT_TARGETS)}, or several with commas")
        if not is_installed(REPORT_TARGETS[name].package):
            raise UsageError(f"{setting} {name} needs packages that are not installed: pip install 'ftmon[{name}]'")
