"""The chat templates that ship with ftmon."""

from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
NONE = "none"
"""Value of ``data.chat_template`` that joins prompt and response without a template."""


def shipped() -> list[str]:
    """Return the names of the shipped templates."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
