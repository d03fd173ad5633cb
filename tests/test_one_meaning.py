"""One object has one meaning: every door says the same seconds of a table with costs and links."""

import os

import numpy as np
import pytest
from doors import DOORS, sets
from hypothesis import given, settings

import pipejax as pj

pytestmark = pytest.mark.compiles

EXAMPLES = max(1, int(os.environ.get("EXAMPLES", "0")) // 3)


def check(name, found):
    """The seconds of a door are those of `evaluate`, but for its rounding."""
    door, expected = DOORS[name], np.array([run.makespan for run in found.runs])
    seconds = np.array([float(value) for value in door.seconds(found)])
    within = door.off if found.exact else np.maximum(door.off, door.rounding * expected)
    off = np.abs(seconds - expected)
    assert seconds.shape == expected.shape
    assert (off <= within).all(), (name, seconds, expected)
