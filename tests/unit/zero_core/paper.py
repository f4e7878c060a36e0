"""The ZeRO paper's figures (arXiv 1910.02054), from `tests/data/paper.json`, and how they were printed."""

import json
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

PAPER: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "paper.json").read_text(encoding="utf-8"), parse_float=Decimal
)
GB = 10**9


def rounded(value: Fraction | float, digits: int) -> Decimal:
    """`value` to so many decimal places, halves away from zero."""
    return _at(value, digits, ROUND_HALF_UP)


def truncated(value: Fraction | float, digits: int) -> Decimal:
    """`value` cut off after so many decimal places."""
    return _at(value, digits, ROUND_DOWN)


def digits_of(shown: Decimal | int) -> int:
    """Decimal places that were printed."""
    return max(0, -int(Decimal(shown).as_tuple().exponent))


def formula(text: str, psi: Fraction, world: int) -> Fraction:
    """What a formula of the paper gives, such as "2 * psi + 14 * psi / N"."""
    return Fraction(eval(text, {"__builtins__": {}}, {"psi": psi, "N": Fraction(world)}))


def _at(value: Fraction | float, digits: int, how: str) -> Decimal:
    exact = Fraction(value)
    shown = Decimal(exact.numerator) / Decimal(exact.denominator)
    return shown.quantize(Decimal(1).scaleb(-digits), rounding=how)
