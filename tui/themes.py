"""The app's two themes, made from the palettes."""

from textual.theme import Theme

from .widgets.theme import DARK, LIGHT, Palette

PALETTES = {palette.name: palette for palette in (DARK, LIGHT)}


def theme_of(palette: Palette) -> Theme:
    """Return Textual's theme of a palette."""
    return Theme(
        name=palette.name,
        primary=palette.accent,
        secondary=palette.dim,
        accent=palette.accent,
        foreground=palette.text,
        background=palette.background,
        surface=palette.background,
        panel=palette.raised,
        success=palette.good,
        warning=palette.warning,
        error=palette.error,
        dark=palette.dark,
    )
