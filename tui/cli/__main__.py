"""``python -m ftmon.tui.cli`` is ``ftmon``."""

from .main import run

run()
