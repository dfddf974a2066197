"""Breaking text into lines."""

from ....protocol.text import sanitize


def wrap(text: str, width: int) -> list[str]:
    """Break text at blanks into lines of at most ``width`` cells; longer words are broken too."""
    import textwrap

    return textwrap.wrap(sanitize(text), max(8, width), break_on_hyphens=False) or [""]
