"""Options that commands share: which table, at what costs, over which links."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pipejax.cli.options.activations import WeightShare, choose_activations
from pipejax.cli.options.numbers import parse_seconds, parse_times
from pipejax.cli.options.objective import choose_objective
from pipejax.cli.options.schedule import OF_RUNS, TableOptions, choose_options
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import LINKS, QUEUES, Links, parse_groups
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import read_table

if TYPE_CHECKING:
    from pipejax.costs.costs import Costs
    from pipejax.costs.system import System
    from pipejax.costs.workload import Workload


Text = str | None
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


class Pricing(NamedTuple):
    """How tables are priced; `of` gives the costs of one."""

    of: "Callable[[ScheduleTable], Costs]"
    workload: "Workload | None"
    system: "System | None"


class TableChoice(NamedTuple):
    """Which table options ask for: none of the options may be there."""

    schedule: Text
    file: Text
    workers: int | None
    microbatches: int | None
    options: TableOptions
    pricing: Pricing | None = None

    @property
    def is_given(self) -> bool:
        """Whether an option names a table."""
        return self.schedule is not None or self.file is not None

    def build(self) -> ScheduleTable:
        """Build or read the table.

        Raises:
          ValueError: if the options do not name one table.
        """
        if (self.schedule is None) == (self.file is None):
            raise ValueError(
                "give either --schedule with --workers and --microbatches, or --table FILE"
            )
        given = {"--workers": self.workers, "--microbatches": self.microbatches}
        if self.file is not None:
            extra = [name for name, value in given.items() if value is not None]
            extra += [
                f"--{name.replace('_', '-')}"
                for name in self.options.options
                if name not in OF_RUNS
            ]
            if extra:
                raise ValueError(f"{extra[0]} belongs to --schedule: a table file states it itself")
            return read_table(self.file)
        missing = [name for name, value in given.items() if value is None]
        if self.workers is None or self.microbatches is None or self.schedule is None:
            raise ValueError(f"--schedule needs {missing[0]}")
        costs_of = None if self.pricing is None else self.pricing.of
        return self.options.build(self.schedule, self.workers, self.microbatches, costs_of)


def choose_choice(
    *,
    schedule: Annotated[
        Text, typer.Option(help="Schedule to build, see `pipejax schedules`.")
    ] = None,
    table: Annotated[
        Text, typer.Option(help="Table to read: PyTorch's schedule CSV, or JSON.", metavar="FILE")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers P.", min=1)] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches M.", min=1)] = None,
    options: TableOptions,
    pricing: Pricing | None = None,
) -> TableChoice:
    """Read which table is meant, for commands that may do without."""
    return TableChoice(schedule, table, workers, microbatches, options, pricing)


@functools.wraps(choose_choice)
def choose_table(**given: Any) -> ScheduleTable:
    """Build or read the table."""
    return choose_choice(**given).build()


def choose_costs(
    *,
    stage_times: Annotated[
        Text, typer.Option(help="Seconds per op of one stage: F=1,B=2 or F=1,I=1,W=1.")
    ] = None,
    worker_times: Annotated[
        Text, typer.Option(help="Seconds of one microbatch on one worker, divided over its stages.")
    ] = None,
    model: Annotated[Text, typer.Option(help="Model: a name or a JSON file.")] = None,
    system: Annotated[Text, typer.Option(help="System: a name or a JSON file.")] = None,
    minibatch: Annotated[
        int | None, typer.Option(help="Sequences per step and pipeline, with --model.", min=1)
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Accelerators per worker, with --model.", min=1)
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split norms and messages over them too.")
    ] = False,
    data_parallel: Annotated[
        int | None, typer.Option(help="Replicas of the pipeline, with --model.", min=1)
    ] = None,
    recompute: Annotated[
        Text, typer.Option(help="Recomputation, with --model: none, selective or full.")
    ] = None,
    weight_share: WeightShare = None,
    comm: Annotated[
        Text, typer.Option(help="Seconds of a message: latency 0, this transmit time.")
    ] = None,
    latency: Annotated[Text, typer.Option(help="Latency of a message in seconds.")] = None,
    transmit: Annotated[Text, typer.Option(help="Transmit time of a message in seconds.")] = None,
    costs: Annotated[
        Text, typer.Option(help="Measured costs: a JSON file.", metavar="FILE")
    ] = None,
) -> Pricing | None:
    """Read how ops and messages are priced; None if no option says so."""
    from pipejax.costs.costs import Costs
    from pipejax.costs.measured import read_costs

    message = _parse_message(comm, latency, transmit)
    with_model: dict[str, Any] = {
        "--system": system,
        "--minibatch": minibatch,
        "--tensor-parallel": tensor_parallel,
        "--sequence-parallel": sequence_parallel or None,
        "--data-parallel": data_parallel,
        "--recompute": recompute,
    }
    ways = {
        "--stage-times": stage_times,
        "--worker-times": worker_times,
        "--costs": costs,
        "--model": model,
    }
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"{chosen[0]} and {chosen[1]} both give times: choose one")
    stray = [name for name, value in with_model.items() if value is not None]
    if stray and model is None:
        raise ValueError(f"{stray[0]} needs --model")
    if not chosen:
        if message:
            raise ValueError("message times need op times: give --stage-times or --worker-times")
        return None
    if model is not None:
        if message:
            raise ValueError(
                "--comm, --latency and --transmit do not go with --model: the "
                "system's links give message times"
            )
        given = {name[2:].replace("-", "_"): value for name, value in with_model.items()}
        return _price_model(model, weight_share=weight_share, **given)
    if costs is not None:
        if message:
            raise ValueError(
                "--comm, --latency and --transmit do not go with --costs: its file "
                "gives message times"
            )
        path = costs
        return Pricing(lambda table: read_costs(path, table), None, None)
    times = parse_times(stage_times or worker_times or "", chosen[0])
    try:
        of_stage = Costs(**times, **message)
        of_stage.check_known((Phase.F, Phase.B))  # what is wrong with them is said before any table
    except ValueError as error:
        raise ValueError(f"{chosen[0]} {stage_times or worker_times}: {error}") from None
    if stage_times is not None:
        return Pricing(lambda table: of_stage, None, None)
    return Pricing(lambda table: Costs.per_worker(table, **times, **message), None, None)


def _parse_message(comm: Text, latency: Text, transmit: Text) -> dict[str, float]:
    if comm is not None and (latency is not None or transmit is not None):
        raise ValueError(
            "--comm is latency 0 and a transmit time: give it, or --latency and --transmit"
        )
    if comm is not None:
        given: dict[str, tuple[str, Text]] = {"transmit": ("--comm", comm)}
    else:
        given = {"latency": ("--latency", latency), "transmit": ("--transmit", transmit)}
    return {
        field: parse_seconds(text, option)
        for field, (option, text) in given.items()
        if text is not None
    }


def _price_model(model: str, system: Text, minibatch: int | None, **others: Any) -> Pricing:
    from pipejax.costs.model import RECOMPUTE, load_model
    from pipejax.costs.roofline import stage_costs
    from pipejax.costs.system import load_system
    from pipejax.costs.workload import Workload

    if system is None or minibatch is None:
        raise ValueError(f"--model needs {'--system' if system is None else '--minibatch'}")
    given = {name: value for name, value in others.items() if value is not None}
    if given.get("recompute", "none") not in RECOMPUTE:
        raise ValueError(
            f"--recompute must be one of {', '.join(RECOMPUTE)}, got {given['recompute']!r}"
        )
    workload = Workload(load_model(model), minibatch, **given)
    machine = load_system(system)
    return Pricing(lambda table: stage_costs(workload, machine, table), workload, machine)


Queues = Annotated[
    str, typer.Option(help=f"Queues under rendezvous, else unused: {', '.join(QUEUES)}.")
]
HostLinks = Annotated[
    Text, typer.Option(help="Workers that share a host link for O and L, as 0+1,2+3.")
]


def choose_links(
    *,
    link: Annotated[str, typer.Option(help=f"Link model: {', '.join(LINKS)}.")] = "delay",
    queues: Queues = "worker",
    host_links: HostLinks = None,
) -> Links:
    """Read the link model and what is shared."""
    for option, value, known in (("link", link, LINKS), ("queues", queues, QUEUES)):
        if value not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}, got {value!r}")
    return Links(
        link, queues, () if host_links is None else parse_groups(host_links, "--host-links")
    )


def choose_rendezvous(*, queues: Queues = "worker", host_links: HostLinks = None) -> Links:
    """Read what is shared, for commands that know no other link model."""
    return choose_links(link="rendezvous", queues=queues, host_links=host_links)


_GROUPS: dict[str, Callable[..., Any]] = {
    "options": choose_options,
    "table": choose_table,
    "choice": choose_choice,
    "objectives": choose_objective,
    "pricing": choose_costs,
    "links": choose_links,
    "rendezvous": choose_rendezvous,
    "activations": choose_activations,
}
_TABLES = ("table", "choice")  # groups of which `table` is an option
_INPUTS = ("options", "pricing")  # groups that those are made from


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of every group that it takes as an argument.

    A command declares groups, such as `table`, `options`, `pricing` or `links`, as arguments and
    receives what the group's options choose. An argument that is a named tuple of options is a
    group too; every other argument is an option of its own. Where it has the name of a group's
    option, it is the command that reads it.

    Args:
      command: function of the command.

    Returns:
      The function that typer sees, with all options in its signature.
    """
    wanted = inspect.signature(command).parameters
    makers: dict[str, Callable[..., Any]] = {
        name: p.annotation for name, p in wanted.items() if hasattr(p.annotation, "_fields")
    } | _GROUPS
    groups = [
        name
        for name in makers
        if name in wanted or (name == "options" and any(group in wanted for group in _TABLES))
    ]
    shared: dict[str, inspect.Parameter] = {}
    for group in sorted(groups, key=lambda name: name == "options"):  # --schedule comes first
        shared |= {
            name: parameter
            for name, parameter in inspect.signature(makers[group]).parameters.items()
            if name not in makers or (name == "table" and group in _TABLES)
        }
    own = {name: parameter for name, parameter in wanted.items() if name not in makers}

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        chosen: dict[str, Any] = {}
        for group in sorted(groups, key=lambda name: name not in _INPUTS):
            takes = inspect.signature(makers[group]).parameters
            inputs = {
                name: chosen.get(name) if name in _INPUTS else given[name]
                for name in takes
                if name not in own
            }
            chosen[group] = makers[group](**inputs)
        arguments = {name: chosen[name] for name in groups if name in wanted}
        return command(**arguments, **{name: given[name] for name in own})

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in {**shared, **own}.values()
    ]
    described: Any = run
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def required(pricing: Pricing | None) -> Pricing:
    """Return the pricing, or say which options give it.

    Raises:
      ValueError: if there is none.
    """
    if pricing is None:
        raise ValueError(
            "times are missing: give --stage-times F=1,B=2, --worker-times F=1,B=2, --costs FILE "
            "or --model NAME --system NAME --minibatch N"
        )
    return pricing


def or_slots(pricing: Pricing | None, table: ScheduleTable) -> "Costs":
    """Return the costs, or the table's own slots where no option gives times."""
    from pipejax.costs.measured import slot_costs

    return slot_costs(table) if pricing is None else pricing.of(table)
