"""Values of flags, with what is wrong with one said in full."""

from __future__ import annotations

import argparse

from router.units import parse_duration


def duration(text: str) -> float:
    """Seconds. For `add_argument`, which tells no ValueError's own words."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
