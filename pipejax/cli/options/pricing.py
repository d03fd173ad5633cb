"""Options that say what ops and messages take: times, a file of costs, or a model on a system."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.checks import one_of
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.pricing_steps import HostTimes, Machine, Microbatches
from pipejax.cli.options.values import (
    CountIfGiven,
    FileIfGiven,
    Text,
    WeightShare,
    parse_number,
    parse_times,
)
from pipejax.schedules import Builder
from pipejax.schedules.cells.ops import SPLIT, STEP_END, TIMED

if TYPE_CHECKING:
    from pipejax.costs.topology import PlacedCosts


class Pricing(NamedTuple):
    """How tables are priced; `of` gives the costs of one.

    Attributes:
      of: costs of a table.
      workload: where a model gives them.
      system: the machine that it is on.
      microbatches: what options say of microbatches that differ.
      offloads: whether options say what it takes to offload.
      rare: letters of ops that most tables have none of, and the option that gives their time.
      stragglers: factors of slow workers.
      of_pairs: the option that says how fused pairs overlap.
      placed: costs of a table by where its workers sit, on a machine of nodes.
      places: of each worker there; in order if none.
    """

    of: "Callable[[pj.ScheduleTable], pj.Costs]"
    workload: "pj.Workload | None" = None
    system: "pj.System | None" = None
    microbatches: Microbatches = Microbatches()
    offloads: bool = False
    rare: Mapping[str, str] = MappingProxyType({})
    stragglers: Mapping[int, float] = MappingProxyType({})
    of_pairs: str = ""
    placed: "Callable[[pj.ScheduleTable], PlacedCosts] | None" = None
    places: tuple[int, ...] = ()

    def check_used(
        self, tables: Iterable[pj.ScheduleTable], builders: Iterable[Builder] = ()
    ) -> None:
        """Refuse a time of ops that no table has, and that none is planned for.

        Args:
          tables: all that are priced.
          builders: what they were built by; a table may offload nothing because that takes long.

        Raises:
          ValueError: if there is one.
        """
        tables = list(tables)
        if self.of_pairs and not any(table.is_fused.any() for table in tables):
            names = ", ".join(dict.fromkeys(table.name for table in tables))
            raise ValueError(f"{self.of_pairs} has no effect: no fused pair in {names}")
        if not self.rare:
            return
        from pipejax.costs.costs import PHASE_FIELDS

        seen = {table.name: {*np.unique(table.ops.phase).tolist()} for table in tables}
        planned = {option for builder in builders for option in builder.takes}
        for letter, given in self.rare.items():
            code = pj.Phase[letter]
            if PHASE_FIELDS[letter] not in planned and not any(code in of for of in seen.values()):
                raise ValueError(f"{given} has no effect: no {letter} in {', '.join(seen)}")

    def check_alike(self, command: str) -> None:
        """Refuse microbatches that differ.

        Raises:
          ValueError: if options say that they do.
        """
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
    "tensor_parallel",
    "sequence_parallel",
    "scatter_gather",
    "context_parallel",
    "expert_parallel",
    "data_parallel",
    "zero",
    "overlap",
    "precision",
    "rank_order",
    "embedding_units",
    "loss_units",
    "pipeline_layout",
    "recompute",
)
# times that are in vain where no table has such an op; without cells, the step ends with A and U
_RARE = [phase.name for phase in TIMED if phase not in (*SPLIT, pj.Phase.B, *STEP_END)]
_OF_MICROBATCHES = ("lengths", "microbatch_scale", "microbatch_order")
_NO_MESSAGES = {  # why message times do not go with what else says, or does not say, times
    "model": "--comm, --latency and --transmit do not go with --model: the system's links give "
    "message times",
    "costs": "--comm, --latency and --transmit do not go with --costs: its file gives message "
    "times",
    "": "--comm, --latency and --transmit need op times: give --stage-times or --worker-times",
}


class PricingSettings(NamedTuple):
    """How ops and messages are priced.

    Attributes:
      stage_times: or F=1ms,I=1ms,W=1ms where the backward is split.
      worker_times: divided over its stages.
      offload: a number or one for each stage; with --model also system, as long as its host link
        takes. Where a schedule is searched, it lets activations go there.
      load: likewise; as O if not given.
      minibatch: of one pipeline, with --model.
      zero: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
      precision: bf16, fp16, fp8, mxfp8 or nvfp4.
      rank_order: tp-cp-ep-dp-pp or tp-pp-dp.
      embedding_units: when stages get theirs.
      loss_units: likewise.
      pipeline_layout: E is the embedding, t a layer, m one for a further token (MTP), L head and
        loss, | ends a stage, x*n and (..)*n repeat, as in Megatron.
      recompute: none, selective or full.
      lengths: a line for each, several numbers where sequences are packed, or JSON; times are
        those of the mean length, or follow from the model.
      microbatch_order: that arrange wrote.
      stragglers: factors on all that these workers execute.
      pair_factor: 0 is perfect overlap, 1 none.
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
    tensor_parallel: CountIfGiven = None
    sequence_parallel: bool = False
    scatter_gather: bool = False
    context_parallel: CountIfGiven = None
    expert_parallel: CountIfGiven = None
    data_parallel: CountIfGiven = None
    zero: CountIfGiven = None
    overlap: bool = False
    precision: Text = None
    rank_order: Text = None
    embedding_units: CountIfGiven = None
    loss_units: CountIfGiven = None
    pipeline_layout: Text = None
    recompute: Text = None
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
    pair_factor: Text = None
    recompute_again: bool = False
    workers_per_node: Text = None
    worker_places: Text = None

    def chosen(self) -> Pricing | None:
        """Read how ops and messages are priced; None if no option says so."""
        machine = Machine.read(self.workers_per_node, self.worker_places, self.costs, self.model)
        each = [self._on_level(machine, level) for level in range(len(machine.sizes) + 1)]
        found, *_ = each
        if found is None:
            if machine != Machine():
                raise ValueError("--workers-per-node needs op times: give --stage-times")
            return None
        if self.model is None and not machine.sizes:
            return found
        from pipejax.costs.topology import PlacedCosts

        def placed(table: pj.ScheduleTable) -> PlacedCosts:
            if found.workload is None or found.system is None:
                levels = [level.of(table) for level in each if level is not None]
                return PlacedCosts.of_levels(levels, table, machine.sizes)
            from pipejax.costs.stage.model_topology import model_placements

            by_place = model_placements(found.workload, found.system, table)
            return by_place._replace(base=found.of(table))

        if self.model is not None:
            is_alike = found.workload is not None  # microbatches that differ have none
            return found._replace(placed=placed if is_alike else None, places=machine.places)
        from pipejax.costs.topology import places_on

        def at_places(table: pj.ScheduleTable) -> "pj.Costs":
            return placed(table).at(places_on(table, machine.places, "--worker-places"))

        return found._replace(of=at_places, placed=placed, places=machine.places)

    def _on_level(self, machine: Machine, level: int) -> Pricing | None:
        """Price as if all messages went over links of one level."""
        found = self._with_recompute(self._by_microbatch(machine, level))
        return self._with_stragglers(self._with_pairs(found))

    def _with_recompute(self, found: Pricing | None) -> Pricing | None:
        """Let a weight gradient recompute once more: nothing can stand between its R and it."""
        if not self.recompute_again:
            return found
        if found is None:
            raise ValueError(
                "--recompute-again needs op times: give --stage-times, --costs or --model"
            )

        def of(table: pj.ScheduleTable) -> pj.Costs:
            costs = found.of(table)
            costs.check_known((pj.Phase.W, pj.Phase.R))
            weight, again = np.asarray(costs.weight_grad), np.asarray(costs.recompute)
            if 1 in (weight.ndim, again.ndim):  # beside it one that differs by microbatch
                weight, again = (
                    x[:, None] if x.ndim == 1 < other.ndim else x
                    for x, other in ((weight, again), (again, weight))
                )
            return dataclasses.replace(costs, weight_grad=weight + again)

        rare = dict.fromkeys("RW", "--recompute-again")
        return found._replace(of=of, rare={**found.rare, **rare})

    def _with_pairs(self, found: Pricing | None) -> Pricing | None:
        """Let fused pairs overlap."""
        if self.pair_factor is None:
            return found
        if found is None:
            raise ValueError("--pair-factor needs op times: give --stage-times, --costs or --model")
        factor = parse_number(self.pair_factor, "--pair-factor")
        work = found.workload and dataclasses.replace(found.workload, pair_factor=factor)

        def of(table: pj.ScheduleTable) -> pj.Costs:
            costs = found.of(table)
            if costs.pair is not None or costs.pair_factor is not None:
                raise ValueError(
                    "--pair-factor: the file of --costs says already what a fused pair takes"
                )
            return dataclasses.replace(costs, pair_factor=factor)

        given = f"--pair-factor {self.pair_factor}"
        return found._replace(of=of, workload=work, of_pairs=given)

    def _with_stragglers(self, found: Pricing | None) -> Pricing | None:
        """Slow down what some workers execute."""
        if self.stragglers is None:
            return found
        if found is None:
            raise ValueError("--stragglers needs op times: give --stage-times, --costs or --model")
        from pipejax.costs.scaling import check_workers, parse_stragglers

        slow = parse_stragglers(self.stragglers, "--stragglers")
        work = found.workload and dataclasses.replace(found.workload, stragglers=slow)

        def of(table: pj.ScheduleTable) -> pj.Costs:
            check_workers(slow, table, "--stragglers")
            return pj.costing.scaled_costs(found.of(table), table, workers=slow)

        return found._replace(of=of, workload=work, stragglers=slow)

    def _by_microbatch(self, machine: Machine, level: int) -> Pricing | None:
        """Price microbatches, which may differ."""
        each = Microbatches.read(self.lengths, self.microbatch_scale, self.microbatch_order)
        alike = self._with_host(self._alike(machine, level))
        if not each.differ:
            return alike
        if alike is None:
            first = next(name for name in _OF_MICROBATCHES if getattr(self, name) is not None)
            raise ValueError(
                f"{flag(first)} needs op times: give --stage-times, --costs or --model"
            )
        of = each.costs_of(alike.of, alike.workload, alike.system)
        # reports of a step are of microbatches alike
        microbatches = each._replace(workload=alike.workload)
        return alike._replace(of=of, workload=None, system=None, microbatches=microbatches)

    def _with_host(self, pricing: Pricing | None) -> Pricing | None:
        """Add the times of O and L that are given."""
        times = HostTimes(self.offload, self.load)
        if not times.seconds and self.offload is None:
            return pricing
        if pricing is None:
            raise ValueError("--offload needs op times: give --stage-times, --costs or --model")
        of = times.costs_of(pricing.of, is_plain=pricing.workload is None)
        given = {"O": f"--offload {self.offload}"}
        given |= {} if self.load is None else {"L": f"--load {self.load}"}
        return pricing._replace(of=of, offloads=True, rare={**pricing.rare, **given})

    def _alike(self, machine: Machine, level: int) -> Pricing | None:
        """Price microbatches that are alike."""
        message = self._message(machine)[level]
        given = {k: v for k, v in self._asdict().items() if v is not None and v is not False}
        ways = [name for name in _TIMES if name in given]
        if len(ways) > 1:
            raise ValueError(f"{flag(ways[0])} and {flag(ways[1])} both give times: choose one")
        stray = [name for name in _WITH_MODEL if name in given]
        if stray and self.model is None:
            raise ValueError(f"{flag(stray[0])} needs --model")
        way = ways[0] if ways else ""
        if message and way in _NO_MESSAGES:
            raise ValueError(_NO_MESSAGES[way])
        if way == "":
            return None
        if self.model is not None:
            named = {name: given[name] for name in (*stray, "weight_share") if name in given}
            return _price_model(self.model, **named, worker_places=machine.places)
        text: str = given[way]
        if way == "costs":
            from pipejax.costs.measured.costs_file import read_levels

            return Pricing(lambda table: read_levels(text, table)[level])
        from pipejax.costs.costs import PHASE_FIELDS, check_backward

        times = parse_times(text, flag(way))
        try:
            check_backward(times)
            of_stage = pj.Costs(**times, **message)
            of_stage.check_known((pj.Phase.F, pj.Phase.B))  # what is wrong is said before any table
        except ValueError as error:
            raise ValueError(f"{flag(way)} {text}: {error}") from None
        rare = {k: f"{flag(way)}: {k}" for k in _RARE if PHASE_FIELDS[k] in times}
        if way == "stage_times":
            return Pricing(lambda table: of_stage, rare=rare)
        return Pricing(lambda table: pj.Costs.per_worker(table, **times, **message), rare=rare)

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


def _price_model(
    model: str, system: Text = None, minibatch: int | None = None, **given: Any
) -> Pricing:
    from pipejax.costs.model.layout import PRECISIONS, RANK_ORDERS
    from pipejax.costs.model.model import RECOMPUTE

    if system is None or minibatch is None:
        raise ValueError(f"--model needs {'--system' if system is None else '--minibatch'}")
    for name, known in (
        ("recompute", RECOMPUTE),
        ("precision", PRECISIONS),
        ("rank_order", RANK_ORDERS),
    ):
        if name in given:
            given[name] = one_of(given[name], known, flag(name))
    found, machine = pj.load_model(model), pj.load_system(system)
    if given.get("expert_parallel", 1) > 1 and found.moe is None:
        raise ValueError(
            f"--expert-parallel {given['expert_parallel']}: {found.name} has no experts"
        )
    workload = pj.Workload(found, minibatch, **given)
    machine.peak(workload.precision)  # or it says that it has none
    return Pricing(lambda table: pj.stage_costs(workload, machine, table), workload, machine)


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


def or_slots(pricing: Pricing | None, table: pj.ScheduleTable) -> "pj.Costs":
    """Return the costs, or the table's own slots where no option gives times."""
    from pipejax.costs.measured.costs_file import slot_costs

    return slot_costs(table) if pricing is None else pricing.of(table)
