"""Fixtures shared by the tests."""

from pathlib import Path

import jaxtyping
import pytest


@pytest.fixture
def data():
    """Folder of recorded tables and published figures."""
    return Path(__file__).parent / "data"


@pytest.fixture
def unchecked():
    """Let arguments of a wrong type through to the library's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
