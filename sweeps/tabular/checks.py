"""Checks of the tabular-schedule paper's claims: whether each holds, by setting, and what came out.

One rule holds for all: a figure is reproduced within 3 points, an order where it holds on every
system, depth and number of microbatches that the claim speaks of.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import xarray as xr

from pipejax.typing import NumpyArray
from sweeps.kit.claims import Threshold, Verdict
from sweeps.tabular.fit import BANDWIDTHS, OUTLIERS
from sweeps.tabular.settings import ALL_EQUAL, DOUBLE, EQUAL, SETTINGS, SYSTEMS

POINTS = Threshold(0.03, "within 3 points", "ours: one rule for all figures")
GPIPE_8, IDLE_8 = 7 / 15, (0.35, 0.25)  # GPipe's formula; published, of Chimera and of Hanayo
FAST = tuple(name for name in SYSTEMS if name.startswith("fast_nw"))
SLOW = tuple(name for name in SYSTEMS if name.startswith("slow_nw"))
MID_OR_FAST = tuple(name for name in SYSTEMS if name not in SLOW)
# B <= 16, B > 64 and 32 to 64 are the paper's; what "high B" is it does not say
FEW, MANY, MIDDLE, ALL = slice(None, 16), slice(65, None), slice(16, 64), slice(None)
HIGH = slice(64, None)
THREE = ("gpipe", "1f1b", "chimera")  # those with a published formula
HANAYO = "hanayo, 2 waves"
# shares of the early and of the late stages; verdicts are those of the first
UNEQUAL = {"1:2": "chimera-asymmetric", "2:1": "chimera-asymmetric, 2:1"}


class Evidence(NamedTuple):
    """Datasets that verdicts are read off.

    Attributes:
      runs: the dataset of `sweeps.tabular.schedules` in one setting.
      whole: the dataset in all settings.
    """

    runs: xr.Dataset
    whole: xr.Dataset


class Words(NamedTuple):
    """Result of a check, and its reason or a remark."""

    ours: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """The check of a claim.

    Attributes:
      holds: whether it holds, by setting: takes the dataset in any number of settings.
      words: what came out in one setting.
      contradicted: whether the source says something else of itself that came out, by setting;
        then the data does not decide.
    """

    holds: Callable[[xr.Dataset], xr.DataArray]
    words: Callable[[Evidence], Words]
    contradicted: Callable[[xr.Dataset], xr.DataArray] | None = None

    def __call__(self, data: Evidence) -> Verdict:
        """Read the verdict in one setting."""
        holds: bool | None = bool(self.holds(data.runs))
        if not holds and self.contradicted is not None and bool(self.contradicted(data.runs)):
            holds = None
        words = self.words(data)
        return Verdict(words.ours, holds, words.reason)


def everywhere(where: xr.DataArray) -> xr.DataArray:
    """Return whether something holds at all points, by setting."""
    return where.all([dim for dim in where.dims if dim not in SETTINGS])


def relative(data: xr.Dataset, schedule: str, to: str) -> xr.DataArray:
    """Run time of one schedule over that of another, minus 1."""
    return data.makespan.sel(schedule=schedule) / data.makespan.sel(schedule=to) - 1


def near(value: xr.DataArray, low: float, high: float | None = None) -> xr.DataArray:
    """Return whether a figure lies within 3 points of a published one, or of a published range."""
    return (low - POINTS.value <= value) & (value <= (low if high is None else high) + POINTS.value)


def span(values: xr.DataArray | NumpyArray) -> str:
    """Print a range in percent."""
    flat = np.asarray(values, float).ravel()
    flat = flat[~np.isnan(flat)]
    return f"{100 * flat.min():+.1f} to {100 * flat.max():+.1f} %"


def holds_at(where: xr.DataArray) -> str:
    """Print at how many points an order holds."""
    return f"{int(where.sum())} of {where.size} points"


def share(value: xr.DataArray) -> str:
    """Print a figure in percent."""
    return f"{100 * float(value):.1f} %"


def _same(data: xr.Dataset) -> xr.DataArray:
    return everywhere(abs(relative(data, "1f1b", "gpipe")) <= POINTS.value)


def _same_words(data: Evidence) -> Words:
    gap = abs(relative(data.whole, "1f1b", "gpipe"))
    by_link = gap.max([dim for dim in gap.dims if dim != "link"])
    listed = ", ".join(f"{name} {share(by_link.sel(link=name))}" for name in by_link.link.values)
    return Words(
        f"1F1B against GPipe {span(relative(data.runs, '1f1b', 'gpipe'))}",
        f"the link model decides: over all settings searched up to {listed}",
    )


SAME_RUN_TIME = Check(_same, _same_words)


def _peaks(data: xr.Dataset) -> xr.DataArray:
    """1F1B holds min(S - i, B) activations on worker i, GPipe B."""
    gpipe, ours = (data.peak_in_flight.sel(schedule=name) for name in ("gpipe", "1f1b"))
    counts = data.microbatches.broadcast_like(gpipe)
    limit = np.minimum(data.workers - data.worker, counts).where(gpipe.notnull())
    return everywhere(((ours == limit) & (gpipe == counts)) | gpipe.isnull())


def _peaks_words(data: Evidence) -> Words:
    gpipe, ours = (data.runs.peak_in_flight.sel(schedule=name) for name in ("gpipe", "1f1b"))
    return Words(f"1F1B holds {int(ours.max())} at most, GPipe {int(gpipe.max())}")


LOWER_PEAK = Check(_peaks, _peaks_words)


def _formula_gap(data: xr.Dataset) -> xr.DataArray:
    at = data.sel(schedule="chimera")
    return at.formula_bubble_ratio - at.table_bubble_ratio.sel(measured=DOUBLE)


FORMULA_BELOW_TABLE = Check(
    lambda data: everywhere(_formula_gap(data) < 0),
    lambda data: Words(f"formula minus table {span(_formula_gap(data.runs))}"),
)


def _formula_and_table(data: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Chimera's ratios at (8, 16), the table's in both slots."""
    at = data.sel(schedule="chimera", workers=8, microbatches=16)
    return at.formula_bubble_ratio, at.table_bubble_ratio


def _disagree(data: xr.Dataset) -> xr.DataArray:
    formula, table = _formula_and_table(data)
    return near(formula, 0.16) & near(table.sel(measured=DOUBLE), 0.26)


def _disagree_words(data: Evidence) -> Words:
    formula, table = _formula_and_table(data.runs)
    _, all_tables = _formula_and_table(data.whole)
    others = all_tables.sel(measured=DOUBLE, admission=data.runs.admission.item())
    passing = [
        f"{name} {share(others.sel(drawn=name))}"
        for name in others.drawn.values
        if bool(near(others.sel(drawn=name), 0.26))
    ]
    return Words(
        f"{share(formula)} and {share(table.sel(measured=DOUBLE))} "
        f"(the same table run at F = B: {share(table.sel(measured=EQUAL))})",
        f"3 points do not tell orders apart: run at B = 2F these pass, by how they are drawn: "
        f"{', '.join(passing)}",
    )


FORMULA_AND_TABLE = Check(_disagree, _disagree_words)


def _below(ratio: xr.DataArray) -> xr.DataArray:
    chimera = ratio.sel(schedule="chimera")
    return (chimera < ratio.sel(schedule="gpipe")) & (chimera < ratio.sel(schedule="1f1b"))


BELOW_IN_FORMULA = Check(
    lambda data: everywhere(_below(data.formula_bubble_ratio)),
    lambda data: Words(f"below at {holds_at(_below(data.runs.formula_bubble_ratio))}"),
)


def _below_words(data: Evidence) -> Words:
    ratio = data.runs.table_bubble_ratio.sel(measured=DOUBLE)
    below = _below(ratio)
    gap = ratio.sel(schedule="chimera") - ratio.sel(schedule="gpipe")
    all_below = _below(data.whole.table_bubble_ratio)
    listed = ", ".join(
        f"{admission} at "
        f"{holds_at(all_below.sel(admission=admission, drawn=slots_drawn, measured=slots))}"
        f"{' (run at F = B)' if slots == EQUAL else ''}"
        for slots in (DOUBLE, EQUAL)
        for slots_drawn in (data.runs.drawn.item(),)
        for admission in all_below.admission.values
    )
    return Words(
        f"below at {holds_at(below)}, those up to B = 32: "
        f"{holds_at(below.sel(microbatches=slice(None, 32)))}",
        f"our orders reach {100 * float(gap.max()):+.1f} points against GPipe; by the microbatches "
        f"that a pipe admits: {listed}; run at F = B (8, 16) has not the published 26 %",
    )


BELOW_IN_TABLE = Check(
    lambda data: everywhere(_below(data.table_bubble_ratio.sel(measured=DOUBLE))), _below_words
)


def _few_fast(data: xr.Dataset) -> xr.DataArray:
    """Chimera against GPipe and 1F1B at B <= 16 on a fast network."""
    few = data.sel(microbatches=FEW, system=list(FAST))
    return xr.concat([relative(few, "chimera", name) for name in ("gpipe", "1f1b")], "to")


CHIMERA_WINS = Check(
    lambda data: everywhere(_few_fast(data) < 0),
    lambda data: Words(f"against GPipe and 1F1B {span(_few_fast(data.runs))}"),
)


def _gain(data: xr.Dataset) -> xr.DataArray:
    """Its gain over GPipe there, by depth: the largest that every fast system has."""
    few = data.sel(microbatches=FEW, system=list(FAST))
    return (-relative(few, "chimera", "gpipe")).min("system").max("microbatches")


# what the published idle share at S = B = 8 and GPipe's own formula make of the gain there
IMPLIED_GAIN = 1 - (1 - GPIPE_8) / (1 - IDLE_8[0])


def _gain_words(data: Evidence) -> Words:
    gain = _gain(data.runs)
    listed = ", ".join(f"{share(gain.sel(workers=p))} at S={int(p)}" for p in gain.workers.values)
    slots = data.runs.table_bubble_ratio.sel(workers=8, microbatches=8, measured=DOUBLE)
    busy = 1 - slots.sel(schedule=["gpipe", "chimera"])
    in_slots = 1 - busy.sel(schedule="gpipe") / busy.sel(schedule="chimera")
    return Words(
        f"up to {listed}",
        f"the source contradicts itself: its idle share of Chimera at S = B = 8, about 35 %, and "
        f"GPipe's formula, {100 * GPIPE_8:.1f} %, give {100 * IMPLIED_GAIN:.0f} %; the tables "
        f"there are {share(in_slots)} apart (36 slots against 45 at B = 2F)",
    )


CHIMERA_GAIN = Check(
    lambda data: near(_gain(data).max("workers"), 0.15),
    _gain_words,
    lambda data: near(_gain(data).max("workers"), IMPLIED_GAIN),
)


def _idle_gap(data: xr.Dataset) -> xr.DataArray:
    few = data.bubble_ratio.sel(microbatches=FEW, system=list(FAST))
    return few.sel(schedule="chimera") - few.sel(schedule=["gpipe", "1f1b"])


CHIMERA_IDLE = Check(
    lambda data: everywhere(_idle_gap(data) < 0),
    lambda data: Words(
        f"{span(_idle_gap(data.runs)).replace('%', 'points')} against GPipe and 1F1B"
    ),
)


def _lead(data: xr.Dataset) -> xr.DataArray:
    return relative(data, "chimera", "gpipe").sel(system=list(FAST))


def _gone(data: xr.Dataset) -> xr.DataArray:
    gap = _lead(data)
    gone = abs(gap.sel(microbatches=64)) <= POINTS.value
    return everywhere(gap.sel(microbatches=16) < 0) & everywhere(gone)


def _gone_words(data: Evidence) -> Words:
    gap = _lead(data.runs).sel(microbatches=MIDDLE)
    return Words(
        ", ".join(f"B={int(m)}: {span(gap.sel(microbatches=m))}" for m in gap.microbatches.values)
    )


LEAD_GONE = Check(_gone, _gone_words)


def _on_slow(data: xr.Dataset) -> xr.DataArray:
    return relative(data, "chimera", "gpipe").sel(system=list(SLOW))


def _slower_words(data: Evidence) -> Words:
    gap = _on_slow(data.runs)
    ends = ", ".join(
        f"B={int(m)}: {span(gap.sel(microbatches=m))}" for m in gap.microbatches.values[[0, -1]]
    )
    all_gaps = _on_slow(data.whole)
    is_priced = everywhere(all_gaps.notnull())
    holds = everywhere(all_gaps > 0)
    largest_share = (all_gaps > 0).mean([dim for dim in all_gaps.dims if dim not in SETTINGS]).max()
    return Words(
        f"{ends}; slower at {holds_at(gap > 0)}",
        f"so at all points in {int(holds.sum())} of {int(is_priced.sum())} settings searched, at "
        f"most {100 * float(largest_share):.0f} % of the points in one: with few microbatches the "
        "exchange costs less than the bubble that Chimera saves",
    )


SLOWER_ON_SLOW = Check(lambda data: everywhere(_on_slow(data) > 0), _slower_words)


def _slower_high(data: Evidence) -> Words:
    gap = _on_slow(data.runs).sel(microbatches=HIGH)
    return Words(f"{span(gap)}; slower at {holds_at(gap > 0)}")


SLOWER_AT_HIGH_COUNT = Check(
    lambda data: everywhere(_on_slow(data).sel(microbatches=HIGH) > 0), _slower_high
)


def _growth(data: xr.Dataset) -> xr.DataArray:
    """Run time on slow networks with the most microbatches over that with the fewest, minus 1."""
    times = data.makespan.sel(schedule=list(THREE), system=list(SLOW))
    return times.isel(microbatches=-1) / times.isel(microbatches=0) - 1


def _others_grow(data: xr.Dataset) -> xr.DataArray:
    """Return whether GPipe's or 1F1B's time on slow networks grows with B anywhere."""
    others = data.makespan.sel(schedule=["gpipe", "1f1b"], system=list(SLOW))
    return ~everywhere(others.diff("microbatches") <= 0)


def _grows(data: xr.Dataset) -> xr.DataArray:
    return everywhere(_growth(data).sel(schedule="chimera") > 0) & ~_others_grow(data)


def _grows_words(data: Evidence) -> Words:
    growth = _growth(data.runs)
    chimera = growth.sel(schedule="chimera")
    listed = ", ".join(f"{name} {span(chimera.sel(system=name))}" for name in SLOW)
    others = span(growth.sel(schedule=["gpipe", "1f1b"]))
    all_growth = _growth(data.whole).sel(schedule="chimera")
    grows, priced = (
        int(everywhere(condition).sum()) for condition in (all_growth > 0, all_growth.notnull())
    )
    return Words(
        f"from the fewest to the most microbatches: {listed}; GPipe and 1F1B {others}",
        "exchanges once a unit of P microbatches grow in number with B, but where compute is slow "
        "the bubble that more microbatches save is larger; on all slow systems it rises in "
        f"{grows} of {priced} settings searched",
    )


GROWS_WITH_COUNT = Check(_grows, _grows_words)


def _relative_growth(data: xr.Dataset) -> xr.DataArray:
    """Return whether Chimera's time over GPipe's grows, within 3 points between the ends."""
    gap = relative(data, "chimera", "gpipe")
    slow = gap.sel(system=list(SLOW)).diff("microbatches")
    ends = gap.isel(microbatches=-1) > gap.isel(microbatches=0)
    return everywhere(ends) & everywhere(slow > -POINTS.value) & ~_others_grow(data)


def _relative_words(data: Evidence) -> Words:
    slow = _on_slow(data.runs)
    fast = _lead(data.runs).isel(microbatches=-1)
    listed = ", ".join(
        f"{span(slow.sel(microbatches=m))} at B={int(m)}" for m in slow.microbatches.values[[0, -1]]
    )
    return Words(f"against GPipe {listed}", f"on fast networks {span(fast)} at the end")


GROWS_RELATIVELY = Check(_relative_growth, _relative_words)


def _spread(data: xr.Dataset) -> xr.DataArray:
    many = data.makespan.sel(microbatches=MANY, system=list(FAST), schedule=list(THREE))
    return many.max("schedule") / many.min("schedule") - 1


def _converge_words(data: Evidence) -> Words:
    many = data.runs.sel(microbatches=MANY, system=list(FAST))
    return Words(
        f"GPipe, 1F1B and Chimera within {share(_spread(data.runs).max())}; asymmetric Chimera "
        f"{span(relative(many, UNEQUAL['1:2'], 'gpipe'))} against GPipe (claim 6d)"
    )


CONVERGE = Check(lambda data: everywhere(_spread(data) <= POINTS.value), _converge_words)


def _copies(data: xr.Dataset) -> xr.DataArray:
    ratio = data.static_bytes.sel(schedule="chimera") / data.static_bytes.sel(schedule="1f1b")
    return ratio.fillna(ratio.max())


CHIMERA_MEMORY = Check(
    lambda data: everywhere(
        abs(_copies(data) / 2 - 1) < np.finfo(float).eps * data.sizes["worker"]
    ),
    lambda data: Words(f"persistent memory x {float(_copies(data.runs).min()):.2f}"),
)


def _square(data: xr.Dataset) -> xr.Dataset:
    return data.sel(workers=8, microbatches=8)


def _saved(data: xr.Dataset) -> xr.DataArray:
    """Share of time that Hanayo saves against Chimera at S = B = 8, by system."""
    return -relative(_square(data), HANAYO, "chimera")


def _mean_saved(data: xr.Dataset) -> xr.DataArray:
    return _saved(data).sel(system=list(MID_OR_FAST)).mean("system")


def _published_fits(whole: xr.Dataset) -> xr.DataArray:
    """Return Hanayo's saving where e_c is fitted: the published order on the paper's machines."""
    return whole.fitted_saves.sel(fitted_slots=EQUAL, fitted_inequality=ALL_EQUAL)


def _count_fits(holds: xr.DataArray, saves: xr.DataArray) -> str:
    is_fitted = saves.notnull().all("system")
    return f"{int((holds & is_fitted).sum())} of {int(is_fitted.sum())}"


def _fast_words(data: Evidence) -> Words:
    saves = _published_fits(data.whole)
    holds = near(saves.sel(system=list(MID_OR_FAST)).mean("system"), 0.12, 0.14)
    gain = _saved(data.runs).sel(system=list(MID_OR_FAST))
    return Words(
        f"mean {share(_mean_saved(data.runs))} ({span(gain)})",
        f"in {_count_fits(holds, saves)} settings where e_c is fitted, 34 TB/s among them",
    )


def _fast_holds(data: xr.Dataset) -> xr.DataArray:
    """In the setting, and in every other one that is fitted: else it would be no construction."""
    saves = _published_fits(data)
    holds = near(saves.sel(system=list(MID_OR_FAST)).mean("system"), 0.12, 0.14)
    return near(_mean_saved(data), 0.12, 0.14) & (holds | saves.isnull().any("system")).all()


HANAYO_FAST = Check(_fast_holds, _fast_words)


def _idle_means(data: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    idle = _square(data).bubble_ratio.sel(system=list(MID_OR_FAST)).mean("system")
    return idle.sel(schedule="chimera"), idle.sel(schedule=HANAYO)


def _idle_holds(data: xr.Dataset) -> xr.DataArray:
    chimera, hanayo = _idle_means(data)
    return near(chimera, IDLE_8[0]) & near(hanayo, IDLE_8[1])


HANAYO_IDLE = Check(
    _idle_holds,
    lambda data: Words("mean " + " and ".join(share(idle) for idle in _idle_means(data.runs))),
)


def _outlier(data: xr.Dataset) -> xr.DataArray:
    name = "slow_nw_fast_cp"
    idle = _square(data).bubble_ratio.sel(system=name)
    more = idle.sel(schedule=HANAYO) > idle.sel(schedule="chimera")
    return near(_saved(data).sel(system=name), OUTLIERS[name]) & more


def _outlier_words(data: Evidence) -> Words:
    name = "slow_nw_fast_cp"
    idle = _square(data.runs).bubble_ratio.sel(system=name)
    shares = " against ".join(
        share(idle.sel(schedule=schedule)) for schedule in (HANAYO, "chimera")
    )
    saves = _published_fits(data.whole)
    passing = ", ".join(
        f"{_count_fits(near(at.sel(system=name), OUTLIERS[name]), at)} at {bandwidth / 1e12:g} TB/s"
        for bandwidth in BANDWIDTHS
        for at in (saves.sel(fitted_bandwidth=bandwidth),)
    )
    return Words(
        f"{100 * float(_saved(data.runs).sel(system=name)):+.2f} %; idle {shares}",
        f"of the settings where e_c is fitted {passing} come within 3 points",
    )


HANAYO_OUTLIER = Check(_outlier, _outlier_words)
HANAYO_FITTED = Check(
    lambda data: near(_saved(data).sel(system="slow_nw_mid_cp"), OUTLIERS["slow_nw_mid_cp"]),
    lambda data: Words(f"{100 * float(_saved(data.runs).sel(system='slow_nw_mid_cp')):+.2f} %"),
)


def _bytes(data: xr.Dataset, schedule: str) -> xr.DataArray:
    return (data.static_bytes + data.activation_bytes).sel(schedule=schedule)


def _both(values: Mapping[str, xr.DataArray]) -> str:
    return ", ".join(f"{shares} {span(gaps)}" for shares, gaps in values.items())


def _where(points: xr.DataArray) -> str:
    flat = points.stack(point=points.dims)
    flat = flat[flat.values]
    return ", ".join(
        f"{system} with B = {int(count)}"
        for system, count in zip(flat.system.values, flat.microbatches.values, strict=True)
    )


def _peak_ratio(data: xr.Dataset) -> dict[str, xr.DataArray]:
    equal = _bytes(data, "chimera").max("worker")
    return {k: _bytes(data, name).max("worker") / equal - 1 for k, name in UNEQUAL.items()}


ASYMMETRIC_PEAK = Check(
    lambda data: everywhere(_peak_ratio(data)["1:2"] >= 0),
    lambda data: Words(_both(_peak_ratio(data.runs))),
)


def _uneven(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the excess of the fullest worker over the mean one, by shares of the stages."""
    need = {k: _bytes(data, name) for k, name in {**UNEQUAL, "equal": "chimera"}.items()}
    return {k: held.max("worker") / held.mean("worker") - 1 for k, held in need.items()}


def _balance_words(data: Evidence) -> Words:
    spread = _uneven(data.runs)
    better = {k: spread[k] < spread["equal"] for k in UNEQUAL}
    return Words(
        f"largest over mean worker: {_both(spread)}; more even at {holds_at(better['1:2'])}",
        "early stages hold most microbatches: with the smaller share there they need too little "
        f"for a balance; with the greater one (2:1) memory is more even at "
        f"{holds_at(better['2:1'])}",
    )


ASYMMETRIC_BALANCE = Check(
    lambda data: everywhere(_uneven(data)["1:2"] < _uneven(data)["equal"]), _balance_words
)


def _uneven_stages(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the activations of the fullest stage over those of the mean one, by shares."""
    held = data.stage_activation_bytes
    ratio = held.max("stage") / held.mean("stage")
    return {
        k: ratio.sel(schedule=name)
        for k, name in {"1:2": UNEQUAL["1:2"], "equal": "chimera"}.items()
    }


def _by_limit(workers: int) -> list[float]:
    """Return these ratios if stage s held S - s microbatches, like 1F1B: equal stages, 1:2."""
    held = np.arange(workers, 0, -1)
    unequal = held * np.repeat([1, 2], workers // 2)
    return [float(activations.max() / activations.mean()) for activations in (held, unequal)]


def _stage_words(data: Evidence) -> Words:
    equal, unequal = (_uneven_stages(data.runs)[k] for k in ("equal", "1:2"))
    depths = data.runs.workers.values
    means = ", ".join(
        f"S={int(p)}: {float(equal.sel(workers=p).mean()):.2f} to "
        f"{float(unequal.sel(workers=p).mean()):.2f}"
        for p in depths
    )
    limits = ", ".join(
        f"{even_ratio:.2f} to {uneven_ratio:.2f}"
        for even_ratio, uneven_ratio in map(_by_limit, depths)
    )
    return Words(
        f"activations of the fullest stage over the mean, mean of all B: {means}; more even at "
        f"{holds_at(unequal < equal)}",
        "our orders limit a pipe at its first stage alone, and its large stages run ahead; if "
        f"stage s held S - s microbatches, as 1F1B's does, it would be {limits}",
    )


STAGE_BALANCE = Check(
    lambda data: everywhere(_uneven_stages(data)["1:2"] < _uneven_stages(data)["equal"]),
    _stage_words,
)


def _shallow(data: xr.Dataset) -> dict[str, xr.DataArray]:
    at = data.sel(workers=4, system=list(FAST))
    return {shares: relative(at, name, "chimera") for shares, name in UNEQUAL.items()}


def _shallow_words(data: Evidence) -> Words:
    gap = _shallow(data.runs)
    used = [gap["1:2"].sel(microbatches=counts) for counts in (FEW, ALL)]
    means = ", ".join(f"{100 * float(gaps.mean()):+.1f} %" for gaps in used)
    return Words(f"mean of B <= 16 and of all B: {means}; {_both(gap)}")


ASYMMETRIC_SHALLOW = Check(
    lambda data: near(_shallow(data)["1:2"].mean(["system", "microbatches"]), -0.05),
    _shallow_words,
)


def _deep(data: xr.Dataset, counts: slice) -> dict[str, xr.DataArray]:
    at = data.sel(workers=8, microbatches=counts)
    return {shares: relative(at, name, "chimera") for shares, name in UNEQUAL.items()}


def _deep_words(data: Evidence) -> Words:
    small, few = (_deep(data.runs, counts) for counts in (MANY, FEW))
    slower = {k: gaps > 0 for k, gaps in small.items()}
    exceptions = f", but not at {missing}" if (missing := _where(~slower["1:2"])) else ""
    return Words(
        f"small ones (B > 64, the reading used): {_both(small)}; few (B <= 16): {_both(few)}",
        f"slower at {holds_at(slower['1:2'])}{exceptions}; with the greater share on the early "
        f"stages at {holds_at(slower['2:1'])}",
    )


ASYMMETRIC_DEEP = Check(lambda data: everywhere(_deep(data, MANY)["1:2"] > 0), _deep_words)


def _moved(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return where the best of the three differs between any two levels."""
    at = data.sel(schedule=list(THREE))
    formula = at.formula_bubble_ratio.argmin("schedule")
    table = at.table_bubble_ratio.sel(measured=DOUBLE).argmin("schedule")
    run = at.makespan.fillna(np.inf).argmin("schedule")
    return {
        "in table than formula": table != formula,
        "in the run than formula": run != formula,
        "in the run than table": run != table,
    }


def _ranking_words(data: Evidence) -> Words:
    moved = ", ".join(
        f"{where} at {holds_at(is_moved)}" for where, is_moved in _moved(data.runs).items()
    )
    return Words(f"another winner {moved}")


def _any_moves(data: xr.Dataset) -> xr.DataArray:
    stays = [everywhere(~is_moved) for is_moved in _moved(data).values()]
    return ~(stays[0] & stays[1] & stays[2])


RANKING = Check(_any_moves, _ranking_words)


def _need(data: xr.Dataset) -> xr.DataArray:
    return (data.static_bytes + data.activation_bytes).max("worker")


def _limit_words(data: Evidence) -> Words:
    need, capacity = _need(data.runs) / 1e9, float(data.runs.memory_capacity) / 1e9
    return Words(
        f"the largest worker needs {float(need.min()):,.0f} to {float(need.max()):,.0f} GB of "
        f"{capacity:.0f} GB",
        "no recomputation, and unfused attention that keeps the scores of 80 heads: times "
        "compare schedules, not machines that could run them",
    )


MEMORY_LIMIT = Check(
    lambda data: everywhere((_need(data) > data.memory_capacity) | _need(data).isnull()),
    _limit_words,
)
