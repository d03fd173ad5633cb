"""Exact regimes by delay and by blocking links: where Hanayo beats Chimera, and Chimera 1F1B.

The borders are inequalities of exact closed forms in F and B of a microbatch on a worker and the
message time c. Beside them: the border of Hanayo against Chimera by depth and waves, and where the
published closed form of Chimera is the makespan.
"""

from collections.abc import Mapping
from fractions import Fraction

import jax
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.analysis import named_parameters, versus
from pipejax.files import provenance
from pipejax.results import Formula, Region
from pipejax.typing import Bool, Float, NumpyArray
from sweeps.kit.cases import build
from sweeps.kit.claims import OURS, Claim, Threshold, Verdict
from sweeps.kit.command import write
from sweeps.published import forms
from sweeps.tabular.regimes import ACCELERATORS, PAIRS, PARAMETERS, Pair, sweep as tabular_sweep
from sweeps.tabular.settings import REPORTED, SLOTS, draw

STORE = "finding_regimes.zarr"
LINKS = ("delay", "blocking")
BACKWARDS = np.linspace(0.5, 4.0, 211)  # of a forward; one is 2
MESSAGES = np.geomspace(1e-4, 10.0, 201)
TWICE = 2.0  # B / F of the border by depth
WAVES = {1: "hanayo, 1 wave", 2: "hanayo, 2 waves", 4: "hanayo, 4 waves"}
DEPTHS = (4, 8, 16)  # P = M
ROUNDS = (1, 2, 4)  # M / P of the published form
EVEN = (2, 4, 6, 8, 12, 16)  # P of it


def sweep() -> xr.Dataset:
    """Find the borders.

    Returns:
      ratio of step times by (pair, link, backward, message); count of each parameter in every
      inequality, which are `>= 0`, by (inequality, parameter), each of a pair, a link and a region:
      within a region all hold, where the first is at most as long; backward_of and message_of of
      the accelerators by (pair, system); border by (waves, workers, link): the largest c / F with
      Hanayo at most as long at B = 2F, missing where it never is; published_where by (drawn,
      even_workers, rounds): where Chimera's published form is the makespan.
    """
    plane = {"F": 1.0, "B": BACKWARDS[:, None], "c": MESSAGES[None, :]}
    ratio, rows = [], []
    for name, pair in PAIRS.items():
        for link in LINKS:
            first, second = (_form(case, pair, link) for case in pair[:2])
            ratio.append(np.asarray(first(**plane)) / np.asarray(second(**plane)))
            for k, region in enumerate(versus(first, second).one_at_most):
                rows += [(name, link, k, counts) for counts in region.counts]
    # accelerators are as they are in any setting of the paper's systems
    places = tabular_sweep(points=2, setting=REPORTED).sel(system=list(ACCELERATORS))
    border = [
        [[_border(case, depth, link) for link in LINKS] for depth in DEPTHS]
        for case in WAVES.values()
    ]
    where = [[[_where(p, r * p, slots) for r in ROUNDS] for p in EVEN] for slots in SLOTS.values()]
    return xr.Dataset(
        {
            "ratio": (
                ("pair", "link", "backward", "message"),
                np.reshape(ratio, (len(PAIRS), len(LINKS), len(BACKWARDS), len(MESSAGES))),
            ),
            "counts": (("inequality", "parameter"), [list(map(float, row[3])) for row in rows]),
            "of_pair": ("inequality", [row[0] for row in rows]),
            "of_link": ("inequality", [row[1] for row in rows]),
            "region": ("inequality", [row[2] for row in rows]),
            "backward_of": places.backward_of.drop_vars(["one", "other", "facets"]),
            "message_of": places.message_of.drop_vars(["one", "other", "facets"]),
            "border": (("waves", "workers_of_border", "link"), border),
            "published_where": (("drawn", "even_workers", "rounds"), where),
        },
        coords={
            "pair": list(PAIRS),
            "one": ("pair", [pair.first for pair in PAIRS.values()]),
            "other": ("pair", [pair.second for pair in PAIRS.values()]),
            "link": list(LINKS),
            "backward": BACKWARDS,
            "message": MESSAGES,
            "parameter": list(PARAMETERS),
            "waves": list(WAVES),
            "workers_of_border": list(DEPTHS),
            "drawn": list(SLOTS),
            "even_workers": list(EVEN),
            "rounds": list(ROUNDS),
        },
        attrs={
            "title": "exact regimes by two link models",
            "times": "F and B of a microbatch on a worker, c of a message",
            "orders": "drawn with F = B where M = P, with B = 2F beyond",
            **provenance(),
        },
    )


def _form(case: str, pair: Pair, link: str) -> Formula:
    table = draw(case, pair.workers, pair.microbatches)
    program = pj.lower(table, link=link, step_end=False)
    return pj.formula(program, named_parameters(program, PARAMETERS, table.worker_parts))


def _border(case: str, depth: int, link: str) -> float:
    """Largest c / F with Hanayo at most as long as Chimera, at B = 2F and P = M."""
    both_forms = []
    for name in (case, "chimera"):
        table = build(name, depth, depth, next(iter(SLOTS.values())))  # drawn with F = B
        work = pj.Costs.per_worker(table, forward=1.0, backward=TWICE, transfer=0.0)
        message = pj.Costs.per_worker(table, forward=0.0, backward=0.0, transfer=1.0)
        program = pj.lower(table, link=link, step_end=False)
        both_forms.append(pj.formula(program, {"F": work, "c": message}))
    return max(map(_largest, versus(*both_forms).one_at_most), default=np.nan)


def _largest(region: Region) -> float:
    """Largest c / F within the inequalities of a region in F and c."""
    return float(min(Fraction(work) / -Fraction(c) for work, c in region.counts if c < 0))


def _where(workers: int, microbatches: int, slots: Mapping[str, float]) -> str:
    """Say where Chimera's published form is the makespan of the order drawn in some slots."""
    (published,) = (form for form in forms.FORMS if form.schedule == "chimera")
    return forms.judge(published._replace(options={"slots": slots}), workers, microbatches).where


Data = Mapping[str, xr.Dataset]
SAME = Threshold(1e-9, "equal but for rounding: within 1e-9", "ours: float64")
DECADE = Threshold(10.0, "a decade inside", "ours: times of one model differ less by machine")


def holds_at(
    data: xr.Dataset,
    pair: str,
    link: str,
    backward: Float[NumpyArray, "..."],
    message: Float[NumpyArray, "..."],
) -> Bool[NumpyArray, "..."]:
    """Return whether the inequalities of one region hold.

    Args:
      data: as from `sweep`.
      pair: of schedules.
      link: link model.
      backward: B / F.
      message: c / F, of shapes that go together.

    Returns:
      Whether the first is at most as long by them.
    """
    inequalities = data.isel(
        inequality=(data.of_pair.values == pair) & (data.of_link.values == link)
    )
    # inequalities first, then the axes of the points
    axes = [1] * max(np.ndim(backward), np.ndim(message))
    forward, by_backward, by_message = inequalities.counts.values.T.reshape(3, -1, *axes)
    at_least = forward + by_backward * backward + by_message * message >= -SAME.value
    regions = [
        at_least[inequalities.region.values == k].all(axis=0)
        for k in np.unique(inequalities.region)
    ]
    return np.any(regions, axis=0)


def _hanayo(data: Data) -> Verdict:
    """At 8 x 8 and B = 2F: c <= 10/98 F by delay, 25/270 F by blocking, on the map too."""
    regimes = data["finding_regimes"]
    border = regimes.border.sel(waves=2, workers_of_border=8)
    claimed = {"delay": Fraction(10, 98), "blocking": Fraction(25, 270)}
    row = regimes.ratio.sel(pair="hanayo").sel(backward=TWICE, method="nearest")
    exact, wrong = [], 0
    for link, value in claimed.items():
        exact.append(abs(float(border.sel(link=link)) - value) < SAME.value)
        inside = regimes.message.values <= float(value)
        wrong += int((inside != (row.sel(link=link).values <= 1 + SAME.value)).sum())
    holds = all(exact) and not wrong
    return Verdict(
        ", ".join(f"{float(border.sel(link=link)):.5f} F by {link}" for link in claimed)
        + f"; {wrong} points of the map on the other side",
        holds,
        "" if holds else "another border",
    )


def _inequalities(data: Data) -> Verdict:
    """The inequalities say of every point of the maps which is the faster."""
    regimes = data["finding_regimes"]
    wrong = size = 0
    for pair in regimes.pair.values:
        for link in regimes.link.values:
            ratio = regimes.ratio.sel(pair=pair, link=link).values
            is_first_faster = holds_at(
                regimes,
                pair,
                link,
                regimes.backward.values[:, None],
                regimes.message.values[None, :],
            )
            far = abs(ratio - 1) > SAME.value  # on a border both are right
            wrong += int(((is_first_faster != (ratio <= 1)) & far).sum())
            size += is_first_faster.size
    counts = [
        f"{int(((regimes.of_pair == pair) & (regimes.of_link == link)).sum())} ({pair}, {link})"
        for pair in regimes.pair.values
        for link in regimes.link.values
    ]
    return Verdict(
        f"{wrong} of {size} points on the other side; inequalities: {', '.join(counts)}",
        not wrong,
        "" if not wrong else "the inequalities are not those of the map",
    )


def _accelerators(data: Data) -> Verdict:
    """With messages ten times as long each accelerator is still inside all four regions."""
    regimes = data["finding_regimes"]
    inside = [
        holds_at(
            regimes,
            pair,
            link,
            regimes.backward_of.sel(pair=pair).values,
            DECADE.value * regimes.message_of.sel(pair=pair).values,
        )
        for pair in regimes.pair.values
        for link in regimes.link.values
    ]
    count, size = int(np.sum(inside)), np.size(inside)
    return Verdict(
        f"{count} of {size}; c / F is {float(regimes.message_of.min()):.1g} to "
        f"{float(regimes.message_of.max()):.1g}",
        count == size,
        "" if count == size else "one lies nearer to the border",
    )


def _depths(data: Data) -> Verdict:
    """One wave never wins, more do below a border, which is nearer by blocking."""
    border = data["finding_regimes"].border
    never = bool(border.sel(waves=1).isnull().all())
    more = border.sel(waves=[2, 4])
    nearer = bool((more.sel(link="blocking") < more.sel(link="delay")).all())
    holds = never and nearer and bool(more.notnull().all())
    return Verdict(
        f"2 and 4 waves: {float(more.min()):.3f} to {float(more.max()):.3f} F",
        holds,
        "" if holds else "one wave wins, or the border is farther by blocking",
    )


def _published(data: Data) -> Verdict:
    """Drawn with F = B, Chimera's form holds on the line F = B alone from four workers on."""
    where = data["finding_regimes"].published_where
    equal, double = where.drawn.values
    deep = where.sel(even_workers=slice(4, None))
    line = deep.sel(drawn=equal) == "F = B"
    nowhere = deep.sel(drawn=double) == "nowhere"
    elsewhere = ~deep.sel(drawn=double).isin(["nowhere", "F = B"])
    holds = bool(line.all()) and not bool(elsewhere.any())
    return Verdict(
        f"on that line alone at {int(line.sum())} of {line.size} sizes; of the order drawn with "
        f"B = 2F nowhere at {int(nowhere.sum())}, else there",
        holds,
        "" if holds else "it holds elsewhere too",
    )


FIGURE = "finding_regimes.pdf"
CLAIMS = (
    Claim(
        "d1",
        "8 x 8, B = 2F: Hanayo with two waves is at most as long as Chimera exactly where "
        "c <= 10/98 F by delay, c <= 25/270 F by blocking",
        "",
        FIGURE,
        _hanayo,
        OURS,
        thresholds=(SAME,),
    ),
    Claim(
        "d2",
        "Hanayo against Chimera at 8 x 8 and Chimera against 1F1B at 8 x 32: the inequalities of "
        "the exact forms say which is the faster, by delay and by blocking",
        "",
        FIGURE,
        _inequalities,
        OURS,
        thresholds=(SAME,),
    ),
    Claim(
        "d3",
        "all four accelerators lie a decade inside, where the first of each pair is the faster",
        "",
        FIGURE,
        _accelerators,
        OURS,
        thresholds=(DECADE,),
    ),
    Claim(
        "d4",
        "P = M in 4, 8, 16, B = 2F: Hanayo with one wave is never as fast as Chimera; with two and "
        "four it is up to a border that is nearer by blocking than by delay",
        "",
        FIGURE,
        _depths,
        OURS,
    ),
    Claim(
        "d5",
        "Chimera's published form (M + P/2 - 1)(F + B) is the makespan on the line F = B alone, "
        "from P = 4 on",
        "",
        "",
        _published,
        OURS,
    ),
)


def main() -> None:
    """Write the dataset."""
    jax.config.update("jax_enable_x64", True)
    write(
        __doc__ or "", sweep, lambda data: f"{data.ratio.size} points of {data.sizes['pair']} maps"
    )


if __name__ == "__main__":
    main()
