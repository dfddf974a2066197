"""Types of command-line arguments: each parses one word, or raises ``ArgumentTypeError`` with what it must be."""

import argparse


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return number


def lengths(text: str) -> list[int]:
    """Parse whole numbers of 1 or more, separated by commas."""
    return [positive(part) for part in text.split(",")]


def byte_size(text: str) -> int:
    """Parse a size such as ``24GiB`` or ``80GB`` into bytes."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, "MB": 10**6}
    number, unit = next(((text[: -len(unit)], size) for unit, size in units.items() if text.endswith(unit)), (text, 1))
    try:
        size = int(float(number) * unit)
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
    if not text.isdecimal():
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
