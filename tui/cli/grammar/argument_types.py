"""Types of command-line arguments: each parses one word, or raises ``ArgumentTypeError`` with the valid form."""

import argparse


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return number


_LONGEST = 100_000_000
"""Maximum sequence length in tokens."""


def lengths(text: str) -> list[int]:
    """Parse whole numbers of 1 or more, separated by commas, into a list without duplicates."""
    found = list(dict.fromkeys(positive(part) for part in text.split(",")))
    if max(found) > _LONGEST:
        raise argparse.ArgumentTypeError(f"must be {_LONGEST:,} tokens or less, not {max(found):,}")
    return found


def byte_size(text: str) -> int:
    """Parse a size with its unit, such as ``24GiB`` or ``80gb``, into bytes."""
    units = {"gib": 1 << 30, "mib": 1 << 20, "gb": 10**9, "mb": 10**6}
    unit = next((unit for unit in units if text.lower().endswith(unit)), "")
    try:
        size = int(float(text[: -len(unit)]) * units[unit]) if unit else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 24GiB or 80GB, not {text!r}")
    return size


def seconds(text: str) -> float:
    """Parse finite seconds, more than 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0, not {text!r}")
    return number


def rank(text: str) -> int:
    """Parse a rank's number."""
    from ....protocol.messages.bounds import MAX_RANKS  # not needed for the help

    if not text.isdecimal() or len(text) > len(str(MAX_RANKS)) or int(text) >= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"must be a rank's number, not {text!r}")
    return int(text)


def device(text: str) -> int:
    """Parse a device's number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a device's number, not {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Return a whole number of 0 or more."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, not {text!r}")
    return int(text)


def price(text: str) -> float:
    """Return a price above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return found


def share(text: str) -> float:
    """Return a share between 0 and 1, given as ``3%`` or ``0.03``."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 3% or 0.03, not {text!r}")
    return found
