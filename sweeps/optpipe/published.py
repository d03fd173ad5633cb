"""The searched zero-bubble schedules of the paper against an optimum in the same memory.

Idle shares are those in a worker's own span, as printed there: steps may overlap. Pipes with more
than 16 workers, or 2,000 microbatches on all of them, are left to the heuristics of this package:
a search of a few seconds adds nothing to those.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

from pipejax.schedules import LimitedPipe, zero_bubble_starts
from sweeps.kit.journal import Journal, Record
from sweeps.optpipe.cases import NO_LINK, Pipe, Setting, solutions
from sweeps.published.zero_bubble_tables import MODELS, PROFILES, SEARCHED

EFFORT = 2.0  # of a row, at most
LARGEST = 2000  # stages times microbatches that are searched


class Row(NamedTuple):
    """A printed figure.

    Attributes:
      setting: model, microbatches and limit of P or 2P activations.
      schedule: one of `SEARCHED`.
      published: idle share in a worker's own span.

    Example:
      >>> next(rows()).words
      '1.5B, M=24, ZB-1p'
    """

    setting: Setting
    schedule: str
    published: float

    @property
    def words(self) -> str:
        """All of it as a label."""
        return f"{self.setting.pipe.model}, M={self.setting.microbatches}, {self.schedule}"


def rows(small: bool = False) -> Iterator[Row]:
    """List the printed figures.

    Args:
      small: whether to keep the first one only.

    Yields:
      The figures.
    """
    for (model, microbatches), profile in PROFILES.items():
        pipe = Pipe(model, MODELS[model].workers, microbatches)
        for limit, (schedule, published) in enumerate(
            zip(SEARCHED, profile.searched, strict=True), start=1
        ):
            if published is not None:
                yield Row(Setting(pipe, microbatches, float(limit), NO_LINK), schedule, published)
            if small:
                return


def sweep(journal: Journal, effort: float, small: bool = False) -> xr.Dataset:
    """Solve every row that is not in the journal.

    Args:
      journal: results so far.
      effort: of each solve.
      small: whether to solve the first row only.

    Returns:
      The dataset, one entry along `row` for every printed figure.
    """
    asked = list(rows(small))
    records = [
        journal.once(row.words, partial(_solved, row, min(effort, EFFORT)))
        for row in track(asked, "published", console=Console(stderr=True))
    ]
    fields = {name: ("row", [record[name] for record in records]) for name in records[0]}
    settings = [row.setting for row in asked]
    return xr.Dataset(
        {"published": ("row", [row.published for row in asked]), **fields},
        coords={
            "row": [row.words for row in asked],
            "model": ("row", [setting.pipe.model for setting in settings]),
            "workers": ("row", [setting.pipe.workers for setting in settings]),
            "microbatches": ("row", [setting.microbatches for setting in settings]),
            "schedule": ("row", [row.schedule for row in asked]),
            "activations": ("row", [setting.activations for setting in settings]),
        },
        attrs={"title": "Idle share in a worker's own span: published searches and our optimum"},
    )


def _solved(row: Row, effort: float) -> Record:
    setting = row.setting
    if setting.pipe.workers * setting.microbatches > LARGEST:
        return _idle(setting, _heuristic_span(setting), 0.0, "zero-bubble", "feasible", np.nan)
    *_, last = solutions(setting, effort, objective="span")
    best = last.best
    return _idle(setting, last.value, last.lower_bound, best.source, best.status, best.effort)


def _idle(
    setting: Setting, span: float, bound: float, source: str, status: str, seconds: float
) -> Record:
    """Spans as idle shares; no span is shorter than its work."""
    bound = max(bound, setting.work)
    return {
        "ours": 1 - setting.work / span,
        "bound": 1 - setting.work / bound,
        "source": source,
        "status": status,
        "seconds": seconds,
    }


def _heuristic_span(setting: Setting) -> float:
    """Longest span of the zero-bubble heuristic."""
    pipe, times = setting.pipe, setting.pipe.times
    limited = LimitedPipe.from_numbers(
        pipe.workers,
        setting.microbatches,
        forward=times["F"],
        input_grad=times["I"],
        weight_grad=times["W"],
        there=pipe.message,
        limits=setting.activations,
        weight_share=pipe.weight_share,
    )
    ops = zero_bubble_starts(limited)
    return max(
        float(ops.end[ops.worker == worker].max() - ops.start[ops.worker == worker].min())
        for worker in range(pipe.workers)
    )
