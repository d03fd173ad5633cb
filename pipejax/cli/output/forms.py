"""How closed forms are told: sums and regimes, families, verdicts, and what orders they are of."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.cli.output.numbers import percent
from pipejax.cli.output.report import facts, grid, heading, plain, sizes_of

if TYPE_CHECKING:
    from pipejax.analysis.formula.regime_map import RegimeMap

SHOWN = 12  # facets and borders that a person reads


class Plans:
    """Schedules whose order was planned for times, and stays as it is in their forms."""

    def __init__(self) -> None:
        self.times: dict[str, dict[str, Any]] = {}  # by name, then by letter; c is a message
        self._labels: dict[str, dict[str, str]] = {}  # of names, by what they were planned for

    def add(self, name: str, label: str, times: dict[str, Any]) -> None:
        """Add a schedule, if it was planned for times."""
        if times:
            self.times[name] = times
            self._labels.setdefault(_times_text(times), {})[name] = label

    @property
    def caption(self) -> str:
        """Say below a picture which are planned for what."""
        return "; ".join(
            f"{', '.join(labels.values())} planned for {text}"
            for text, labels in self._labels.items()
        )

    def lines(self) -> Iterator[str]:
        """Say what that means for the form."""
        for text, labels in self._labels.items():
            offloads = any("O" in self.times[name] for name in labels)
            options = ["--slots", "--planned-comm", *["--planned-offload"] * offloads]
            yield (
                f"{', '.join(labels)}: in the order planned for {text} ({', '.join(options)}); "
                "evaluate and compare plan one for the times of a run, which may be faster"
            )

    def called(self, name: str) -> str:
        """Name a schedule so that no more is claimed than of this order."""
        return f"{name} as planned" if name in self.times else name

    def called_in_full(self, name: str) -> str:
        """Name it with what it was planned for."""
        behind = f" for {_times_text(self.times[name])}" if name in self.times else ""
        return self.called(name) + behind


def _times_text(times: Mapping[str, Any]) -> str:
    """Write times as `F=I=W=1, c=0`; one for each stage with / between."""
    said = {key: "/".join(f"{t:g}" for t in _listed(time)) for key, time in times.items()}
    ops = {key: text for key, text in said.items() if key in "FIW"}
    if len(set(ops.values())) == 1:
        said = {"=".join(ops): said["F"]} | {k: v for k, v in said.items() if k not in ops}
    return ", ".join(f"{key}={text}" for key, text in said.items())


def _listed(value: Any) -> list[float]:
    return [*value] if hasattr(value, "__iter__") else [value]


def form_lines(
    table: pj.ScheduleTable, form: "pj.results.Formula", plans: Plans
) -> Iterator[object]:
    """Say what the makespan is, and which sum bounds it where."""
    shown = len(form.facets) <= SHOWN
    quality = "exact" if form.exact else f"at most {percent(form.gap)} too small"
    rows = [
        ("makespan", escape(form.text) if shown else f"the largest of {len(form.facets)} sums"),
        ("is", escape(f"{quality} for {form.where}" if form.where else quality)),
        ("found with", f"{form.evaluations} evaluations"),
    ]
    yield f"{heading(sizes_of(table))}, {form.program.links.model} links"
    yield from map(plain, plans.lines())
    yield facts(rows, {form.text: form.latex})
    yield _regimes(form)
    for border in form.borders[:SHOWN]:
        larger = f"{border.one} is the larger where {border.text}"
        yield plain(f"{border.one} | {border.other}: {larger}")
    if form.borders[SHOWN:]:
        yield f"and {len(form.borders) - SHOWN} more borders: --json lists all"


def _regimes(form: "pj.results.Formula") -> Table:
    """The first facets, each with what bounds the step in the middle of where it is the largest."""
    count = min(SHOWN, len(form.facets))
    columns: list[tuple[str, Any]] = [("regime", range(count))]
    columns += [
        (name, [facet[k] for facet in form.facets[:count]])
        for k, name in enumerate(form.parameters)
    ]
    told = "bound by: in the middle of the regime"
    return grid([*columns, ("bound by", form.bound_by[:count])], caption=told)


def family_lines(found: "pj.results.Family") -> Iterator[str]:
    """Say what a family is, and on what it was found."""
    yield from ("", str(found))
    last = f", checked on {', '.join(map(str, found.verified_on))}" * bool(found.verified_on)
    yield f"found on {found.symbol} = {found.found_on[0]} to {found.found_on[-1]}{last}"


def versus_lines(
    found: "pj.results.Versus", form: "pj.results.Formula", plans: Plans
) -> Iterator[str]:
    """Say which of two is faster where, in the box of the form if it has one."""
    one, other = map(plans.called, found.names)
    verdict = {
        "one is never slower": f"{one} is never slower",
        "other is never slower": f"{other} is never slower",
    }.get(found.verdict, found.verdict)
    box = f", for {form.where}" if form.where else ""
    yield from ("", f"{' against '.join(map(plans.called_in_full, found.names))}: {verdict}{box}")
    sides = (found.one_at_most, found.one_slower), (found.other_at_most, found.other_slower)
    for name, rival, (regions, (at, ratio)) in zip((one, other), (other, one), sides, strict=True):
        for k, region in enumerate(regions[:SHOWN]):
            where = f"where {' and '.join(region.texts)}" if region.texts else "everywhere"
            yield f"  or {where}" if k else f"{name} is as fast or faster {where}"
        if regions[SHOWN:]:
            yield f"  or in {len(regions) - SHOWN} more regions: --json lists all"
        yield (
            f"{name} takes up to {ratio:.4g} times as long as {rival}, {_place(at, form)}"
            if ratio > 1
            else f"{name} never takes longer than {rival}"
        )


def _place(at: Mapping[str, float], form: "pj.results.Formula") -> str:
    """Say where a ratio is reached; forms double where all parameters do."""
    values = ", ".join(f"{key}={value:.3g}" for key, value in at.items())
    if not form.box:
        return f"at {values}, or any times as much"
    ranges = ((at[name], *form.box[name]) for name in form.box)
    inside = all(low - 1e-9 * low <= value <= high * (1 + 1e-9) for value, low, high in ranges)
    return f"at {values}" if inside else f"towards many times {values}"


def map_line(shown: "RegimeMap") -> str:
    """Say who is fastest on how much of a map, and where that is."""
    from pipejax.checker.form import box_text

    areas = ", ".join(f"{name} {share:.0%}" for name, share in shown.shares.items())
    return f"fastest on the map, {box_text(shown.parameters, shown.box)}: {areas}"
