"""Solutions that get better, and the gain of a job that trains on them meanwhile.

A job of N steps either begins on the first solution and takes a better one at the next step after
it is found; or waits until the search ends; or begins on the best that heuristics give and stays
there. The search runs beside it and costs it nothing. Its time is its effort: about the seconds of
one idle core, whatever else is computed.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

from sweeps.kit.journal import Journal, Record
from sweeps.optpipe.cases import NO_LINK, ROUNDING, Pipe, Setting, solutions

LONGER = 8.0  # than a solve of the grid is one whose solutions are followed
SETTINGS = (
    Setting(Pipe("1.5B", 4, 24), 8, 0.75, 1.0),
    Setting(Pipe("1.5B", 8, 24), 8, 0.75, 1.0),
    Setting(Pipe("1.5B", 8, 24), 16, 1.0, 2.0),
    Setting(Pipe("6.2B", 8, 24), 16, 0.5, 2.0),
)
SMALL = (Setting(Pipe("1.5B", 4, 24), 8, 0.5, NO_LINK),)
STEPS = tuple(int(n) for n in np.unique(np.geomspace(1, 1e5, 61).astype(int)))
SEARCHES = ("search", "neighbourhoods")  # sources that are no heuristics begin so
POLICIES = ("refine", "wait", "stay")


class News(NamedTuple):
    """A solution.

    Attributes:
      seconds: when it was found, of one idle core.
      makespan: of a step on it [s].
      lower_bound: known by then [s].
      source: what made it.

    Example:
      >>> News(0.5, 2.0, 1.5, "search").is_searched
      True
    """

    seconds: float
    makespan: float
    lower_bound: float
    source: str

    @property
    def is_searched(self) -> bool:
        """Return whether a search made it, not a heuristic."""
        return self.source.startswith(SEARCHES)


def sweep(journal: Journal, effort: float, small: bool = False) -> xr.Dataset:
    """Follow the solutions of every case that is not in the journal.

    Args:
      journal: results so far.
      effort: of each solve of the grid; these last `LONGER` times as long.
      small: whether to follow a tiny problem only.

    Returns:
      The dataset: one entry along `news` for every solution; time (case, policy, steps) until a job
      has done its steps [s].
    """
    asked = SMALL if small else SETTINGS
    records = [
        journal.once(setting.words, partial(_followed, setting, LONGER * effort))
        for setting in track(asked, "refinement", console=Console(stderr=True))
    ]
    news = [[News(*item) for item in record["news"]] for record in records]
    times = [
        job_times(solutions, record["seconds"], STEPS)
        for solutions, record in zip(news, records, strict=True)
    ]
    label = {"case": ("news", [k for k, solutions in enumerate(news) for _ in solutions])}
    columns = {
        name: (
            "news",
            [getattr(solution, name) for solutions in news for solution in solutions],
            units,
        )
        for name, units in (
            ("seconds", {"units": "s"}),
            ("makespan", {"units": "s"}),
            ("lower_bound", {"units": "s"}),
            ("source", {}),
        )
    }
    by_case = {
        name: ("case", [record[name] for record in records], {"units": "s"})
        for name in ("work", "bound")
    }
    last = np.array([solutions[-1].makespan for solutions in news])
    ended = {
        "gap": ("case", np.maximum(0, 1 - np.array(by_case["bound"][1]) / last), {"units": "1"}),
        "ended": ("case", [record["seconds"] for record in records], {"units": "s"}),
        "status": ("case", [record["status"] for record in records]),
    }
    job = (
        ("case", "policy", "steps"),
        np.array([[case_times[p] for p in POLICIES] for case_times in times]),
        {"units": "s"},
    )
    return xr.Dataset(
        {**columns, **by_case, **ended, "time": job, "of_case": label.pop("case")},
        coords={
            "case": [setting.words for setting in asked],
            "policy": list(POLICIES),
            "steps": list(STEPS),
        },
        attrs={"title": "Solutions that get better, and jobs that train on them"},
    )


def _followed(setting: Setting, effort: float) -> Record:
    better = solutions(setting, effort)
    news: list[News] = []
    for solution in better:
        # not where only the bound is new, or the last bit of a sum
        if not news or solution.value < news[-1].makespan * (1 - ROUNDING):
            news.append(
                News(
                    solution.best.effort, solution.value, solution.lower_bound, solution.best.source
                )
            )
    last = better[-1]
    return {
        "news": news,
        "seconds": last.best.effort,
        "bound": last.lower_bound,
        "status": last.best.status,
        "work": setting.work,
    }


def job_times(
    news: Sequence[News], ended: float, steps: Sequence[int]
) -> Mapping[str, Sequence[float]]:
    """Time until a job has done its steps, from the moment the search begins.

    Args:
      news: solutions, each better than the one before.
      ended: when the search ended [s].
      steps: N of each job.

    Returns:
      Seconds for each N, by policy.

    Example:
      >>> news = [News(1.0, 2.0, 0.0, "greedy"), News(4.0, 1.0, 0.0, "search")]
      >>> job_times(news, 6.0, [1, 2, 3])  # the better one waits for the end of a step
      {'refine': [3.0, 5.0, 6.0], 'wait': [7.0, 8.0, 9.0], 'stay': [3.0, 5.0, 7.0]}
    """
    by_heuristics = [item for item in news if not item.is_searched]
    start = by_heuristics[-1] if by_heuristics else news[0]
    return {
        "refine": [_refined(news, count) for count in steps],
        "wait": [ended + count * news[-1].makespan for count in steps],
        "stay": [start.seconds + count * start.makespan for count in steps],
    }


def _refined(news: Sequence[News], steps: int) -> float:
    """Seconds of a job that always takes the best solution there is when a step begins."""
    clock = news[0].seconds
    for solution, next_solution in itertools.pairwise(news):
        whole: Any = np.ceil((next_solution.seconds - clock) / solution.makespan)
        count = min(steps, max(0, int(whole)))
        clock += count * solution.makespan
        steps -= count
    return float(clock + steps * news[-1].makespan)
