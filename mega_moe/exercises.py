"""The check of an exercise of the course: it says what is off and where to look again, and does not give it away."""

import math
from collections.abc import Mapping
from typing import Any

NEARLY = 0.05
"""The share by which a number with a point may be off: two digits will do."""


class NotYet(AssertionError):
    """An answer that is not right, in all its parts."""


def check(answer: Any, right: Any, see: Mapping[str, tuple[str, str]] | tuple[str, str]) -> None:
    """Compare the answer to an exercise with what is right, part by part.

    Whole numbers, words, True and False must be equal, lists in each of their places; a number with a point may be off
    by 5 %.

    Args:
        answer: the reader's: a value, or values by the names of the parts.
        right: what was computed, in the same form.
        see: for each part the heading in the lesson under which it is explained, and a hint.

    Raises:
        NotYet: with what is off and in which direction, and what to look at. What is right is not said.
    """
    if not isinstance(right, Mapping):
        answer, right, see = {"answer": answer}, {"answer": right}, {"answer": see}
    if not isinstance(answer, Mapping):
        raise NotYet(f"the answer has parts: write dict({', '.join(f'{part}=...' for part in right)})")
    wrong = {part: words for part in right if (words := difference(answer.get(part, ...), right[part]))}
    if wrong:
        lines = [f"{len(right) - len(wrong)} of {len(right)} parts are right" if len(right) > 1 else "not yet"]
        for part, words in wrong.items():
            heading, hint = see[part]
            lines += [f"{part}: {words}", f'    look again at "{heading}": {hint}']
        raise NotYet("\n".join(lines))


def difference(mine: Any, right: Any) -> str:
    """In words, without what is right; empty if there is none."""
    if mine is ...:
        return "there is no answer yet"
    if isinstance(right, list):
        if not isinstance(mine, list | tuple) or len(mine) != len(right):
            return f"you say {mine!r}, and it is a list of another length"
        off = {at: words for at, pair in enumerate(zip(mine, right)) if (words := difference(*pair))}
        return ", ".join([f"you say {mine!r}", *(f"at place {at} {words}" for at, words in off.items())]) if off else ""
    if isinstance(right, bool | str) or isinstance(mine, bool | str):
        return "" if type(mine) is type(right) and mine == right else f"you say {mine!r}, and it is not"
    try:
        apart = float(mine) - float(right)
    except (TypeError, ValueError):
        apart = math.nan
    if math.isnan(apart):
        return f"you say {mine!r}, and it is a number"
    if abs(apart) <= (0.5 if isinstance(right, int) else NEARLY * abs(right)):
        return ""
    return f"you say {mine!r}, which is too {'large' if apart > 0 else 'small'}"
