"""Published times on A100 that nothing was fitted to, by the machine's own file."""

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.system.system import DATA

TABLES = DATA / "measured"


def errors(table, system, rows=slice(None)):
    """Signed errors of rows of a table [%]."""
    result = read_rows(TABLES / f"{table}.csv")
    result = result.take(np.arange(len(result))[rows])
    predicted = StepTimes(result).predict(pj.load_system(system))
    return 100 * (predicted / result.seconds - 1)


@pytest.mark.filterwarnings("ignore")
def test_korthikanti_22b_within_five_percent():
    assert np.abs(errors("korthikanti_a100", "a100", slice(0, 2))).max() < 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_korthikanti_table_5_within_its_tolerance():
    result = np.abs(errors("korthikanti_a100", "a100", slice(0, 8)))
    assert result.mean() < 2.5
    assert result.max() < 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("table", ["vtrain_single", "vtrain_multi"])
def test_vtrain_is_met_by_one_set_of_numbers(table):
    result = errors(table, "a100-vtrain")
    assert np.abs(result).mean() < 7
    assert abs(result.mean()) < 4
