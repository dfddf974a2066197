"""What the command of a launcher runs: script, arguments, ranks, environment."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Launched:
    """What a command would run."""

    script: str
    """A file, or a module where ``is_module``."""
    is_module: bool
    arguments: list[str]
    ranks: int | None
    """None: the launcher would count this machine's GPUs."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables from the launcher, without the ranks' numbers."""
