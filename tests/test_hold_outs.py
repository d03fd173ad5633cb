"""Rows that each fit leaves out, and the bands of predictions that come of them."""

import re

import numpy as np
import pytest

from pipejax.costs.measured.rows_file import read_rows
from pipejax.search.calibration.hold_outs import DRAWS, band, band_coverage, read_folds

HEADER = "layers,hidden,heads,sequence,tensor,pipeline,microbatch_size,global_batch,seconds\n"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [
        f"{layers},{64 * layers},8,128,{t},2,{b},16,0.5"
        for layers in (4, 8)
        for t in (1, 2, 8)
        for b in (1, 2)
    ]
    path.write_text(HEADER + "\n".join(lines))
    with pytest.warns():
        return read_rows(path)


def test_a_value_is_left_out_once(rows):
    folds = read_folds(rows, "t=8")
    assert folds.names == ("t=8",)
    np.testing.assert_array_equal(folds.left_out[0], rows.tensor == 8)
    np.testing.assert_array_equal(read_folds(rows, "tensor=8").left_out, folds.left_out)


@pytest.mark.parametrize(
    ("hold_out", "count", "size"),
    [("group:h,t,b", 12, 1), ("group:t", 3, 4), ("model", 2, 6), ("k-fold:4", 4, 3)],
)
def test_parts_cover_every_row_once(rows, hold_out, count, size):
    folds = read_folds(rows, hold_out)
    assert folds.left_out.shape == (count, len(rows)) == (len(folds.names), 12)
    np.testing.assert_array_equal(folds.left_out.sum(axis=0), 1)
    np.testing.assert_array_equal(folds.left_out.sum(axis=1), size)


def test_a_group_is_left_out_as_a_whole(rows):
    for name, is_left_out in zip(*read_folds(rows, "group:h,b"), strict=True):
        hidden, size = map(int, re.findall(r"\d+", name))
        np.testing.assert_array_equal(
            is_left_out, (rows.column("hidden") == hidden) & (rows.microbatch_size == size)
        )


def test_few_rows_are_drawn_many_times(rows):
    folds = read_folds(rows, "few:5")
    assert folds.left_out.shape == (DRAWS, 12)
    np.testing.assert_array_equal((~folds.left_out).sum(axis=1), 5)
    assert len({tuple(is_left_out) for is_left_out in folds.left_out}) > DRAWS / 2
    np.testing.assert_array_equal(read_folds(rows, "few:5").left_out, folds.left_out)
    assert (read_folds(rows, "few:5", seed=1).left_out != folds.left_out).any()


def grouped(groups, rows, seed):
    """Residuals whose groups are wrong together."""
    random = np.random.default_rng(seed)
    return [random.normal(0.1 * random.normal(), 0.02, rows) for _ in range(groups)]


def test_a_band_is_of_measured_over_predicted():
    residual = np.log(np.linspace(0.8, 1.25, 1001))  # predicted over measured
    _, low, high = band(residual, 90, 10**6)
    assert low == pytest.approx(1 / np.quantile(np.exp(residual), 0.95))
    assert high == pytest.approx(1 / np.quantile(np.exp(residual), 0.05))


def test_few_groups_need_a_wider_band():
    residual = np.concatenate(grouped(12, 20, 0))
    widths = [np.log(high / low) for _, low, high in (band(residual, 80, k) for k in (4, 12, 500))]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == pytest.approx(np.ptp(residual))


@pytest.mark.parametrize("percent", [80, 90])
def test_a_group_that_was_left_out_is_covered_as_often_as_said(percent):
    result = []
    for seed in range(40):
        groups = grouped(20, 15, seed)
        left_out = np.repeat(np.eye(20, dtype=bool), 15, axis=1)
        residual = np.tile(np.concatenate(groups), (20, 1))
        result.append(band_coverage(groups, residual, left_out)[percent])
    assert np.mean(result) == pytest.approx(percent, abs=3)


def test_one_fold_is_judged_by_the_rows_that_were_fitted():
    residual = np.array([[0.01, -0.01, 0.02, -0.02, 0.0, 0.5]])
    left_out = np.arange(6)[None] == 5
    assert band_coverage([residual[0, 5:]], residual, left_out) == {80: 0.0, 90: 0.0}
