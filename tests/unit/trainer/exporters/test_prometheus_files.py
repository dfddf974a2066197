"""The shipped dashboard and alert rules name only metrics and labels that ftmon exports."""

import json
import re

import pytest
import yaml
from ftmon.protocol.messages.wire import Frame
from ftmon.trainer.exporters.current import RunFigures
from messages import EXAMPLES
from places import DOCS

_STRINGS = re.compile(r'"[^"]*"')


def exported() -> dict[str, set[str]]:
    figures = RunFigures()
    for seq, message in enumerate(EXAMPLES, 1):
        figures.apply(Frame(seq, 1.0, message), True)
    return {f"ftmon_{point.figure.name}": {"run", *point.labels} for point in figures.points()}


def expressions(file: str) -> list[str]:
    text = (DOCS / file).read_text()
    if file.endswith(".json"):
        return [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    return [rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_every_metric_and_label_of_a_shipped_file_is_exported(file: str) -> None:
    known = exported()
    found = expressions(file)
    assert len(found) >= 5
    for expression in found:
        plain = _STRINGS.sub('""', expression)
        names = set(re.findall(r"ftmon_\w+", plain))
        assert names, expression
        assert names <= set(known), expression
        labels = set(re.findall(r"(\w+)\s*=~?\s*\"\"", plain))
        labels |= {label.strip() for part in re.findall(r"by \(([^)]*)\)", plain) for label in part.split(",")}
        assert labels <= set.intersection(*(known[name] for name in names)), expression


def test_the_rules_name_labels_that_their_expressions_keep() -> None:
    for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
            names = re.findall(r"ftmon_\w+", rule["expr"])
            labels = set(kept[0].replace(",", " ").split()) if kept else set.intersection(*map(exported().get, names))
            assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
