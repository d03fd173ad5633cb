"""Fixtures shared by the tests."""

from pathlib import Path

import pytest


@pytest.fixture
def data():
    """Folder of recorded tables and published figures."""
    return Path(__file__).parent / "data"
