"""Hold-outs: rows that each fit leaves out, and error bands from these rows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.base.checks import MAX_COUNT, resolve_choice, whole_number, wrong
from pipejax.base.data_files import load_json
from pipejax.costs.measured.measured_rows import COLUMNS, MeasuredRows
from pipejax.costs.system.system import Band

# {letter of a column in formulas: name of the column}
LETTERS: Mapping[str, str] = load_json(Path(__file__).with_name("column_letters.json"))
DRAWS = 20  # number of draws of "few" rows, because a single draw would say little
EXAMPLES = "t=8, group:h,t,b, k-fold:5, few:8 or model"


class Folds(NamedTuple):
    """Folds of a cross-validation: for each fold, the rows that its fit leaves out."""

    names: tuple[str, ...]  # description of the rows that each fold leaves out
    left_out: Bool[NumpyArray, "folds rows"]  # whether the fold leaves the row out


def read_folds(rows: MeasuredRows, hold_out: str, *, seed: int = 0) -> Folds:
    """Divide rows into the folds that a hold-out option such as "k-fold:5" describes."""
    # `column=value` is one fold, which leaves out these rows. `group:columns` has a fold for each
    # combination of values, `model` a fold for each model, and `k-fold:K` a fold for each of K
    # random parts. `few:N` has `DRAWS` folds, which leave out all but N random rows. Columns have
    # full names or letters.
    kind, _, argument = hold_out.partition(":")
    if kind in _KINDS:
        folds = _KINDS[kind](rows, argument, np.random.default_rng(seed))
    elif "=" in hold_out:
        name, _, value = hold_out.partition("=")
        is_out = _column(rows, name).astype(str) == value.strip()
        folds = Folds((hold_out,), is_out[None])
    else:
        raise wrong("hold_out", f"must be such as {EXAMPLES}, got {hold_out!r}")
    counts = folds.left_out.sum(axis=1)
    for name, count in zip(folds.names, counts, strict=True):
        if count in (0, len(rows)):
            raise wrong(
                "hold_out",
                f"must leave out some rows and keep some, got {hold_out!r}: {name} leaves out "
                f"{count} of {len(rows)} rows",
            )
    return folds


def _column(rows: MeasuredRows, name: str) -> NumpyArray:
    name = resolve_choice(name.strip(), (*COLUMNS, *LETTERS), "hold_out: column")
    return rows.column(LETTERS.get(name, name))


def _folds_by_values(columns: Mapping[str, NumpyArray]) -> Folds:
    """Return a fold for each combination of column values, which leaves out its rows."""
    texts = [column.astype(str) for column in columns.values()]  # entries may be None
    codes = [np.unique(column, return_inverse=True)[1].ravel() for column in texts]
    rows = np.stack(codes, axis=1)
    _, first_rows, row_fold = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    names = tuple(
        ", ".join(f"{name}={column[row]}" for name, column in columns.items()) for row in first_rows
    )
    return Folds(names, row_fold.ravel() == np.arange(len(names))[:, None])


def fold_by_columns(rows: MeasuredRows, columns: str) -> Folds:
    """Return a fold for each combination of values in the listed columns, such as "h,t,b"."""
    return _folds_by_values({name.strip(): _column(rows, name) for name in columns.split(",")})


def _model(rows: MeasuredRows, argument: str, _: np.random.Generator) -> Folds:
    if argument:
        raise wrong("hold_out", f"model takes nothing besides, got {argument!r}")
    sizes = ("model", "layers", "hidden")
    return _folds_by_values({name: rows.column(name) for name in sizes})


def random_parts(count: int, num_folds: int, random: np.random.Generator) -> Folds:
    """Divide `count` rows at random into folds of nearly equal size."""
    row_fold = random.permutation(np.arange(count) % num_folds)
    names = tuple(f"part {k + 1} of {num_folds}" for k in range(num_folds))
    return Folds(names, row_fold == np.arange(num_folds)[:, None])


def _few(rows: MeasuredRows, count: str, random: np.random.Generator) -> Folds:
    num_fitted = _count(count, f"few:N, rows of {len(rows)} to fit,", 1, len(rows) - 1)
    ranks = random.permuted(np.tile(np.arange(len(rows)), (DRAWS, 1)), axis=1)
    names = tuple(f"all but {num_fitted}, draw {k + 1}" for k in range(DRAWS))
    return Folds(names, ranks >= num_fitted)


def _count(text: str, name: str, minimum: int, maximum: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() else text
    maximum = min(maximum, MAX_COUNT)
    return whole_number(value, f"hold_out {name}", minimum=minimum, maximum=maximum)


_KINDS: Mapping[str, Callable[[MeasuredRows, str, np.random.Generator], Folds]] = {
    "group": lambda rows, columns, _: fold_by_columns(rows, columns),
    "model": _model,
    "k-fold": lambda rows, count, random: random_parts(
        len(rows), _count(count, f"k-fold:K, parts of {len(rows)} rows,", 2, len(rows)), random
    ),
    "few": _few,
}


PERCENTS = (80, 90)  # nominal percentages of bands


def band(residual: Float[NumpyArray, " rows"], percent: float, groups: int) -> Band:
    """Return the range of measured over predicted time that covers `percent` of new rows."""
    # `residual` is log(predicted / measured) of left-out rows. Errors within a group are
    # correlated, so the number K of groups counts instead of the number of rows. A new group is the
    # farthest of K + 1 with probability 1 / (K + 1). So the band must hold a share that is
    # (K + 1) / K times larger.
    # References: Lee, Barber, Willett: Distribution-free inference with hierarchical data (2023).
    share = min(percent / 100 * (groups + 1) / groups, 1.0)
    low, high = np.quantile(-residual, [(1 - share) / 2, (1 + share) / 2])
    return Band(percent, float(np.exp(low)), float(np.exp(high)))


def error_bands(residual: Float[NumpyArray, " rows"], groups: int) -> tuple[Band, ...]:
    """Return error bands for the percentages in `PERCENTS` that K groups support."""
    # A new group is the farthest of K + 1 with probability 1 / (K + 1). So 90 % need K >= 9.
    supported = [percent for percent in PERCENTS if percent * (groups + 1) <= 100 * groups]
    return tuple(band(residual, percent, groups) for percent in supported)


def band_coverage(
    by_fold: Sequence[Float[NumpyArray, " _"]],
    residual: Float[NumpyArray, "folds rows"],
    left_out: Bool[NumpyArray, "folds rows"],
) -> Mapping[int, float]:
    """Return {percentage of a band: share of left-out rows within the band [%]}."""
    # `by_fold` has the residuals of the rows that each fold leaves out, `residual` the residuals of
    # all rows. The band of a fold comes from the left-out rows of all other folds. If there is only
    # one fold, it comes from the fitted rows.
    if not by_fold:
        return {}
    num_inside: dict[int, int] = dict.fromkeys(PERCENTS, 0)
    for fold, fold_residual in enumerate(by_fold):
        groups = [*by_fold[:fold], *by_fold[fold + 1 :]]
        reference = np.concatenate(groups) if groups else residual[fold][~left_out[fold]]
        ratio = np.exp(-fold_residual)  # measured over predicted
        for percent in PERCENTS:
            _, low, high = band(reference, percent, len(groups) or len(reference))
            num_inside[percent] += int(np.sum((low <= ratio) & (ratio <= high)))
    total = sum(map(len, by_fold))
    return {percent: 100 * count / total for percent, count in num_inside.items()}
