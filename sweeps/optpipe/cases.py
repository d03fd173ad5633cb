"""Problems of the comparison with OptPipe (arXiv 2510.05186), and the methods that solve them.

Times are those of published GPT models. A memory limit counts in peaks of 1F1B, which are P
activations; the speed of a host link in forwards, which is how long an offload or a load lasts.
Interleaved schedules have two stages per worker: half the layers, times and sizes each.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.analysis import activation_memory
from pipejax.results import Found, Optimum
from sweeps.published.zero_bubble_tables import MODELS, PROFILES

NO_LINK = math.inf  # time of an offload where there is no host link
SHARES = (0.5, 1.0)  # of the activations that PipeOffload moves: PO-H and PO-F of its source
LOOPS = 2  # stages per worker of interleaved schedules
OWN, SHARED = "own", "pairs"  # a host link for each worker, or one for two neighbours
NOTHING = 1e-6  # share of a whole backward that its W takes: no op of a plan lasts 0
ROUNDING = 1e-9  # relative: sums of times and sizes closer than this are equal


class Pipe(NamedTuple):
    """A model cut into stages, one per worker.

    Attributes:
      model: one of `MODELS`.
      workers: P.
      profiled: number of microbatches of the run that its times were taken in.
      whole: whether a backward is one op: I lasts as long as I and W, and W next to nothing.

    Example:
      >>> pipe = Pipe("6.2B", 8, 24)
      >>> pipe.label, pipe.times["W"]
      ('6.2B, P=8', 0.019927)
    """

    model: str
    workers: int
    profiled: int
    whole: bool = False

    @property
    def label(self) -> str:
        """Name in datasets."""
        return f"{self.model}, P={self.workers}"

    @property
    def times(self) -> dict[str, float]:
        """Seconds of F, I and W of a microbatch on a stage."""
        profile = PROFILES[self.model, self.profiled]
        backward = {"I": profile.input_grad / 1e3, "W": profile.weight_grad / 1e3}
        if self.whole:
            both = sum(backward.values())
            backward = {"I": both * (1 - NOTHING), "W": both * NOTHING}
        return {"F": profile.forward / 1e3, **backward}

    @property
    def message(self) -> float:
        """Seconds of a message."""
        return PROFILES[self.model, self.profiled].message / 1e3

    @property
    def weight_share(self) -> float:
        """Share of an activation that W needs after I; none where they are one op."""
        return 0.0 if self.whole else MODELS[self.model].weight_share


class Setting(NamedTuple):
    """A problem: what runs, in how much memory, beside which host link.

    Attributes:
      pipe: model and workers.
      microbatches: M.
      limit: activations that a worker may hold, in peaks of 1F1B.
      host_link: time of an offload and of a load, in forwards; `NO_LINK` if there is none.
      sharing: `OWN`, or `SHARED` where workers 0 and 1, 2 and 3, ... sit behind one switch.

    Example:
      >>> Setting(Pipe("1.5B", 8, 24), 16, 0.5, NO_LINK).activations
      4.0
    """

    pipe: Pipe
    microbatches: int
    limit: float
    host_link: float
    sharing: str = OWN

    @property
    def activations(self) -> float:
        """The limit in activations."""
        return self.limit * self.pipe.workers

    @property
    def work(self) -> float:
        """Seconds that every worker computes."""
        return self.microbatches * sum(self.pipe.times.values())

    @property
    def has_link(self) -> bool:
        """Return whether activations can go to the host."""
        return math.isfinite(self.host_link)

    @property
    def offload(self) -> float | None:
        """Seconds of an offload and of a load; None if there is no link."""
        return self.host_link * self.pipe.times["F"] if self.has_link else None

    @property
    def words(self) -> str:
        """All of it, for people and as a key."""
        link = f"offload in {self.host_link:g} F" if self.has_link else "no host link"
        link += ", link shared by two" if self.sharing == SHARED else ""
        return f"{self.pipe.label}, M={self.microbatches}, limit {self.limit:g}, {link}"

    @property
    def links(self) -> pj.Links:
        """Return the workers that share a host link."""
        pairs = range(0, self.pipe.workers - 1, 2) if self.sharing == SHARED else ()
        return pj.Links(host_links=[[worker, worker + 1] for worker in pairs])

    def costs(self, table: pj.ScheduleTable) -> pj.Costs:
        """Price a table.

        Args:
          table: its stages divide the times of their worker evenly.

        Returns:
          Its costs [s].
        """
        part = self.pipe.workers / table.num_stages
        times = self.pipe.times
        return pj.Costs.uniform(
            table,
            forward=part * times["F"],
            input_grad=part * times["I"],
            weight_grad=part * times["W"],
            transfer=self.pipe.message,
            offload=part * (self.offload or 0.0),
        )

    def plan(self, name: str, loops: int = 1, **options: Any) -> pj.ScheduleTable:
        """Build a schedule that is planned for these times.

        Args:
          name: of the builder.
          loops: stages per worker.
          options: of the builder, besides times.

        Returns:
          The table.
        """
        return self.build(
            name,
            weight_share=self.pipe.weight_share,
            transfer=self.pipe.message,
            slots={letter: time / loops for letter, time in self.pipe.times.items()},
            **options,
        )

    def build(self, name: str, **options: Any) -> pj.ScheduleTable:
        """Build a schedule for this number of workers and microbatches.

        Args:
          name: of the builder.
          options: of the builder.

        Returns:
          The table.
        """
        return pj.schedules.build(
            name, num_workers=self.pipe.workers, num_microbatches=self.microbatches, **options
        )


def _one_f_one_b(setting: Setting) -> Iterator[pj.ScheduleTable]:
    yield setting.build("1f1b")


def _interleaved(setting: Setting) -> Iterator[pj.ScheduleTable]:
    yield setting.build("interleaved-1f1b", stages_per_worker=LOOPS)


def _planned(name: str) -> Callable[[Setting], Iterator[pj.ScheduleTable]]:
    """One of the zero-bubble heuristics, planned for the times."""

    def tables(setting: Setting) -> Iterator[pj.ScheduleTable]:
        yield setting.plan(name)

    return tables


def _pipe_offload(setting: Setting, loops: int = 1) -> Iterator[pj.ScheduleTable]:
    """PO-H and PO-F on all orders of the source; without a host link all stays where it is."""
    workers = setting.pipe.workers
    groups = (workers, workers // 2, 1) if loops > 1 else (workers,)
    for group, part in itertools.product(groups, SHARES if setting.has_link else (0.0,)):
        yield setting.plan(
            "pipe-offload",
            loops,
            stages_per_worker=loops,
            group_size=group,
            offload_share=part,
            offload=None if setting.offload is None else setting.offload / loops,
            host_links=setting.links.host_links,
        )


def _ada_offload(setting: Setting) -> Iterator[pj.ScheduleTable]:
    yield setting.plan(
        "ada-offload",
        memory_limit=setting.activations,
        offload=setting.offload,
        host_links=setting.links.host_links,
    )


WHOLE = "pipe-offload, whole"  # its backwards are one op, in tables and in runs
METHODS: Mapping[str, Callable[[Setting], Iterator[pj.ScheduleTable]]] = {
    "1f1b": _one_f_one_b,
    "1f1b, interleaved": _interleaved,
    "zb-1p": _planned("zb-1p"),
    "zb-2p": _planned("zb-2p"),
    "pipe-offload": _pipe_offload,
    "pipe-offload, interleaved": functools.partial(_pipe_offload, loops=LOOPS),
    "ada-offload": _ada_offload,
    WHOLE: _pipe_offload,
}
OPTIMUM, OPTIMUM_INTERLEAVED = "optimum", "optimum, interleaved"
OPTIMA: Mapping[str, int] = {OPTIMUM: 1, OPTIMUM_INTERLEAVED: LOOPS}  # with stages per worker
INTERLEAVED = tuple(name for name in METHODS if "interleaved" in name)
OF_LIMIT = ("ada-offload",)  # methods whose tables depend on the limit


def run(setting: Setting, table: pj.ScheduleTable) -> pj.Evaluation:
    """Run a table at the times of a setting.

    Args:
      setting: gives the times.
      table: any.

    Returns:
      The run.
    """
    return pj.evaluate(table, setting.costs(table), link=setting.links)


def measured(setting: Setting, table: pj.ScheduleTable) -> dict[str, Any]:
    """Measure a schedule.

    Args:
      setting: gives the times.
      table: its stages divide the activation of their worker evenly.

    Returns:
      makespan [s], peak (the most activations that a worker holds), offloaded (activations).
    """
    done, size = run(setting, table), setting.pipe.workers / table.num_stages
    held = activation_memory(done, sizes=size, weight_share=setting.pipe.weight_share)
    moved = int((table.cells.phase == pj.Phase.O).sum())
    return {"makespan": done.makespan, "peak": float(held.peak.max()), "offloaded": size * moved}


@functools.cache
def _tried(setting: Setting, method: str) -> Sequence[dict[str, Any]]:
    at = setting._replace(pipe=setting.pipe._replace(whole=method == WHOLE))
    return [measured(at, table) for table in METHODS[method](at)]


def by_method(setting: Setting, method: str) -> dict[str, Any]:
    """Measure a method: the fastest of its schedules that fit.

    Args:
      setting: the problem.
      method: one of `METHODS`.

    Returns:
      As `measured`, and out_of_memory: whether none fits; then it is the one that needs least,
      without a makespan.
    """
    same = setting if method in OF_LIMIT else setting._replace(limit=math.inf)
    tries = _tried(same, method)
    limit = setting.activations * (1 + ROUNDING)
    fitting = [attempt for attempt in tries if attempt["peak"] <= limit]
    if fitting:
        best = min(fitting, key=lambda attempt: float(attempt["makespan"]))
        return {**best, "out_of_memory": False}
    least = min(tries, key=lambda attempt: float(attempt["peak"]))
    return {**least, "makespan": np.nan, "out_of_memory": True}


def solutions(
    setting: Setting, effort: float, loops: int = 1, **options: Any
) -> list[Found[Optimum]]:
    """Optimise on one thread, where the same effort finds the same whatever else is computed.

    Args:
      setting: the problem.
      effort: of the search, in about the seconds of one idle core.
      loops: stages per worker; the search of several begins at an interleaved PipeOffload.
      options: of `optimize`.

    Returns:
      Better and better solutions.
    """
    table = setting.build("1f1b") if loops == 1 else _interleaved_start(setting)
    better: list[Found[Optimum]] = []
    pj.optimize(
        table,
        setting.costs(table),
        memory_limit=setting.activations,
        sizes=1 / loops,
        weight_share=setting.pipe.weight_share,
        offload=setting.has_link,
        link=setting.links,
        effort=effort,
        time_limit=math.inf,
        on_best=better.append,
        **options,
    )
    return better


def _interleaved_start(setting: Setting) -> pj.ScheduleTable:
    """The fastest interleaved schedule that fits, or one that needs least."""

    def rank(table: pj.ScheduleTable) -> tuple[float, float]:
        result = measured(setting, table)
        excess = max(0.0, result["peak"] - setting.activations * (1 + ROUNDING))
        return excess, float(result["makespan"])

    return min((table for name in INTERLEAVED for table in METHODS[name](setting)), key=rank)


def optimum(setting: Setting, effort: float, loops: int = 1) -> dict[str, Any]:
    """Optimise and measure what came out.

    Args:
      setting: the problem.
      effort: of the search.
      loops: stages per worker.

    Returns:
      As `by_method`, with lower_bound [s], status, source, seconds (of one idle core, that is
      effort), and news: those seconds and makespan of each schedule that was better than the one
      before.
    """
    news: list[tuple[float, float]] = []
    for last in solutions(setting, effort, loops):
        if not news or last.value < news[-1][1] * (1 - ROUNDING):
            news.append((last.best.effort, last.value))
    return {
        **measured(setting, last.best.table),
        "out_of_memory": False,
        "lower_bound": last.lower_bound,
        "status": last.best.status,
        "source": last.best.source,
        "seconds": last.best.effort,
        "news": news,
    }
