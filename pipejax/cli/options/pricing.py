"""Options that say what ops and messages take: times, a file of costs, or a model on a system."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pipejax as pj
from pipejax.base.checks import MismatchError, resolve_choice
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.option import options
from pipejax.cli.options.pricing_steps import (
    CostsFile,
    GivenTimes,
    HostTimes,
    Machine,
    Microbatches,
    ModelCosts,
    OverlappedPairs,
    RecomputedAgain,
    ScaledTimes,
    SlowWorkers,
    Source,
    Step,
    TableSlots,
)
from pipejax.cli.options.values import (
    CountIfGiven,
    FileIfGiven,
    Text,
    WeightShare,
    parse_number,
    parse_times,
)
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS
from pipejax.schedules import Builder
from pipejax.schedules.cells.ops import SPLIT, STEP_END, TIMED

if TYPE_CHECKING:
    from pipejax.costs.topology import PlacedCosts


class Pricing(NamedTuple):
    """How tables are priced: a source of costs, and what is done to them, in this order."""

    source: Source  # gives the costs of a table, by level of the machine
    steps: tuple[Step, ...] = ()  # change them
    workload: "pj.Workload | None" = None  # where a model gives them
    system: "pj.System | None" = None  # the machine that it is on
    stack: str = ""  # the software, by name; empty for what the system's file takes for granted
    microbatches: Microbatches = Microbatches()  # what options say of microbatches that differ
    offloads: bool = False  # whether options say what it takes to offload
    # letters of ops that most tables have none of, and the option that gives their time
    rare: Mapping[str, str] = MappingProxyType({})
    stragglers: Mapping[int, float] = MappingProxyType({})  # factors of slow workers
    of_pairs: str = ""  # the option that says how fused pairs overlap
    machine: Machine = Machine()  # the nodes that workers sit on
    # of how many stages the table must be; what is scaled stage by stage is of no other
    of_places: int | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each worker on the machine; in order if none."""
        return self.machine.places

    def table_costs(self, table: pj.ScheduleTable) -> "pj.Costs":
        """Return the costs of a table, whose workers sit where options say."""
        if not self.machine.sizes:
            return self._levels(table)[0]
        from pipejax.costs.topology import places_on

        return self._placed(table).at(places_on(table, self.places, "--worker-places"))

    @property
    def placed(self) -> "Callable[[pj.ScheduleTable], PlacedCosts] | None":
        """What gives the costs of a table by where its workers sit, on a machine of nodes."""
        has_nodes = self.machine.sizes or (self.workload is not None and self.system is not None)
        return self._placed if has_nodes else None

    def _levels(self, table: pj.ScheduleTable) -> "list[pj.Costs]":
        """Return the costs of a table if all messages went over links of a level, by level."""
        if self.of_places not in (None, table.num_stages):
            raise MismatchError(
                f"--scale names places of {self.of_places} stages, the table has "
                f"{table.num_stages}",
                "scale",
            )
        levels = self.source.levels(table)
        for step in self.steps:
            levels = [step.apply(costs, table) for costs in levels]
        return levels

    def _placed(self, table: pj.ScheduleTable) -> "PlacedCosts":
        from pipejax.costs.topology import PlacedCosts

        if self.workload is None or self.system is None:
            return PlacedCosts.from_levels(self._levels(table), table, self.machine.sizes)
        from pipejax.costs.stage.model_topology import model_placements

        by_place = model_placements(self.workload, self.system, table)
        return by_place._replace(base=self._levels(table)[0])

    def with_workload(self, workload: "pj.Workload") -> "Pricing":
        """Price another workload, where a model gives the costs."""
        assert self.system is not None
        lengths = self.microbatches.lengths
        return self._replace(workload=workload, source=ModelCosts(workload, self.system, lengths))

    def with_places(self, places: tuple[int, ...]) -> "Pricing":
        """Let workers sit elsewhere, on a machine of nodes."""
        found = self._replace(machine=self.machine._replace(places=places))
        if self.workload is None:
            return found
        return found.with_workload(dataclasses.replace(self.workload, worker_places=places))

    def of_stages(self, count: int) -> "Pricing":
        """Take times of stages as those of so many, whatever the table that is priced has."""
        source, scaled = self.source, (each for each in self.steps if isinstance(each, ScaledTimes))
        found = (
            self._replace(of_places=count) if any(each.is_of_stages for each in scaled) else self
        )
        if isinstance(source, GivenTimes | CostsFile) and self.is_of_stages:
            return found._replace(source=source._replace(stages=source.stages or count))
        return found

    @property
    def is_of_stages(self) -> bool:
        """Whether times are of the stages of one table."""
        return isinstance(self.source, CostsFile) or (
            isinstance(self.source, GivenTimes) and not self.source.per_worker
        )

    def assumed(self, table: pj.ScheduleTable) -> str:
        """Say what a table needs that its file of costs does not say, and what is taken for it."""
        from pipejax.costs.measured.costs_file import read_halved

        path = self.source.path if isinstance(self.source, CostsFile) else None
        if path is None or not read_halved(path, table):
            return ""
        return f'I and W are taken as half of B each: give "I" and "W" in {path} if you know them'

    def check_used(
        self, tables: Iterable[pj.ScheduleTable], builders: Iterable[Builder] = ()
    ) -> None:
        """Refuse a time of ops that no table has, and that none is planned for."""
        tables = list(tables)
        if self.of_pairs and not any(table.is_fused.any() for table in tables):
            names = ", ".join(dict.fromkeys(table.name for table in tables))
            raise ValueError(f"{self.of_pairs} has no effect: no fused pair in {names}")
        if not self.rare:
            return
        from pipejax.costs.costs import PHASE_FIELDS

        seen = {table.name: {phase.name for phase in table.used_phases} for table in tables}
        planned = {option for builder in builders for option in builder.takes}
        own = (letter for table in tables for letter in table.grammar.letters)
        known = tuple(dict.fromkeys((*PHASE_FIELDS, *own)))
        for letter, given in self.rare.items():
            if letter not in known:
                raise ValueError(f"{given} is not LETTER=TIME: letters are {', '.join(known)}")
            is_planned = PHASE_FIELDS.get(letter) in planned
            if not is_planned and not any(letter in of for of in seen.values()):
                raise ValueError(f"{given} has no effect: no {letter} in {', '.join(seen)}")

    def check_alike(self, command: str) -> None:
        """Refuse microbatches that differ."""
        if self.microbatches.differ:
            raise ValueError(
                f"{command} takes microbatches as alike: leave out --lengths, --microbatch-scale "
                "and --microbatch-order"
            )

    def memory(self, table: pj.ScheduleTable) -> dict[str, Any]:
        """What the workers need, and whether the system has it; nothing without a model."""
        if self.workload is None or self.system is None:
            return {}
        need = pj.memory_bytes(self.workload, table)
        fits = bool(need.max() <= float(self.system.memory_available))
        return {"memory_bytes": need, "fits": fits}


_TIMES = ("stage_times", "worker_times", "costs", "model")  # one of them says what ops take
_WITH_MODEL = (
    "system",
    "minibatch",
    "stack",
    "sequence",
    *(name for name, f in WORKLOAD_FIELDS.items() if f.head),
)
# times that are in vain where no table has such an op; without cells, the step ends with A and U
_RARE = [phase.name for phase in TIMED if phase not in (*SPLIT, pj.Phase.B, *STEP_END)]
_STEPS = (  # options that change costs, and need some
    "offload",
    "lengths",
    "microbatch_scale",
    "microbatch_order",
    "recompute_again",
    "pair_factor",
    "stragglers",
    "scale",
)
_NO_MESSAGES = {  # why message times do not go with what else says, or does not say, times
    "model": "--comm, --latency and --transmit do not go with --model: the system's links give "
    "message times",
    "costs": "--comm, --latency and --transmit do not go with --costs: its file gives message "
    "times",
    "": "--comm, --latency and --transmit need op times: give --stage-times or --worker-times",
}


def _workload_options(name: str, *, in_plan: bool) -> type:
    """Make a record of the fields of a workload, or of those that all layouts of a plan share."""
    kinds = {"whole": CountIfGiven, "flag": bool}
    fields = {n: f for n, f in WORKLOAD_FIELDS.items() if f.head and (f.in_plan or not in_plan)}
    entries = "".join(f"  {n}: {f.detail}\n" for n, f in fields.items() if f.detail)
    defaults: dict[str, Any] = {n: False if f.kind == "flag" else None for n, f in fields.items()}
    annotations = {n: kinds.get(f.kind, Text) for n, f in fields.items()}
    return options(
        type(
            name,
            (),
            {
                "__doc__": f"Fields of a workload.\n\nAttributes:\n{entries}",
                "__annotations__": annotations,
                **defaults,
            },
        )
    )


SharedOptions: Any = _workload_options("SharedOptions", in_plan=True)
WorkloadOptions: Any = _workload_options("WorkloadOptions", in_plan=False)
SHARED = tuple(field.name for field in dataclasses.fields(SharedOptions))
WORKLOAD = tuple(field.name for field in dataclasses.fields(WorkloadOptions))


@options
class CostOptions(WorkloadOptions):  # type: ignore[misc]  # made of the fields of a workload
    """How ops and messages are priced.

    Attributes:
      stage_times: or F=1ms,I=1ms,W=1ms where the backward is split; pair=2ms is what a fused pair
        takes as a whole.
      worker_times: divided over its stages.
      offload: a number or one for each stage; with --model also system, as long as its host link
        takes. Where a schedule is searched, it lets activations go there. --planned-offload is what
        an order is made for, and changes no time.
      load: a number or one for each stage; as O if not given.
      minibatch: with --model; plan counts that of the whole job.
      stack: which kernels it has, and what its exchanges run beside where options do not say it.
      lengths: a line for each, several numbers where sequences are packed, or JSON; times are
        those of the mean length, or follow from the model.
      microbatch_order: that arrange wrote.
      stragglers: factors on all that these workers execute.
      scale: what would be if; places are stages, boundaries and workers.
      measured_stages: of --stage-times or --costs, where the table has others: they are merged, or
        divided evenly.
      pair_factor: 0 is perfect overlap, 1 none; it has nothing to do with pairs of workers.
      recompute_again: where split backwards free what R brought back.
      workers_per_node: or several, as 4,8, of a node and a rack of nodes; --comm, --latency and
        --transmit then take a time for each level, as 1ms,5ms.
      worker_places: numbered node by node, as 0,4,1,5, or a file that place wrote.
    """

    stage_times: Text = None
    worker_times: Text = None
    model: Text = None
    system: Text = None
    minibatch: CountIfGiven = None
    stack: Text = None
    sequence: CountIfGiven = None
    weight_share: WeightShare = None
    comm: Text = None
    latency: Text = None
    transmit: Text = None
    costs: FileIfGiven = None
    offload: Text = None
    load: Text = None
    lengths: FileIfGiven = None
    microbatch_scale: Text = None
    microbatch_order: Text = None
    stragglers: Text = None
    scale: Text = None
    measured_stages: CountIfGiven = None
    pair_factor: Text = None
    recompute_again: bool = False
    workers_per_node: Text = None
    worker_places: Text = None

    @cached_property
    def pricing(self) -> Pricing | None:
        """Read how ops and messages are priced; None if no option says so."""
        machine = Machine.read(self.workers_per_node, self.worker_places, self.costs, self.model)
        each = Microbatches.read(self.lengths, self.microbatch_scale, self.microbatch_order)
        messages = self._message(machine)
        found = self._read_source(messages, machine)
        if self.load is not None and self.offload is None:
            raise ValueError(f"--load {self.load} needs --offload")
        asked = [name for name in _STEPS if getattr(self, name) not in (None, False)]
        if found is None:
            if asked:
                raise ValueError(
                    f"{flag(asked[0])} needs op times: give --stage-times, --costs or --model"
                )
            if machine != Machine():
                raise ValueError("--workers-per-node needs op times: give --stage-times")
            return None
        return self._with_steps(found._replace(machine=machine), each)

    def _with_steps(self, found: Pricing, each: Microbatches) -> Pricing:
        """Add what options do to the costs of the source, in this order."""
        steps: list[Step] = []
        rare = dict(found.rare)
        changes: dict[str, Any] = {}  # of the workload, which reports read
        has_lengths = found.workload is not None and each.lengths is not None
        if self.offload is not None:
            host = HostTimes(self.offload, self.load, found.workload is not None, has_lengths)
            assert host.seconds is not None  # what is wrong is said before any table
            steps.append(host)
            rare |= host.rare
        if each.differ:
            each = each._replace(workload=found.workload)
            steps.append(each)
        if self.recompute_again:
            rare["W"] = "--recompute-again"
            if found.workload is None:
                steps.append(RecomputedAgain())
            if found.workload is None or not found.workload.recomputation.layers:
                rare["R"] = "--recompute-again"
        if self.pair_factor is not None:
            factor = parse_number(self.pair_factor, "--pair-factor")
            steps.append(OverlappedPairs(factor))
            changes["pair_factor"] = factor
        if self.stragglers is not None:
            from pipejax.costs.scaling import parse_stragglers

            slow = parse_stragglers(self.stragglers, "--stragglers")
            steps.append(SlowWorkers(slow))
            changes["stragglers"] = slow
        if self.scale is not None:
            steps.append(ScaledTimes(self.scale))
        factor_text = f"--pair-factor {self.pair_factor}"
        found = found._replace(
            steps=tuple(steps),
            microbatches=each,
            offloads=self.offload is not None,
            rare=rare,
            stragglers=changes.get("stragglers", {}),
            of_pairs=found.of_pairs if self.pair_factor is None else factor_text,
        )
        if found.workload is None or found.system is None:
            return found
        if self.scale is not None:  # a report of a step knows no times but the model's
            workload = dataclasses.replace(found.workload, **changes)
            source = ModelCosts(workload, found.system, each.lengths)
            return found._replace(source=source, workload=None, system=None)
        if each.differ:  # reports of a step are of microbatches alike
            source = ModelCosts(found.workload, found.system, each.lengths)
            return found._replace(source=source, workload=None, system=None)
        return found._replace(workload=dataclasses.replace(found.workload, **changes))

    def _read_source(self, messages: list[dict[str, float]], machine: Machine) -> Pricing | None:
        """Read what gives the costs; None if no option does."""
        cost_options = {name: getattr(self, name) for name in COST_OPTIONS if name not in WORKLOAD}
        used = {k: v for k, v in cost_options.items() if v is not None and v is not False}
        used |= workload_fields(self, WORKLOAD)
        ways = [name for name in _TIMES if name in used]
        if len(ways) > 1:
            raise ValueError(f"{flag(ways[0])} and {flag(ways[1])} both give times: choose one")
        stray = [name for name in _WITH_MODEL if name in used]
        if stray and self.model is None:
            raise ValueError(f"{flag(stray[0])} needs --model")
        way = ways[0] if ways else ""
        if any(messages) and way in _NO_MESSAGES:
            raise ValueError(_NO_MESSAGES[way])
        if way == "":
            return None
        if self.measured_stages is not None and way not in ("costs", "stage_times"):
            raise ValueError(
                f"--measured-stages {self.measured_stages} goes with --costs or --stage-times"
            )
        if self.model is not None:
            names = *stray, "weight_share", "recompute_again"
            named = {name: used[name] for name in names if name in used}
            return _price_model(self.model, **named, worker_places=machine.places)
        if self.costs is not None:
            return Pricing(CostsFile(self.costs, self.measured_stages))
        return self._times(way, used[way], messages)

    def _times(self, way: str, text: str, messages: list[dict[str, float]]) -> Pricing:
        """Read times of ops; what is wrong with them is said before any table."""
        from pipejax.costs.costs import PHASE_FIELDS, TIME_FIELDS, check_backward

        times = parse_times(text, flag(way))
        try:
            check_backward(times)
            usual = {name: time for name, time in times.items() if name in TIME_FIELDS.values()}
            for message in messages:
                pj.Costs(**usual, **message)
        except ValueError as error:
            raise ValueError(f"{flag(way)} {text}: {error}") from None
        rare = {k: f"{flag(way)}: {k}" for k in _RARE if PHASE_FIELDS[k] in times}
        own = times.keys() - TIME_FIELDS.values()
        rare |= {k: f"{flag(way)}: '{k}={times[k]:g}'" for k in times if k in own}
        given = f"{flag(way)} {text}"
        source = GivenTimes(times, messages, way == "worker_times", self.measured_stages, given)
        pairs = f"{flag(way)}: pair={times['pair']:g}" if "pair" in times else ""
        return Pricing(source, rare=rare, of_pairs=pairs)

    def _message(self, machine: Machine) -> list[dict[str, float]]:
        """Read the times of a message [s] by level of the machine."""
        given = {"latency": self.latency, "transmit": self.transmit}
        if self.comm is None:
            return machine.times(given)
        if given != {"latency": None, "transmit": None}:
            raise ValueError(
                "--comm is latency 0 and a transmit time: give it, or --latency and --transmit"
            )
        return [{"transmit": each["comm"]} for each in machine.times({"comm": self.comm})]


COST_OPTIONS = tuple(field.name for field in dataclasses.fields(CostOptions))


def workload_fields(chosen: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a workload that options give; those that are shares are numbers."""
    fields = {name: getattr(chosen, name) for name in names}
    return {
        name: parse_number(value, flag(name)) if WORKLOAD_FIELDS[name].kind == "share" else value
        for name, value in fields.items()
        if value not in (None, False)
    }


def _price_model(
    model: str,
    system: Text = None,
    minibatch: int | None = None,
    stack: Text = None,
    sequence: int | None = None,
    **given: Any,
) -> Pricing:
    if system is None or minibatch is None:
        raise ValueError(f"--model needs {'--system' if system is None else '--minibatch'}")
    for name in given:
        field = WORKLOAD_FIELDS.get(name)
        if field is not None and field.names:
            given[name] = resolve_choice(given[name], field.names, flag(name))
    from pipejax.costs.model.stack import machine_software
    from pipejax.costs.stage.stage_costs import check_machine

    bare = pj.load_system(system)
    software = machine_software(bare, stack)
    found, machine = load_with(model, sequence), software.on(bare)
    given = {**software.workload, **given}
    for name in ("expert_parallel", "expert_tensor_parallel"):
        if given.get(name, 1) > 1 and found.moe is None:
            raise ValueError(f"{flag(name)} {given[name]}: {found.name} has no experts")
    workload = pj.Workload(found, minibatch, **given)
    check_machine(workload, machine)
    source = ModelCosts(workload, machine)
    return Pricing(source, workload=workload, system=machine, stack=software.name)


def load_with(model: str, sequence: int | None) -> "pj.Model":
    """Load a model, with sequences of another length where one is given."""
    found = pj.load_model(model)
    return found if sequence is None else dataclasses.replace(found, sequence=sequence)


def required(pricing: Pricing | None) -> Pricing:
    """Return the pricing, or say which options give it."""
    if pricing is None:
        raise ValueError(
            "times are missing: give --stage-times F=1,B=2, --worker-times F=1,B=2, --costs FILE "
            "or --model NAME --system NAME --minibatch N"
        )
    return pricing


def or_slots(pricing: Pricing | None, table: pj.ScheduleTable) -> "pj.Costs":
    """Return the costs, or the table's own slots where no option gives times."""
    return (pricing or Pricing(TableSlots())).table_costs(table)
