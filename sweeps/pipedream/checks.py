"""Checks of the claims of the PipeDream theory: verdicts read off datasets."""

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

from pipejax.training import RULES
from sweeps.kit.claims import Threshold, Verdict
from sweeps.pipedream.curves import (
    PUBLISHED,
    QUANTITY,
    apart,
    as_run,
    at_equal,
    below,
    depths,
    ends,
    in_order,
    shown,
    step_size_rule,
    summarise_seeds,
    tuned,
    winner,
)
from sweeps.pipedream.settings import AUTHORS_SEED, CAPTION
from sweeps.pipedream.words import End, short

Data = Mapping[str, xr.Dataset]
Check = Callable[[Data], Verdict]
END = Threshold(
    3.0,
    "ends within a factor of 3",
    "ours: half a decade, for ends are read off many decades",
)
FLAT = Threshold(
    2.0, "within a factor of 2 of 1e-2", "the authors' log, whose ends are 0.76e-2 to 1.6e-2"
)
FALL = Threshold(2.0, "ends within a factor of 2", "ours: that of PipeDream in the same experiment")
CLOSE = Threshold(
    2e-6 / 3e-7, "at most 6.7 times apart", "the published ends of both, 2e-6 and 3e-7"
)
POWER = Threshold(0.02, "16 within 2 %", "ours: S^2 - S/2 is not yet S^2 at S = 128")
ROUNDING = Threshold(1e-9, "1/K to rounding", "ours: double precision")
UNKNOWN = "the cause is not known"
ORDER: Mapping[bool | None, str] = {  # why an order does not hold
    True: "",
    False: f"some scheme ends above the next one with every seed; {UNKNOWN}",
    None: "seeds do not agree on the order",
}
MATCHED = "rpd delta=60"  # the largest delay of PipeDream at S = 8
TENTH = 10  # parts of a run
DISAGREE = "seeds do not agree"
RIVALS = ("local-sgd H=5", "pipedream")  # of experiment 5
LOCAL = tuple(f"local-sgd H={h}" for h in (2, 5, 30))
LOCAL_ENDS = {2: (1.3e-2, 1.3e-2)} | dict.fromkeys((32, 64, 128), (1.3e-3, 1.55e-3))


def within(ours: float, low: float, high: float, factor: float) -> bool:
    """Return whether a number is within a factor of a published range."""
    return bool(low / factor <= ours <= high * factor)


def ends_text(ends_by_scheme: Mapping[str, End], *names: str) -> str:
    """Ends in words, of all schemes if none is named."""
    return ", ".join(f"{name}: {ends_by_scheme[name]}" for name in names or ends_by_scheme)


def judged(ours: str, holds: bool) -> Verdict:
    """Verdict of a number or an order whose failure nobody has looked into."""
    return Verdict(ours, holds, "" if holds else UNKNOWN)


def compared(store: str, *names: str, x: str = "time") -> Check:
    """Check that schemes end in an order, lowest first, each at a step size inside its grid."""

    def check(data: Data) -> Verdict:
        experiment, quantity = as_run(data[store]), QUANTITY.get(store, "gap")
        chosen = tuned(experiment, quantity, step_size_rule(store))
        words = ends_text(ends(experiment, quantity, x, step_size_rule(store)), *names)
        if edges := [name for name in names if bool(chosen.edge.sel(scheme=name))]:
            reason = f"{', '.join(edges)} may end lower beyond the step sizes that were tried"
            return Verdict(words, None, reason)
        holds = in_order(at_equal(chosen, x), names)
        return Verdict(words, holds, ORDER[holds])

    return check


def order_only(check: Check, store: str, first: str, second: str, published: str) -> Check:
    """Say beside an order that holds how far apart both are, here and as published.

    Args:
      check: of the order.
      store: whose ends are compared.
      first: who ends lowest.
      second: who comes next.
      published: both ends in words.

    Returns:
      The check, with that as its reason.
    """

    def both(data: Data) -> Verdict:
        verdict = check(data)
        quantity = QUANTITY.get(store, "gap")
        ends_by_scheme = ends(data[store], quantity)
        lead = ends_by_scheme[second].median / ends_by_scheme[first].median
        at_first_step = data[store].sel(step=0, scheme=first)
        at_published = summarise_seeds(
            shown(at_first_step, quantity).isel(sample=-1).values, float(at_first_step.step_size)
        )
        reason = (
            f"the order only: {lead:.2g} times below, published are {published}; at its published "
            f"step size {first} ends at {at_published}"
        )
        return verdict._replace(reason="; ".join(filter(None, (reason, verdict.reason))))

    return both


def delay_law(data: Data) -> Verdict:
    """Judge if counts differ from S^2 - S/2 by no more in deep pipes than in shallow ones."""
    staleness = data["staleness"]
    apart = staleness.max_delay - staleness.max_delay_law
    half = staleness.sizes["stages"] // 2
    shallow, deep = abs(apart[:half]).max(), abs(apart[half:]).max()
    last = staleness.isel(stages=-1)
    return judged(
        f"{int(last.max_delay)} at S={int(last.stages)}; less S^2 - S/2 that is "
        f"{float(apart.min()):g} to {float(apart.max()):g} at {staleness.sizes['stages']} depths",
        bool(deep <= shallow),
    )


def largest_share(data: Data, bound: str) -> float:
    """Largest measured mean squared gradient, as a share of "total" or "total_without_delay"."""
    bounds = data["convergence_bound"]
    shares = [bounds[f"{late}measured"] / bounds[f"{late}{bound}"] for late in ("", "late_")]
    return max(float(share.max()) for share in shares)


def bound_holds(data: Data) -> Verdict:
    """Measured mean squared gradients of all runs that did not diverge are below the bound."""
    worst = largest_share(data, "total")
    return Verdict(f"measured / bound at most {worst:.2g}", 0 < worst <= 1)


def delay_term_needed(data: Data) -> Verdict:
    """Some run is above what is left of the bound without its delay term."""
    worst = largest_share(data, "total_without_delay")
    return judged(f"measured / bound without it at most {worst:.2g}", worst > 1)


def bound_law(data: Data) -> Verdict:
    """The delay term grows by 16 when S doubles and falls by 10 when K is ten times as large."""
    law = data["convergence_bound"].law_delay
    doubled = law.isel(law_stages=-1) / law.isel(law_stages=-2)
    by_updates = law * law.law_updates
    same = by_updates / by_updates.isel(law_updates=0)
    last = [int(stages) for stages in law.law_stages[-2:]]
    return judged(
        f"{float(doubled.max()):.2f} times as large at S={last[1]} as at {last[0]}, and ~ 1/K",
        bool(
            (abs(doubled / 16 - 1) < POWER.value).all() and (abs(same - 1) < ROUNDING.value).all()
        ),
    )


def admission(data: Data) -> Verdict:
    """Microbatches in flight at their peak, makespan and largest delay of both admissions."""
    schedules = data["pipedream_schedules"]
    all_stages, first = (schedules.sel(schedule=f"pipedream{how}") for how in ("", ", first stage"))
    same = all(float(all_stages[name]) == float(first[name]) for name in ("makespan", "max_delay"))
    held = [schedule.in_flight.values.tolist() for schedule in (all_stages, first)]
    words = [", ".join(map(str, counts)) for counts in held]
    return judged(
        f"{words[1]} instead of {words[0]}; both end after {float(first.makespan):g} slots",
        same and held == [[4, 3, 2, 1], [4, 4, 3, 1]],
    )


def published_end(scheme: str, published: float) -> Check:
    """Check the median of the final gap at the published step size."""

    def check(data: Data) -> Verdict:
        store = "pipedream_quadratic"
        end = ends(as_run(data[store]), "gap", "updates", step_size_rule(store))[scheme]
        holds = within(end.median, published, published, END.value)
        return judged(str(end), holds)

    return check


def matching(data: Data) -> Verdict:
    """Apart no more than the published ends, and nearer than with any other published delay."""
    chosen = tuned(as_run(data["pipedream_quadratic"]), "gap", PUBLISHED)
    delays = [name for name in map(str, chosen.scheme.values) if name != "pipedream"]
    ratios = {name: apart(chosen, name, "pipedream") for name in delays}
    worst = ratios.pop(MATCHED)
    is_nearest = worst <= min(ratios.values())
    end = at_equal(chosen, "updates")
    ends_apart = end.sel(scheme=MATCHED) / end.sel(scheme="pipedream")
    words = (
        f"at most {worst:.2g} times, at the end {float(ends_apart.min()):.2g} to "
        f"{float(ends_apart.max()):.2g} by seed; with other delays {min(ratios.values()):.2g} times"
    )
    drawn_apart = apart(tuned(data["pipedream_match"], "gap", PUBLISHED), "rpd", "pipedream, drawn")
    reason = (
        "no source says how close; RPD draws every batch by itself, PipeDream takes them in turn "
        f"and ends lower; where it draws them too, the two are at most {drawn_apart:.2g} times "
        "apart"
    )
    if not is_nearest:
        return judged(words, holds=False)
    return Verdict(words, True) if worst <= CLOSE.value else Verdict(words, None, reason)


def nesterov_ends(data: Data) -> Verdict:
    """All four ends are near the published ones."""
    published = dict(zip(("pipedream", *LOCAL), (2.73, 20.0, 23.0, 270.0), strict=True))
    ends_by_scheme = ends(data["pipedream_nesterov"], "gap")
    holds = all(within(ends_by_scheme[s].median, p, p, END.value) for s, p in published.items())
    return judged(ends_text(ends_by_scheme, *published), holds)


def scaling_flat(data: Data) -> Verdict:
    """PipeDream and RPD are near 1e-2 at every S."""
    depths = by_depth(data)
    ours = {
        name: [ends_by_scheme[name].median for ends_by_scheme in depths.values()]
        for name in ("pipedream", "rpd")
    }
    words = [f"{name} {min(gaps):.2g} to {max(gaps):.2g}" for name, gaps in ours.items()]
    far = [
        f"{name} {ends_by_scheme[name].median:.2g} at S = {s} ({ends_by_scheme[name].low:.2g} to "
        f"{ends_by_scheme[name].high:.2g} by seed; {last_tenth(data, name, s):.2g} as the mean of "
        "the last tenth of the run)"
        for s, ends_by_scheme in depths.items()
        for name in ours
        if not within(ends_by_scheme[name].median, 1e-2, 1e-2, FLAT.value)
    ]
    return Verdict(", ".join(words), not far, f"farther: {', '.join(far)}" if far else "")


def last_tenth(data: Data, scheme: str, stages: int) -> float:
    """Median of f over the last tenth of experiment 5, for an end is one model of noisy updates."""
    experiment = as_run(data["pipedream_scaling"]).sel(stages=stages)
    curve = tuned(experiment, "value").shown.sel(scheme=scheme)
    tail = curve.isel(sample=slice(-max(1, curve.sizes["sample"] // TENTH), None))
    return float(tail.mean("sample").median("seed"))


def scaling_local(data: Data) -> Verdict:
    """Near the published ends at S = 2, 32, 64, 128, and falling up to S = 64: then it is flat."""
    gap = {
        s: ends_by_scheme["local-sgd H=5"].median for s, ends_by_scheme in by_depth(data).items()
    }
    falls = bool(np.all(np.diff([gap[s] for s in gap if s <= 64]) < 0))
    near = all(within(gap[s], *range_, FALL.value) for s, range_ in LOCAL_ENDS.items())
    words = ", ".join(f"{g:.2g} at {s}" for s, g in gap.items())
    return judged(words, falls and near)


def scaling_winner(data: Data) -> Verdict:
    """LocalSGD is below PipeDream from S = 4 on, with the authors' seed and with the others."""
    store = as_run(data["pipedream_scaling"])
    later = {
        int(s): at_equal(tuned(store.sel(stages=s), "value"), "time")
        for s in store.stages
        if s >= 4
    }
    wins = {s: below(depth_ends, *RIVALS) for s, depth_ends in later.items()}
    at = {
        answer: ", ".join(str(s) for s, won in wins.items() if won is answer) or "none"
        for answer in (True, False, None)
    }
    by_seed = [by_seeds(s, later[s]) for s, won in wins.items() if won is None]
    words = "; ".join([f"LocalSGD wins with every seed at S = {at[True]}", *by_seed])
    if False in wins.values():
        return Verdict(words, False, f"PipeDream wins with every seed at S = {at[False]}")
    if not by_seed:
        return Verdict(words, True)
    authors = all(
        below(depth_ends.sel(seed=[AUTHORS_SEED]), *RIVALS) for depth_ends in later.values()
    )
    reason = f"seeds do not agree at S = {at[None]}"
    if not authors:
        return Verdict(words, None, reason)
    by_authors = "; the authors ran one, with which LocalSGD wins at all"
    return Verdict(words, None, reason + by_authors, depends="the seed")


def by_seeds(stages: int, end: xr.DataArray) -> str:
    """Both ends at each seed, as "at S = 4: 0.007 against 0.015 (seed 0, the authors'), ..."."""
    sentences = []
    for seed in end.seed.values:
        ours, other = (short(float(end.sel(scheme=name, seed=seed))) for name in RIVALS)
        whose = ", the authors'" if seed == AUTHORS_SEED else ""
        sentences.append(f"{ours} against {other} (seed {seed}{whose})")
    return f"at S = {stages}: {', '.join(sentences)}"


def by_depth(data: Data, column: str | None = None) -> dict[int, dict[str, End]]:
    """Ends of experiment 5 by number of stages."""
    store = data["pipedream_scaling"]
    store = as_run(store) if column is None else store.sel(setting=column)
    return {s: ends(store.sel(stages=s), "value") for s in depths(store)}


def captioned(data: Data) -> Verdict:
    """Experiment 1 as its caption has it, at the step sizes that end lowest; nothing is judged."""
    store = "pipedream_quadratic"
    ends_by_scheme = ends(data[store].sel(setting=CAPTION), "gap", "updates")
    return Verdict(ends_text(ends_by_scheme), None)


def caption_scaling(data: Data) -> Verdict:
    """Experiment 5 as its caption has it; nothing is judged."""
    depths = by_depth(data, CAPTION)
    names = ("pipedream", "rpd", "local-sgd H=5")
    words = [
        f"{name} "
        + ", ".join(
            f"{ends_by_scheme[name].median:.2g} at {s}" for s, ends_by_scheme in depths.items()
        )
        for name in names
    ]
    return Verdict("; ".join(words), None)


def machines(objective: str) -> Check:
    """Return a check that names the best scheme at equal seconds with every seed, by machine."""

    def check(data: Data) -> Verdict:
        store = data["pipedream_machines"].sel(objective=objective)
        won: dict[str, list[str]] = {}
        for system in map(str, store.system.values):
            best = winner(at_equal(tuned(store.sel(system=system), "gap"), "time"))
            is_one = best.seeds == store.sizes["seed"]
            won.setdefault(best.scheme if is_one else DISAGREE, []).append(system)
        words = [f"{scheme} on {', '.join(systems)}" for scheme, systems in won.items()]
        everywhere = f"{next(iter(won))} on all {store.sizes['system']}"
        return Verdict(everywhere if len(won) == 1 else "; ".join(words), None)

    return check


def rules_agree(data: Data) -> Verdict:
    """Judge if another rule of the step size changes the scheme that ends lowest."""
    words, others = [], []
    for store in ("pipedream_nesterov", "pipedream_logistic", "pipedream_language"):
        quantity, name = QUANTITY.get(store, "gap"), store.removeprefix("pipedream_")
        first = {
            rule: winner(at_equal(tuned(data[store], quantity, rule), "time")).scheme
            for rule in RULES
        }
        words.append(f"{name}: {', '.join(first.values())}")
        others += [f"{name} by {rule}" for rule in RULES if first[rule] != first[RULES[0]]]
    reason = f"another scheme ends lowest on {', '.join(others)}" if others else ""
    return Verdict("; ".join(words), not others, reason)
