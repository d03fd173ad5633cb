"""Problems of the comparison with OptPipe (arXiv 2510.05186), and the methods that solve them.

Times are those of published GPT models. A memory limit counts in peaks of 1F1B, which are P
activations; the speed of a host link in forwards, which is how long an offload or a load lasts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.analysis.activation_memory import activation_memory
from pipejax.analysis.evaluate import Evaluation
from pipejax.schedules.cells.ops import Phase
from pipejax.search.schedule.optimize import optimize
from pipejax.search.schedule.solution import Solution
from sweeps.zero_bubble_tables import MODELS, PROFILES

NO_LINK = math.inf  # time of an offload where there is no host link
SHARES = (0.5, 1.0)  # of the activations that PipeOffload moves: its selective and full variants
ROUNDING = 1e-9  # relative: sums of times and sizes closer than this are equal


class Pipe(NamedTuple):
    """A model cut into stages, one per worker.

    Attributes:
      model: one of `MODELS`.
      workers: P.
      profiled: number of microbatches of the run that its times were taken in.

    Example:
      >>> pipe = Pipe("6.2B", 8, 24)
      >>> pipe.label, pipe.times["W"]
      ('6.2B, P=8', 0.019927)
    """

    model: str
    workers: int
    profiled: int

    @property
    def label(self) -> str:
        """Name in datasets."""
        return f"{self.model}, P={self.workers}"

    @property
    def times(self) -> dict[str, float]:
        """Seconds of F, I and W of a microbatch on a stage."""
        found = PROFILES[self.model, self.profiled]
        return {"F": found.forward / 1e3, "I": found.input_grad / 1e3, "W": found.weight_grad / 1e3}

    @property
    def message(self) -> float:
        """Seconds of a message."""
        return PROFILES[self.model, self.profiled].message / 1e3

    @property
    def weight_share(self) -> float:
        """Share of an activation that W needs after I."""
        return MODELS[self.model].weight_share


class Setting(NamedTuple):
    """A problem: what runs, in how much memory, beside which host link.

    Attributes:
      pipe: model and workers.
      microbatches: M.
      limit: activations that a worker may hold, in peaks of 1F1B.
      host_link: time of an offload and of a load, in forwards; `NO_LINK` if there is none.

    Example:
      >>> Setting(Pipe("1.5B", 8, 24), 16, 0.5, NO_LINK).activations
      4.0
    """

    pipe: Pipe
    microbatches: int
    limit: float
    host_link: float

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
        """Whether activations can go to the host."""
        return math.isfinite(self.host_link)

    @property
    def offload(self) -> float | None:
        """Seconds of an offload and of a load; None if there is no link."""
        return self.host_link * self.pipe.times["F"] if self.has_link else None

    @property
    def words(self) -> str:
        """All of it, for people and as a key."""
        link = f"offload in {self.host_link:g} F" if self.has_link else "no host link"
        return f"{self.pipe.label}, M={self.microbatches}, limit {self.limit:g}, {link}"

    def costs(self, table: pj.ScheduleTable) -> pj.Costs:
        """Price a table.

        Args:
          table: with one stage per worker.

        Returns:
          Its costs [s].
        """
        times = self.pipe.times
        return pj.Costs.uniform(
            table,
            forward=times["F"],
            input_grad=times["I"],
            weight_grad=times["W"],
            transfer=self.pipe.message,
            offload=self.offload or 0.0,
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


def _planned(name: str) -> Callable[[Setting], Iterator[pj.ScheduleTable]]:
    """One of the zero-bubble heuristics, planned for the times."""

    def tables(setting: Setting) -> Iterator[pj.ScheduleTable]:
        yield setting.build(
            name,
            weight_share=setting.pipe.weight_share,
            slots=setting.pipe.times,
            transfer=setting.pipe.message,
        )

    return tables


def _pipe_offload(setting: Setting) -> Iterator[pj.ScheduleTable]:
    """Its selective and its full variant; without a host link all stays where it is."""
    for share in SHARES if setting.has_link else (0.0,):
        yield setting.build(
            "pipe-offload",
            offload_share=share,
            weight_share=setting.pipe.weight_share,
            transfer=setting.pipe.message,
            offload=setting.offload,
            slots=setting.pipe.times,
        )


def _ada_offload(setting: Setting) -> Iterator[pj.ScheduleTable]:
    yield setting.build(
        "ada-offload",
        memory_limit=setting.activations,
        weight_share=setting.pipe.weight_share,
        transfer=setting.pipe.message,
        offload=setting.offload,
        slots=setting.pipe.times,
    )


METHODS: Mapping[str, Callable[[Setting], Iterator[pj.ScheduleTable]]] = {
    "1f1b": _one_f_one_b,
    "zb-1p": _planned("zb-1p"),
    "zb-2p": _planned("zb-2p"),
    "pipe-offload": _pipe_offload,
    "ada-offload": _ada_offload,
}
OPTIMUM = "optimum"


def run(setting: Setting, table: pj.ScheduleTable) -> Evaluation:
    """Run a table at the times of a setting.

    Args:
      setting: gives the times.
      table: with one stage per worker.

    Returns:
      The run.
    """
    return pj.evaluate(table, setting.costs(table))


def measured(setting: Setting, table: pj.ScheduleTable) -> dict[str, Any]:
    """Measure a schedule.

    Args:
      setting: gives times and limit.
      table: with one stage per worker.

    Returns:
      makespan [s], peak (the most activations that a worker holds), offloaded (activations),
      out_of_memory: whether that is more than the limit.
    """
    done = run(setting, table)
    peak = float(activation_memory(done, weight_share=setting.pipe.weight_share).peak.max())
    return {
        "makespan": done.makespan,
        "peak": peak,
        "offloaded": int((table.cells.phase == Phase.O).sum()),
        "out_of_memory": peak > setting.activations * (1 + ROUNDING),
    }


def by_method(setting: Setting, method: str) -> dict[str, Any]:
    """Measure a method: the fastest of its schedules that fit.

    Args:
      setting: the problem.
      method: one of `METHODS`.

    Returns:
      As `measured`; where none fits, the one that needs least, without a makespan.
    """
    found = [measured(setting, table) for table in METHODS[method](setting)]
    fitting = [one for one in found if not one["out_of_memory"]]
    if fitting:
        return min(fitting, key=lambda one: float(one["makespan"]))
    return {**min(found, key=lambda one: float(one["peak"])), "makespan": np.nan}


def solutions(setting: Setting, seconds: float, **options: Any) -> Iterator[Solution]:
    """Optimise.

    Args:
      setting: the problem.
      seconds: time to spend, at most.
      options: of `optimize`.

    Returns:
      Better and better solutions.
    """
    table = setting.build("1f1b")
    return optimize(
        table,
        setting.costs(table),
        memory_limit=setting.activations,
        weight_share=setting.pipe.weight_share,
        offload=setting.has_link,
        time_limit=seconds,
        **options,
    )


def optimum(setting: Setting, seconds: float) -> dict[str, Any]:
    """Optimise and measure what came out.

    Args:
      setting: the problem.
      seconds: time to spend, at most.

    Returns:
      As `measured`, with lower_bound [s], status, source, seconds (of all), best_seconds (until
      the best schedule was found).
    """
    found = list(solutions(setting, seconds))
    last = found[-1]
    first_best = next(one for one in found if one.makespan <= last.makespan * (1 + ROUNDING))
    return {
        **measured(setting, last.table),
        "lower_bound": last.lower_bound,
        "status": last.status,
        "source": last.source,
        "seconds": last.seconds,
        "best_seconds": first_best.seconds,
    }
