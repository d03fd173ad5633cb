"""`pipejax calibrate` on runs of links: which link model a machine follows."""

import csv
import io
import json as json_text
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.values import CountIfGiven, Text, parse_seconds
from pipejax.cli.output.files import Output
from pipejax.cli.output.report import (
    facts,
    grid,
    percent,
    print_all,
    print_json,
    print_plain,
    print_written,
    waiting,
)

if TYPE_CHECKING:
    from pipejax.search.links.design import LinkDesign
    from pipejax.search.links.identify import LinkIdentification

    Rows = Sequence[tuple[dict[str, str], pj.links.LinkRun]]

SHOWN = 10  # candidates of a list that a person reads
NOISE = 0.02  # relative, for which runs are chosen if none is given


class LinkChoice(NamedTuple):
    """How the link model is found, or which runs would tell it.

    Attributes:
      time_noise: if not given, what the best candidate leaves, and 0.02 for --design.
      by_pair: where the runs call for them.
      design: DATA.csv has what can be run; delays and seconds in it do not count.
      delay: on a message, a link or an op, for --design.
    """

    time_noise: float | None = None
    by_pair: bool = False
    design: CountIfGiven = None
    delay: Text = None


def find_links(file: Path, choice: LinkChoice, out: Output, *, json: bool) -> None:
    """Find which link model a machine follows, from step times of known tables and delays."""
    from pipejax.search.links.identify import check_noise
    from pipejax.search.links.link_runs import read_link_runs

    time_noise, by_pair, design, delay = choice
    _check(design, delay, out, by_pair=by_pair)
    if time_noise is not None:
        check_noise(time_noise, "--time-noise")
    rows = read_link_runs(file, is_measured=design is None)
    if design is not None:
        extra = None if delay is None else parse_seconds(delay, "--delay")
        _design(rows, design, extra, NOISE if time_noise is None else time_noise, out, json=json)
        return
    with waiting("links: running all candidates"):
        found = pj.links.identify_links([run for _, run in rows], noise=time_noise, by_pair=by_pair)
    text = json_text.dumps(link_options(found.links), indent=2) + "\n"
    out.save(lambda draft: write_file(draft, text), lambda: text)
    if json:
        print_json(_as_json(rows, found) | out.as_json())
    else:
        _print(rows, found)
        print_written("wrote the links to", out.written)


def link_options(found: pj.Links) -> dict[str, str]:
    """Options that stand for a machine, by name; defaults are left out."""
    from pipejax.schedules.table.links import format_pair_links, format_pairs

    texts = {
        "queues": found.queues,
        "posting": found.posting,
        "pair_links": format_pair_links(found.named_pairs),
        "eager_below": repr(found.eager_below),
        "shared_links": format_pairs(found.shared_links),
    }
    default = pj.Links()
    given = {k: v for k, v in texts.items() if getattr(found, k) != getattr(default, k)}
    return {"link": found.model} | given


def _line(found: pj.Links) -> str:
    return " ".join(f"{flag(name)} {text}" for name, text in link_options(found).items())


def _check(design: int | None, delay: str | None, out: Output, *, by_pair: bool) -> None:
    """Refuse options that have no effect, and a file of the other kind."""
    if design is None and delay is not None:
        raise ValueError(f"--delay {delay} has no effect without --design")
    if design is not None and by_pair:
        raise ValueError("--by-pair has no effect with --design")
    wanted = ".json" if design is None else ".csv"
    if out.path is not None and out.path.suffix != wanted:
        other = "out" if design is None else ""
        raise ValueError(f"--out must end in {wanted} with{other} --design, got {str(out.path)!r}")


def _as_json(rows: "Rows", found: "LinkIdentification") -> dict[str, Any]:
    times = zip(rows, found.fits[0].predicted.tolist(), strict=True)
    return {
        "links": link_options(found.links),
        "told_apart": found.told_apart,
        "explains": found.explains,
        "noise": found.noise,
        "alike": [link_options(each) for each in found.alike],
        "candidates": [
            link_options(fit.links)
            | {"residual": fit.rms if math.isfinite(fit.rms) else None, "verdict": fit.verdict}
            for fit in found.fits
        ],
        "runs": [
            {"row": number, "measured": run.seconds, "predicted": time}
            for number, ((_, run), time) in enumerate(times, 1)
        ],
        "pairs": {f"{a}-{b}": [*models] for (a, b), models in found.pairs.items()},
    }


def _print(rows: "Rows", found: "LinkIdentification") -> None:
    measured = np.array([run.seconds for _, run in rows])
    left = np.abs(np.log(measured / found.fits[0].predicted))
    worst = int(left.argmax())
    print_all(
        f"[bold]{_line(found.links)}[/]",
        f"  leaves {percent(found.fits[0].rms)} of {len(rows)} step times (root mean square), at "
        f"most {percent(float(left[worst]))}, in row {worst + 1}",
    )
    if not found.explains:
        print_all(
            f"  that is more than noise of {percent(found.noise)}: no candidate explains these "
            "runs, whatever is best"
        )
    shown = found.fits[:SHOWN]
    left_by = [percent(fit.rms) if math.isfinite(fit.rms) else "-" for fit in shown]
    columns: Sequence[tuple[str, Sequence[object]]] = [
        ("candidate", [_line(fit.links) for fit in shown]),
        ("residual", left_by),
        ("verdict", [fit.verdict for fit in shown]),
    ]
    print_all(grid(columns))
    if found.fits[SHOWN:]:
        print_all(f"and {len(found.fits) - SHOWN} more candidates")
    if found.pairs:
        print_all(grid(_pair_columns(found.pairs), title="link models of pairs of workers"))
    print_all(
        "these runs rule out every other candidate"
        if found.told_apart
        else "cannot be told apart from the best by these runs:"
    )
    for links in found.alike[:SHOWN]:
        print_plain(f"  {_line(links)}")
    if found.alike[SHOWN:]:
        print_all(f"and {len(found.alike) - SHOWN} more")


def _pair_columns(
    pairs: Mapping[tuple[int, int], tuple[str, ...]],
) -> Sequence[tuple[str, Sequence[object]]]:
    return [
        ("pair", [f"{a}-{b}" for a, b in pairs]),
        ("link", [models[0] for models in pairs.values()]),
        ("or", [", ".join(models[1:]) for models in pairs.values()]),
    ]


def _design(
    rows: "Rows", count: int, delay: float | None, noise: float, out: Output, *, json: bool
) -> None:
    """Choose runs among those that are possible, and write them as rows to be measured."""
    from pipejax.search.links.design import choose_runs, with_delays
    from pipejax.search.links.link_runs import COLUMNS

    pool = [(cells, each) for cells, run in rows for each in with_delays(run, delay)]
    with waiting("links: running all candidates"):
        found = choose_runs([run for _, run in pool], count, noise)
    cells_of = {id(run): cells for cells, run in pool}
    chosen = [_cells(cells_of[id(run)], run) for run in found.runs]
    header = [name for name in COLUMNS if any(name in row for row in chosen)]
    text = _csv_text([*header, "seconds"], chosen)
    out.save(lambda draft: write_file(draft, text), lambda: text)
    if json:
        print_json(_design_json(chosen, found) | out.as_json())
    else:
        _print_design(header, chosen, found)
        print_written("wrote the runs to", out.written)


def _cells(cells: Mapping[str, str], run: pj.links.LinkRun) -> dict[str, str]:
    """Cells of a run that is to be measured."""
    from pipejax.search.links.link_runs import DELAYS

    kept = {name: text for name, text in cells.items() if name not in (*DELAYS, "seconds")}
    delay = {"delay_on": run.delay_on, "delay": repr(run.delay)} if run.delay_on else {}
    return kept | delay


def _csv_text(header: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _design_json(chosen: Sequence[Mapping[str, str]], found: "LinkDesign") -> dict[str, Any]:
    return {
        "runs": [dict(row) for row in chosen],
        "error_bound": found.error_bound,
        "alike": [[link_options(each) for each in group] for group in _groups(found.alike)],
    }


def _print_design(
    header: Sequence[str], chosen: Sequence[Mapping[str, str]], found: "LinkDesign"
) -> None:
    columns = [(name, [escape(row.get(name, "")) for row in chosen]) for name in header]
    print_all(
        grid(columns, title=f"{len(chosen)} runs to be measured"),
        facts([("a wrong link model", f"at most {percent(min(1.0, found.error_bound))} likely")]),
    )
    if found.alike:
        print_all("no run can tell apart, line by line:")
    for group in _groups(found.alike):
        print_plain("  " + " | ".join(map(_line, group)))


def _groups(alike: Sequence[tuple[pj.Links, pj.Links]]) -> list[list[pj.Links]]:
    """Join pairs of candidates that predict the same."""
    groups: list[list[pj.Links]] = []
    for one, other in alike:  # sorted: whoever is alike is so with the first of its group
        group = next((group for group in groups if one in group), None)
        if group is None:
            groups.append([one, other])
        elif other not in group:
            group.append(other)
    return groups
