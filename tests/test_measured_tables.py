"""The measured tables that come with pipejax: all rows are there, and every one says all it needs."""

import csv
import warnings

import numpy as np
import pytest

from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.system.system import DATA

MEASURED = DATA / "measured"
# rows, and the sum of their seconds
TABLES = {
    "korthikanti_a100": (9, 326.34),
    "llm_foundry_a100_40gb": (78, 1047.20),
    "llm_foundry_h100": (52, 1056.39),
    "megatron_2021_a100": (10, 269.98),
    "megatron_bridge_b200": (25, 378.261),
    "megatron_bridge_b300": (19, 320.615),
    "megatron_bridge_h100": (33, 919.968),
    "mlperf_h100": (33, 348.724),
    "simumax_b200": (22, 62.0299),
    "torchtitan_h100": (18, 766.930),
    "nanotron_h100": (2564, 31991.5),
    "vtrain_multi": (54, 1256.54),
    "vtrain_single": (720, 251.497),
    "zero_bubble_a100": (48, 172.779),
}


@pytest.mark.parametrize(("name", "rows", "seconds"), [(n, *v) for n, v in TABLES.items()])
def test_a_table_is_whole_and_leaves_nothing_to_defaults(name, rows, seconds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = read_rows(MEASURED / f"{name}.csv")
    assert {path.stem for path in MEASURED.glob("*.csv")} == set(TABLES)
    assert len(result) == rows
    assert np.nansum(result.seconds) == pytest.approx(seconds, rel=1e-5)
    assert "" not in {*result.group, *result.source, *result.system}


def test_a_collective_table_has_latency_and_bandwidth():
    with (DATA / "collectives" / "nccl_all_reduce_a100.csv").open() as file:
        rows = [
            (int(r["ranks"]), int(r["bytes"]), float(r["seconds"])) for r in csv.DictReader(file)
        ]
    ranks, volume, seconds = np.array(rows).T
    assert sorted(set(ranks)) == [*range(2, 9)]
    for n in range(2, 9):
        slope, _ = np.polyfit(volume[ranks == n], seconds[ranks == n], 1)
        assert 150e9 < 2 * (n - 1) / n / slope < 300e9, n  # NVLink has 300 GB/s each way
