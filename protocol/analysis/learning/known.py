"""A run whose libraries have a known fault in what it uses."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from ...checks import faults_of
from ...messages.telemetry import Hello
from ..findings.finding import Detector, Finding, Handler, Kind, Shown
from ..words import Words


class KnownFacts(msgspec.Struct, frozen=True):
    """A row of ``known_faults.toml``."""

    library: str
    version: str
    what: str
    advice: str
    thread: str


def _words(facts: KnownFacts, _: Finding) -> Words:
    return Words(
        f"{facts.library} {facts.version}: {facts.what}",
        f"A known fault: {facts.thread}.",
        f"{facts.advice[0].upper()}{facts.advice[1:]}.",
        "Another training has begun.",
    )


class KnownFaults(Detector):
    """Compares what a rank says of itself with the table."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "known_fault",
            KnownFacts,
            _words,
            shown={
                "advice": Shown("remedy"),
                "library": Shown("library"),
                "version": Shown("version"),
                "thread": Shown("see"),
                "what": Shown("fault"),
            },
        ),
    )

    def __init__(self) -> None:
        self._told: set[str] = set()

    def handlers(self) -> Mapping[type, Handler]:
        return {Hello: self.hello}

    def hello(self, hello: Hello) -> list[Finding]:
        """Tell each fault once whose conditions a rank has."""
        found: list[Finding] = []
        for fault, version in faults_of(hello.versions):
            holds = fault.when and all(getattr(hello, name) in values for name, values in fault.when.items())
            if not holds or fault.thread in self._told:
                continue
            self._told.add(fault.thread)
            facts = KnownFacts(fault.library, version, fault.what, fault.remedy, fault.thread)
            found.append(Finding("known_fault", facts, "raised", "info", key=fault.thread.rpartition("/")[2]))
        return found
