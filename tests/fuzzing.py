"""How many examples hypothesis tries, and damage that is alike for every kind of file.

FUZZ_EXAMPLES=5000 in the environment tries that many of each instead of the usual few.
"""

import copy
import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def fuzz(few: int) -> settings:
    """The settings of a test that tries a few examples unless it is told how many."""
    examples = int(os.environ.get("FUZZ_EXAMPLES", few))
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=examples < 1000,
        print_blob=True,
    )


NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 1.5, -0.0, 1e-300, 1e-9, 1e300, 2**31, 2**63, 2**64, 10**30, float("nan")])
PIECES = st.binary(max_size=8) | st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff" * 4, b"[" * 3000, b'"', b"\n"])
_DEEP = json.loads("[" * 60 + "]" * 60)
_WORDS = st.sampled_from(["", "a", "nan", "full_attention"]) | st.text(max_size=6)
_LEAVES = st.none() | st.booleans() | NUMBERS | _WORDS
VALUES = st.recursive(
    _LEAVES | st.just(_DEEP),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged_bytes(draw: Any, raw: bytes) -> bytes:
    """`raw` with bytes put in, taken out, replaced, or cut off."""
    for _ in range(draw(st.integers(1, 3))):
        # Where a file says what it holds is near its beginning.
        start = draw(st.integers(0, len(raw)) | st.integers(0, min(len(raw), 400)))
        end = min(len(raw), start + draw(st.sampled_from([0, 1, 4, 8, 100, len(raw)])))
        piece = draw(PIECES)
        raw = raw[:start] + piece + raw[min(len(raw), start + len(piece)) if draw(st.booleans()) else end :]
    return raw


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys and indices that lead to each part of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, child in inner for deeper in paths_in(child, (*path, key)))]


@st.composite
def damaged_json(draw: Any, value: dict[str, Any]) -> dict[str, Any]:
    """An object with a few parts changed, taken out or exchanged."""
    changed = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        places = paths_in(changed)[1:]
        if not places:
            break
        *parents, last = draw(st.sampled_from(places))
        place: Any = changed
        for key in parents:
            place = place[key]
        if draw(st.booleans()):
            place[last] = copy.deepcopy(draw(VALUES))
        else:
            del place[last]
    return changed
