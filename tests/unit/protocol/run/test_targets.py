"""Each target of ``--report-to`` has an extra, and is refused before the run if its packages are missing."""

import inspect
import logging
import tomllib

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.protocol.run import targets
from ftmon.protocol.run.targets import REPORT_TARGETS, ReportTarget, check_report_to, is_installed, parse_targets
from ftmon.trainer.exporters.__main__ import make_target
from ftmon.trainer.exporters.report import Target
from places import ROOT


@pytest.mark.parametrize("name", REPORT_TARGETS)
def test_a_target_has_an_extra_of_its_name_and_the_methods_of_a_target(name: str) -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][name]
    if not is_installed(REPORT_TARGETS[name].package):
        pytest.skip(f"{name} is not installed")
    check_report_to([name])
    made = make_target(name)
    logging.disable(logging.NOTSET)  # a tracker is alone in its process, and silences its client
    for method, wanted in inspect.getmembers(Target, inspect.isfunction):
        if not method.startswith("_"):
            own = inspect.signature(getattr(made, method)).parameters
            assert len(own) == len(inspect.signature(wanted).parameters) - 1, method
    assert made.seconds > 0


def test_names_are_separated_by_commas_count_once_and_missing_packages_are_named_by_their_extra(monkeypatch):
    assert parse_targets(" otel,wandb ,,otel") == ["otel", "wandb"]
    monkeypatch.setitem(targets.REPORT_TARGETS, "other", ReportTarget("other:Other", "no_such_package.sub"))
    with pytest.raises(UsageError, match=r"not installed: pip install 'ftmon\[other\]'"):
        check_report_to(["other"])
