"""Figures of papers are drawn in the house style."""

import pytest

from pipejax.plots import style


@pytest.fixture(scope="session", autouse=True)
def _style():
    style.use()
