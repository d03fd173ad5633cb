"""Readings of the curves of an experiment: step sizes, values at equal time or updates, winners.

Claims read it here; what figures draw of it is added to the dataset (`read`), so that a table and a
caption have the same numbers. Of the seeds the median and the range are shown.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from pipejax.training import choose_step_size
from pipejax.typing import Float, NumpyArray
from sweeps.pipedream.settings import AS_RUN
from sweeps.pipedream.words import End

QUANTITY: Mapping[str, str] = {  # of each store, what its experiment is read by; else the gap
    "pipedream_logistic": "value",
    "pipedream_scaling": "value",
    "pipedream_language": "loss",
}

EQUAL = ("time", "updates")  # where ends are compared
AXES = ("setting", "objective", "system", "stages")  # of experiments, some have none of them

NONE = -1  # in place of a step size

PUBLISHED = "published"  # in place of a rule: the step size that was published
EXPERIMENT_1 = ("pipedream_quadratic", "pipedream_match")  # read at published step sizes


def as_run(data: xr.Dataset) -> xr.Dataset:
    """Take the setting that was run, where there are two."""
    return data.sel(setting=AS_RUN) if "setting" in data.dims else data


def step_size_rule(store: str, setting: str = AS_RUN) -> str:
    """Say what the step sizes of a store are chosen by.

    Args:
      store: its name.
      setting: `AS_RUN` or `CAPTION`.

    Returns:
      `PUBLISHED` for experiment 1 as it was run, else the least final value.
    """
    return PUBLISHED if store in EXPERIMENT_1 and setting == AS_RUN else "final"


def shown(data: xr.Dataset, quantity: str) -> xr.DataArray:
    """Take what an experiment is read by.

    Args:
      data: as from `sweeps.pipedream.schemes.collected`, perhaps with further axes.
      quantity: "gap", f - f*; "value", f; or "loss", of the batches since the last sample.

    Returns:
      It, missing where a run diverged.
    """
    return data.gap + data.minimum if quantity == "value" else data[quantity]


def tuned(data: xr.Dataset, quantity: str, rule: str = "final") -> xr.Dataset:
    """Choose a step size for every scheme, among those with which no seed diverged.

    Args:
      data: as from `sweeps.pipedream.schemes.collected`, perhaps with further axes.
      quantity: as for `shown`.
      rule: as for `pipejax.training.choose_step_size`, or `PUBLISHED`.

    Returns:
      The data at these steps, and `shown` there, without their axis; `hopeless` says where the rule
      finds none, `edge` where it is the smallest or largest that was tried.
    """
    curve = shown(data, quantity)
    axes = [axis for axis in curve.dims if axis not in ("step", "seed", "sample")]
    place = xr.apply_ufunc(
        lambda curves, sizes: _place(curves, rule, sizes, list(data.step.values).index(0)),
        curve.isel(sample=slice(1, None)).median("seed", skipna=False),
        data.step_size,
        input_core_dims=[["step", "sample"], ["step"]],
        vectorize=True,
    ).transpose(*axes)
    hopeless = place == NONE
    chosen = data.assign(shown=curve).isel(step=place.where(~hopeless, 0))
    return chosen.assign(
        shown=chosen.shown.where(~hopeless),
        hopeless=hopeless,
        edge=_is_edge(place, data.step_size.notnull()),
    )


def _is_edge(place: xr.DataArray, tried: xr.DataArray) -> xr.DataArray:
    """Return whether a step is the first or last that was tried; not all are for every scheme."""
    last = tried.sizes["step"] - 1 - tried.isel(step=slice(None, None, -1)).argmax("step")
    return (place == tried.argmax("step")) | (place == last)


def depths(data: xr.Dataset) -> list[int]:
    """List the numbers of stages that were run in a setting.

    Args:
      data: of one setting, with an axis `stages`.

    Returns:
      Those of them where something is not missing.
    """
    run = data.gap.notnull().any([axis for axis in data.gap.dims if axis != "stages"])
    return [int(stages) for stages in data.stages[run.values]]


def _place(
    curves: Float[NumpyArray, "steps samples"],
    rule: str,
    sizes: Float[NumpyArray, " steps"],
    published: int,
) -> int:
    """Place of a step size, `NONE` where the rule finds none."""
    if rule == PUBLISHED:
        return published if np.isfinite(curves[published]).all() else NONE
    chosen = choose_step_size(curves, rule, sizes.tolist())
    return NONE if chosen is None else chosen


def at_equal(chosen: xr.Dataset, x: str) -> xr.DataArray:
    """Read all schemes where the first of them ends.

    Args:
      chosen: as from `tuned`, of one setting.
      x: "time" or "updates".

    Returns:
      (scheme, seed) what is shown there, between samples on a logarithmic scale if all is above 0.
    """
    at = float(chosen[x].isel(sample=-1).min())
    is_positive = bool((chosen.shown.fillna(1.0) > 0).all())
    curve = np.log(chosen.shown) if is_positive else chosen.shown
    read_values: xr.DataArray = xr.apply_ufunc(
        lambda place, values: np.interp(at, place, values),
        chosen[x],
        curve,
        input_core_dims=[["sample"], ["sample"]],
        vectorize=True,
    )
    return read_values.copy(data=np.exp(read_values.values)) if is_positive else read_values


def ends(data: xr.Dataset, quantity: str, x: str = "time", rule: str = "final") -> dict[str, End]:
    """Compare all schemes of one setting where the first of them ends.

    Args:
      data: of one setting.
      quantity: as for `shown`.
      x: "time" or "updates": what is equal.
      rule: as for `tuned`.

    Returns:
      Ends by scheme.
    """
    chosen = tuned(data, quantity, rule)
    end = at_equal(chosen, x)
    return {
        str(name): summarise_seeds(
            end.sel(scheme=name).values,
            float(chosen.step_size.sel(scheme=name)),
            bool(chosen.edge.sel(scheme=name)),
        )
        for name in end.scheme.values
    }


def summarise_seeds(
    seeds: Float[NumpyArray, " seeds"], step_size: float, edge: bool = False
) -> End:
    """Median and range over the seeds; missing where one is."""
    median, low, high = float(np.median(seeds)), float(seeds.min()), float(seeds.max())
    return End(median, low, high, step_size, edge)


def below(end: xr.DataArray, first: str, second: str) -> bool | None:
    """Say if one scheme ends below another, seed by seed: examples and starts are the same.

    Args:
      end: as from `at_equal`.
      first: a scheme.
      second: another one.

    Returns:
      True or False if it is so for every seed; None if the seeds do not agree. A scheme that
      diverged is below nothing.
    """
    first_ends, second_ends = (
        end.sel(scheme=name).fillna(np.inf).values for name in (first, second)
    )
    if (first_ends < second_ends).all():
        return True
    return False if (first_ends >= second_ends).all() else None


def in_order(end: xr.DataArray, names: Sequence[str]) -> bool | None:
    """Say if schemes end in an order, lowest first.

    Args:
      end: as from `at_equal`.
      names: schemes.

    Returns:
      False if some scheme ends above the next one with every seed, True if none does with any,
      and None otherwise.
    """
    is_below = [below(end, *pair) for pair in itertools.pairwise(names)]
    return False if False in is_below else None if None in is_below else True


def apart(chosen: xr.Dataset, *schemes: str) -> float:
    """Tell how far two schemes are apart.

    Args:
      chosen: as from `tuned`, of one setting.
      *schemes: both.

    Returns:
      The largest ratio of their medians at equal updates; NaN if one diverged.
    """
    median = np.log(chosen.shown.median("seed", skipna=False))
    updates = [chosen.updates.sel(scheme=name).values for name in schemes]
    at = updates[0][updates[0] <= updates[1].max()]
    logs = [
        np.interp(at, scheme_updates, median.sel(scheme=name))
        for scheme_updates, name in zip(updates, schemes, strict=True)
    ]
    return float(np.exp(np.abs(logs[1] - logs[0]).max()))


class Winner(NamedTuple):
    """Scheme that ends lowest.

    Attributes:
      scheme: which; empty if all diverge.
      second: the next one; empty if there is none.
      lead: median of the second over that of the winner.
      seeds: in how many seeds the winner is below all others.
    """

    scheme: str
    second: str
    lead: float
    seeds: int


def winner(end: xr.DataArray) -> Winner:
    """Find who ends lowest.

    Args:
      end: as from `at_equal`.

    Returns:
      The scheme of the least median, and by how much; one that diverged is left out.
    """
    median = end.median("seed", skipna=False).dropna("scheme")
    first, second = [*map(str, median.sortby(median).scheme.values), "", ""][:2]
    if not second:
        return Winner(first, "", np.nan, 0)
    lead = float(median.sel(scheme=second) / median.sel(scheme=first))
    others = end.drop_sel(scheme=first).fillna(np.inf).min("scheme")
    return Winner(first, second, lead, int((end.sel(scheme=first) < others).sum()))


def read(data: xr.Dataset, store: str) -> xr.Dataset:
    """Add what figures draw of an experiment, so that they compute nothing.

    Args:
      data: as from `sweeps.pipedream.runs.together`.
      store: its name.

    Returns:
      The data, and without the axis of step sizes: `shown`, `chosen_step_size`, `edge`, `hopeless`
      as of `tuned`, by the rule of the store; `end` as of `at_equal` and `first`, `second`, `lead`
      and `wins` as of `winner`, by what is equal; of "pipedream_match" `apart`, each scheme from
      RPD. Attributes are the store's `quantity` and `rule`.
    """
    chosen = _chosen(data, store).drop_vars("step")
    end = _read_cases(chosen, lambda case: xr.concat([at_equal(case, x) for x in EQUAL], "by"))
    result = data.assign_coords(by=list(EQUAL)).assign(
        shown=chosen.shown,
        chosen_step_size=chosen.step_size,
        edge=chosen.edge,
        hopeless=chosen.hopeless,
        end=end,
    )
    if store == "pipedream_match":
        ratios = [apart(chosen, name, "rpd") for name in map(str, chosen.scheme.values)]
        result = result.assign(apart=("scheme", ratios))
    best = _read_cases(end, _winners).rename(scheme="first", seeds="wins")
    attributes = {"quantity": QUANTITY.get(store, "gap"), "rule": step_size_rule(store)}
    return result.assign(best).assign_attrs(attributes)


def _winners(end: xr.DataArray) -> xr.Dataset:
    winners = [xr.Dataset(winner(end.isel(by=k))._asdict()) for k in range(len(EQUAL))]
    return xr.concat(winners, "by")


def _chosen(data: xr.Dataset, store: str) -> xr.Dataset:
    """The curves at the step sizes that are chosen, which settings may do by other rules."""
    quantity = QUANTITY.get(store, "gap")
    if "setting" not in data.dims:
        return tuned(data, quantity, step_size_rule(store))
    tuned_settings = [
        tuned(data.sel(setting=[name]), quantity, step_size_rule(store, name))
        for name in map(str, data.setting.values)
    ]
    return xr.concat(tuned_settings, "setting", data_vars="minimal", coords="minimal")


def _read_cases(data: Any, read_one: Callable[[Any], Any]) -> Any:
    """Read each setting, objective, machine and number of stages; put what is found together."""
    axis = next((axis for axis in AXES if axis in data.dims), None)
    if axis is None:
        return read_one(data)
    parts = [_read_cases(data.sel({axis: at}), read_one) for at in data[axis].values]
    return xr.concat(parts, data[axis], coords="minimal")
