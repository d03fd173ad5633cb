"""`pipejax train`: how fast a small objective is trained along a timeline."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import one_of
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.objective import ObjectiveOptions, choose_step_sizes
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.tables import TableChoice, told
from pipejax.cli.options.values import Count, CountIfGiven, Text
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output, drawing, write_dataset
from pipejax.cli.output.kinds import DRAWING, DRAWING_OR_DATASET
from pipejax.cli.output.progress import waiting
from pipejax.cli.output.report import grid, pick

if TYPE_CHECKING:
    from pipejax.training.training_run import Masked

REPORTS = ("gap", "value", "loss")  # fields of a summary
SPOKEN = {"gap": "gap", "value": "f", "loss": "training loss"}
LABELS = {"gap": "gap $f - f^*$", "value": "objective $f$", "loss": "training loss"}
COLUMNS = 60  # of the bars in the terminal, at most
HEIGHTS = "▁▂▃▄▅▆▇█"


class TrainingOptions(NamedTuple):
    """What is run: along a timeline, or Randomized PipeDream.

    Attributes:
      rpd: --updates block updates with the delays of the table, or up to --delta.
      updates: a multiple of --times.
      delta: without a table; then --workers is the number of stages.
      step_sizes: powers of two from 2 / L down if not given.
      seeds: with seeds from 0.
      noise: on every coordinate of every block gradient.
      batch_order: epochs (if not given), cyclic or drawn; with --rpd drawn (if not given) or
        cyclic.
      rule: of the least final gap, of the least mean of its curve, or the largest stable one
        (final, mean, stable).
      report: the gap f - f*, the value f, or the training loss.
    """

    rpd: bool = False
    updates: CountIfGiven = None
    delta: CountIfGiven = None
    step_sizes: Text = None
    seeds: Count = 3
    times: Count = 100
    noise: float = 0.0
    batch_order: Text = None
    rule: str = "final"
    report: str = "gap"

    def chosen(self) -> "TrainingOptions":
        """Check what is chosen by name; orders depend on the method."""
        from pipejax.training.replays import ORDERS  # slow to import
        from pipejax.training.rpd import RANDOM_ORDERS
        from pipejax.training.training_run import RULES

        rule, report = one_of(self.rule, RULES, "--rule"), one_of(self.report, REPORTS, "--report")
        orders = RANDOM_ORDERS if self.rpd else ORDERS
        order = orders[0] if self.batch_order is None else self.batch_order
        order = one_of(order, orders, "--batch-order" + " with --rpd" * self.rpd)
        return self._replace(rule=rule, report=report, batch_order=order)

    @property
    def how(self) -> dict[str, Any]:
        """What both methods take."""
        return {"noise": self.noise, "batches": self.batch_order}


class Trained(NamedTuple):
    """The runs of a command, and what they are runs of."""

    runs: "pj.training.TrainingRun"
    summary: "pj.training.Summary"
    step_sizes: list[float]
    seeds: int
    named: dict[str, Any]
    unit: str | None
    report: str

    @property
    def curves(self) -> "Masked":
        """What is reported (step_sizes, samples), mean over the seeds."""
        curves: Masked = getattr(self.summary, self.report)
        return curves


class TrainingTask(NamedTuple):
    """What a command is asked to train, and how."""

    choice: TableChoice
    objectives: ObjectiveOptions
    pricing: Pricing | None
    links: pj.Links
    training: TrainingOptions

    @property
    def timed(self) -> dict[str, Any]:
        """What `--json` says where ops take times."""
        return {} if self.pricing is None else {"link": self.links.model}

    def table(self) -> "tuple[pj.ScheduleTable, pj.Costs | None]":
        """Return a table that updates weights, and what its ops cost."""
        table = self.choice.build()
        if not table.updates_within:
            raise ValueError(
                f"{table.name} is synchronous, no U cell updates its weights: train takes "
                "pipedream, pipedream-2bw, local-sgd, naive or a table with U cells"
            )
        return table, None if self.pricing is None else self.pricing.of(table)

    def run(
        self,
        sweep: "Callable[..., pj.training.TrainingRun]",
        objective: "pj.training.TrainingObjective",
        named: dict[str, Any],
        unit: str | None,
    ) -> Trained:
        """Run every step size with every seed, with a sign of life where a person sees it."""
        seeds = self.training.seeds
        sizes = choose_step_sizes(self.training.step_sizes, objective)
        named |= {"objective": self.objectives.name, "stages": objective.num_stages}
        named |= pick(self.training, "noise batch_order rule")
        line = f"compiling, and training {len(sizes) * seeds} runs side by side"
        with waiting(line):
            runs = sweep(objective, step_sizes=sizes, seeds=range(seeds), **self.training.how)
            summary = pj.training.summarise(runs, self.training.rule, sizes)
            return Trained(runs, summary, sizes, seeds, named, unit, self.training.report)


def train(
    choice: TableChoice,
    objectives: ObjectiveOptions,
    pricing: Pricing | None,
    links: pj.Links,
    training: TrainingOptions,
    out: Annotated[Output, DRAWING_OR_DATASET] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Train a small objective as pipedream, naive or any table with U cells does.

    Options:
      out: a picture (.png, .pdf, .svg), or all runs (.zarr).
      figure: beside the runs.

    Example:
      pipejax train -s pipedream -P 8 -M 800 --objective nesterov
    """
    task = TrainingTask(choice, objectives, pricing, links, training.chosen())
    trained = _randomized(task) if training.rpd else _timeline(task)
    for output in (out, figure):
        if output.path is not None:
            (_save if output.path.suffix == ".zarr" else _draw)(output, trained)
    return Answer(_as_json(trained), _said(trained), {"written to": out, "drawn to": figure})


def _timeline(task: TrainingTask) -> Trained:
    for name in ("updates", "delta"):
        if getattr(task.training, name) is not None:
            raise ValueError(f"--{name} needs --rpd")
    table, costs = task.table()
    sweep = partial(
        pj.training.sweep_replay,
        table=table,
        costs=costs,
        times=task.training.times,
        link=task.links,
    )
    named = {"method": "timeline", **_table(table), **task.timed}
    objective = task.objectives.make(table.num_stages)
    return task.run(sweep, objective, named, "slots" if task.pricing is None else "s")


def _randomized(task: TrainingTask) -> Trained:
    choice, updates, delta = task.choice, task.training.updates, task.training.delta
    times = task.training.times
    if updates is None:
        raise ValueError("--rpd needs --updates")
    if updates % times:
        raise ValueError(f"--updates must be a multiple of --times {times}, got {updates}")
    law: dict[str, Any]
    named: dict[str, Any]
    if delta is None:
        if not choice.is_given:
            raise ValueError(
                "--rpd needs --delta with --workers, or a table whose delays it takes: --schedule "
                "or --table"
            )
        table, costs = task.table()
        law = {"delays": pj.staleness(table, costs, link=task.links).delays}
        stages, named = table.num_stages, {**_table(table), "delta": None, **task.timed}
    else:
        stages = _stages_of_delta(choice, task.pricing, task.links)
        law, named = {"delta": delta}, {"schedule": None, "delta": delta}
    sweep = partial(
        pj.training.sweep_randomized_pipedream, updates=updates, every=updates // times, **law
    )
    return task.run(sweep, task.objectives.make(stages), {"method": "rpd", **named}, None)


def _stages_of_delta(choice: TableChoice, pricing: Pricing | None, links: pj.Links) -> int:
    """Return the number of stages of a run that has no table; nothing else may say one."""
    own = pick(choice, "schedule table microbatches")
    stray = {flag(name): value for name, value in own.items()}
    stray |= {told(name): value for name, value in choice.options.options.items()}
    for given, value in stray.items():
        if value is not None:
            raise ValueError(f"{given} does not go with --delta: delays come from one of them")
    if pricing is not None:
        raise ValueError("times do not go with --delta: they decide the delays of a table")
    if links != pj.Links():
        raise ValueError("--link and what belongs to it have no effect with --delta")
    if choice.workers is None:
        raise ValueError("--delta needs --workers, the number of stages")
    return choice.workers


def _table(table: pj.ScheduleTable) -> dict[str, Any]:
    return {"schedule": table.name, "microbatches": table.num_microbatches}


def _as_json(trained: Trained) -> dict[str, Any]:
    """Collect what `--json` prints; null wherever a seed diverged."""
    found, runs = trained.summary, trained.runs
    best = found.best
    means = pick(found, "gap value loss")
    return {
        **trained.named,
        **pick(trained, "seeds step_sizes"),
        **pick(found, "final_gap spread diverged"),
        "best_step_size": None if best is None else trained.step_sizes[best],
        "unit": trained.unit,
        "time": runs.time,
        "updates": runs.update,
        **{name: None if best is None else mean[best] for name, mean in means.items()},
    }


def _said(trained: Trained) -> Iterator[object]:
    found, named = trained.summary, trained.named
    schedule = named["schedule"]
    what = {
        "timeline": f"[bold]{escape(schedule or '')}[/]",
        "rpd": "[bold]Randomized PipeDream[/], "
        + (f"delays of {escape(schedule)}" if schedule else f"delta {named['delta']}"),
    }[named["method"]]
    end = trained.runs.update[-1] if trained.runs.time is None else trained.runs.time[-1]
    yield (
        f"{what}, {named['stages']} stages, {named['objective']}, {end:.6g} "
        f"{trained.unit or 'block updates'}, seeds: {trained.seeds}"
    )
    yield _by_step_size(trained)
    if found.best is None:
        why = "every step size diverged" if found.diverged.all() else "no step size is stable"
        yield f"{why}: give smaller --step-sizes"
        return
    curve = trained.curves[found.best].compressed()
    over = "block updates" if trained.unit is None else "time"
    ends = f"{curve[0]:.4g} to {curve[-1]:.4g}"
    yield f"{SPOKEN[trained.report]} of the best over {over}, logarithmic: {ends}"
    yield f"[cyan]{_bars(curve)}[/]"
    sizes, best = trained.step_sizes, trained.step_sizes[found.best]
    if len(sizes) > 1 and best in (min(sizes), max(sizes)):
        end = "smallest" if best == min(sizes) else "largest"
        yield f"the best is the {end} of the step sizes: one beyond it may be better"


def _by_step_size(trained: Trained) -> Table:
    found, final = trained.summary, trained.curves[:, -1]
    sizes, counts = trained.step_sizes, found.diverged.astype(int).tolist()
    best = [place == found.best for place in range(len(sizes))]
    spreads = [
        "-" if count or np.ma.is_masked(spread) else f"{spread:.2g}"
        for count, spread in zip(counts, found.spread, strict=True)
    ]
    ends = ["diverged" if c else f"{end:.4g}" for c, end in zip(counts, final, strict=True)]
    columns: list[tuple[str, Iterable[object]]] = [
        ("step size", [f"{size:g}" for size in sizes]),
        (f"final {SPOKEN[trained.report]}", ends),
        ("spread", spreads),
        ("diverged", [f"{count} of {trained.seeds}" for count in counts]),
        ("chosen", ["best" * is_best for is_best in best]),
    ]
    return grid(columns, styles=["bold green" * is_best for is_best in best])


def _bars(curve: Float[NumpyArray, " samples"]) -> str:
    """Heights of the logarithm of a curve, over what it covers; the lowest where it is no more."""
    chosen = curve[np.linspace(0, len(curve) - 1, min(COLUMNS, len(curve))).round().astype(int)]
    above = chosen[chosen > 0]
    if not len(above):
        return HEIGHTS[0] * len(chosen)
    depth = np.log(np.maximum(chosen, above.min()))
    reach = float(np.ptp(depth)) or 1.0
    height = (depth - depth.min()) / reach * (len(HEIGHTS) - 1)
    return "".join(HEIGHTS[round(float(each))] for each in height)


def _save(out: Output, trained: Trained) -> None:
    from pipejax.training.training_run import training_dataset

    seeds, named = range(trained.seeds), trained.named.items()
    attributes: Mapping[str, Any] = {k: v for k, v in named if v is not None}
    data = training_dataset(
        trained.runs, trained.step_sizes, seeds, unit=trained.unit, attributes=attributes
    )
    write_dataset(data, out)


def _draw(out: Output, trained: Trained) -> None:
    from pipejax.plots.charts import draw_curves  # matplotlib is an extra, slow to import

    schedule = trained.named["schedule"] or f"delta {trained.named['delta']}"
    way = "" if trained.named["method"] == "timeline" else "RPD, "
    runs, found = trained.runs, trained.summary
    clock = None if runs.time is None else f"time [{trained.unit or 'slots'}]"
    with drawing(out, 1, 3.2) as (_, axes):
        draw_curves(
            axes,
            runs.update if runs.time is None else runs.time,
            trained.curves,
            trained.step_sizes,
            diverged=found.diverged > 0,
            best=found.best,
            time_label=clock or "block updates",
            label=LABELS[trained.report],
        )
        axes.set_title(f"{way}{schedule}, {trained.named['stages']} stages", loc="left")
