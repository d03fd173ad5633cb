"""`pipejax calibrate` on runs of links: which link model a machine follows."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.values import CountIfGiven, Text, parse_seconds
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import Output
from pipejax.cli.output.numbers import percent
from pipejax.cli.output.progress import waiting
from pipejax.cli.output.report import facts, grid, pick, plain

if TYPE_CHECKING:
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


def find_links(file: Path, choice: LinkChoice, out: Output) -> Answer:
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
        return _design(rows, design, extra, NOISE if time_noise is None else time_noise, out)
    with waiting("links: running all candidates"):
        found = pj.links.identify_links([run for _, run in rows], noise=time_noise, by_pair=by_pair)
    out.save_json(link_options(found.links))
    result = _as_json(rows, found)
    return Answer(result, _said(rows, found, result), {"wrote the links to": out})


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
        **pick(found, "told_apart explains noise"),
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


def _said(rows: "Rows", found: "LinkIdentification", result: Mapping[str, Any]) -> Iterator[object]:
    measured = np.array([run.seconds for _, run in rows])
    left = np.abs(np.log(measured / found.fits[0].predicted))
    worst = int(left.argmax())
    yield f"[bold]{_line(found.links)}[/]"
    yield (
        f"  leaves {percent(found.fits[0].rms)} of {len(rows)} step times (root mean square), at "
        f"most {percent(float(left[worst]))}, in row {worst + 1}"
    )
    if not found.explains:
        yield (
            f"  that is more than noise of {percent(found.noise)}: no candidate explains these "
            "runs, whatever is best"
        )
    shown = result["candidates"][:SHOWN]
    columns: list[tuple[str, Iterable[object]]] = [
        ("candidate", [_line(fit.links) for fit in found.fits[:SHOWN]]),
        ("residual", [percent(each["residual"]) for each in shown]),
        ("verdict", [each["verdict"] for each in shown]),
    ]
    yield grid(columns)
    if found.fits[SHOWN:]:
        yield f"and {len(found.fits) - SHOWN} more candidates"
    if found.pairs:
        columns = [
            ("pair", result["pairs"]),
            ("link", [models[0] for models in found.pairs.values()]),
            ("or", [", ".join(models[1:]) for models in found.pairs.values()]),
        ]
        yield grid(columns, title="link models of pairs of workers")
    if found.told_apart:
        yield "these runs rule out every other candidate"
    else:
        yield "cannot be told apart from the best by these runs:"
    yield from (plain(f"  {_line(links)}") for links in found.alike[:SHOWN])
    if found.alike[SHOWN:]:
        yield f"and {len(found.alike) - SHOWN} more"


def _design(rows: "Rows", count: int, delay: float | None, noise: float, out: Output) -> Answer:
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
    out.save_text(text)
    groups = _groups(found.alike)
    result = {
        "runs": chosen,
        "error_bound": found.error_bound,
        "alike": [[link_options(each) for each in group] for group in groups],
    }
    columns = [(name, [escape(row.get(name, "")) for row in chosen]) for name in header]
    said = [
        grid(columns, title=f"{len(chosen)} runs to be measured"),
        facts([("a wrong link model", f"at most {percent(min(1.0, found.error_bound))} likely")]),
        *["no run can tell apart, line by line:"] * bool(groups),
        *(plain("  " + " | ".join(map(_line, group))) for group in groups),
    ]
    return Answer(result, said, {"wrote the runs to": out})


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
