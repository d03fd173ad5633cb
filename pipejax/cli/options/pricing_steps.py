"""Options that change what a table costs: machines of nodes, times of the host, microbatches."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.base.data_files import load_json
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.values import FileIfGiven, Text, for_each, is_plain, parse_list


class Machine(NamedTuple):
    """What options say of a machine."""

    # places of a node, of a rack of nodes, and so on; none where all links are alike, or a system
    # has them
    sizes: tuple[int, ...] = ()
    places: tuple[int, ...] = ()  # of each worker; in order if none

    @classmethod
    def read(
        cls, per_node: Text, worker_places: Text, costs: FileIfGiven, model: Text
    ) -> "Machine":
        """Read the options.

        Raises:
          ValueError: if one is wrong, or does not go with what says times.
        """
        if per_node is not None and (costs is not None or model is not None):
            other = "--costs: its file" if costs is not None else "--model: the system"
            raise ValueError(f"--workers-per-node does not go with {other} says what a node is")
        if costs is not None:
            from pipejax.costs.measured.costs_file import read_sizes

            sizes = read_sizes(costs)
        else:
            sizes = () if per_node is None else _read_sizes(per_node)
        if worker_places is None:
            return cls(sizes)
        if model is None and not sizes:
            raise ValueError(
                "--worker-places needs a machine of nodes: give --workers-per-node, --costs with a "
                "file that says so, or --model"
            )
        return cls(sizes, _read_places(worker_places))

    def times(self, given: dict[str, Text]) -> list[dict[str, float]]:
        """Read times of messages by level [s]: one of each, or one for every level."""
        levels = len(self.sizes) + 1
        texts = {name: text for name, text in given.items() if text is not None}
        found = {name: parse_list(text, flag(name), seconds=True) for name, text in texts.items()}
        for name, each in found.items():
            if len(each) not in (1, levels):
                wanted = (
                    f"one time, or {levels}: inside a node, between nodes, and so on"
                    if self.sizes
                    else "one time, or with --workers-per-node one for each level of the machine"
                )
                raise ValueError(f"{flag(name)} must be {wanted}, got {texts[name]!r}")
        return [
            {name: each[level % len(each)] for name, each in found.items()}
            for level in range(levels)
        ]


def _read_sizes(text: str) -> tuple[int, ...]:
    from pipejax.costs.topology import check_sizes

    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and is_plain(word) for word in words):
        raise ValueError(f"--workers-per-node must be a number, or several as 4,8, got {text!r}")
    return check_sizes([int(word) for word in words], "--workers-per-node")


def _read_places(text: str) -> tuple[int, ...]:
    """Read places such as 0,4,1,5, or the file that `pipejax tune places` wrote."""
    from pipejax.costs.topology import check_places, parse_places

    if not text.endswith(".json"):
        return parse_places(text, "--worker-places")
    return check_places(load_json(text).get("places", ()), f"{text}: places")


BY_LINK = "system"  # as --offload: what the host link of the system takes


class HostTimes(NamedTuple):
    """Times of O and L, as options give them."""

    offload: str  # of O
    load: Text = None  # of L
    has_model: bool = False  # whether a model gives the costs besides
    # whether a model prices microbatches by their lengths, which has its own times
    is_left_out: bool = False

    @property
    def rare(self) -> dict[str, str]:
        """Letters of the ops whose times are given, and the options that give them."""
        loads = {} if self.load is None else {"L": f"--load {self.load}"}
        return {"O": f"--offload {self.offload}", **loads}

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Times by name: one for all stages, or one for each; none where the system has them."""
        given = {"offload": self.offload, "load": self.load} if self.offload != BY_LINK else {}
        texts = {name: text for name, text in given.items() if text is not None}
        return {name: parse_list(text, flag(name), seconds=True) for name, text in texts.items()}

    def apply(self, costs: "pj.Costs", table: pj.ScheduleTable) -> "pj.Costs":
        """Return the costs of a table with these times in them."""
        if self.is_left_out:
            return costs
        if self.offload == BY_LINK and (not self.has_model or costs.offload is None):
            raise ValueError("--offload system needs --model, and a --system with a host_link")
        host = self.seconds
        if host and not self.has_model and takes_host_time(costs):
            raise ValueError(
                f"--offload {self.offload} and the times of O or L given besides: choose one"
            )
        per_stage = {
            name: for_each(times, table.num_stages, flag(name), "stages")
            for name, times in host.items()
        }
        return dataclasses.replace(costs, **per_stage)


def takes_host_time(costs: "pj.Costs") -> bool:
    """Whether the costs say what an offload or a load takes."""
    return any(
        np.any(np.asarray(time) > 0) for time in (costs.offload, costs.load) if time is not None
    )


class Microbatches(NamedTuple):
    """What options say of microbatches."""

    # of each its tokens or sequences, from the file of `--lengths`
    lengths: list[Any] | None = None
    scale: Float[NumpyArray, " microbatches"] | None = None  # factors on the times of each
    order: list[int] | None = None  # which of them is microbatch k of the table
    workload: "pj.Workload | None" = None  # whose activations they are, where a model prices them

    @classmethod
    def read(cls, lengths: FileIfGiven, scale: Text, order: Text) -> "Microbatches":
        """Read the options, before there is a table."""
        if lengths is not None and scale is not None:
            raise ValueError(
                "--lengths and --microbatch-scale both say how long they are: give one"
            )
        return cls(
            None if lengths is None else pj.files.read_lengths(lengths),
            None if scale is None else np.array(parse_list(scale, "--microbatch-scale")),
            None if order is None else _read_order(order),
        )

    @property
    def differ(self) -> bool:
        """Whether any option is given."""
        return any(option is not None for option in self[:3])

    @property
    def tokens(self) -> float:
        """Tokens of a step, of all replicas of the pipeline."""
        from pipejax.costs.stage.microbatches import Packed

        replicas = 1 if self.workload is None else self.workload.data_parallel
        return replicas * float(Packed.from_lengths(self.lengths or []).tokens.sum())

    def bytes_of(self, table: pj.ScheduleTable) -> dict[str, NumpyArray]:
        """Return the model's sizes for `activation_memory`, (stages, microbatches) each."""
        assert self.workload is not None
        from pipejax.costs.stage.microbatches import length_bytes
        from pipejax.costs.stage.stage_work import stage_bytes

        if self.lengths is not None:
            found = length_bytes(self.workload, table, self.lengths)
        else:
            sizes = stage_bytes(self.workload, table).ledger_sizes
            count = table.num_microbatches
            scale = np.ones(count) if self.scale is None else self.scale
            found = {}
            for name, size in sizes.items():
                # slices have an axis of their own
                axes = size.shape[: 1 + (name == "at_work")]
                factor = np.ones(count) if name == "weight_share" else scale
                found[name] = size.reshape(*axes, -1) * factor
        return {n: s if self.order is None else s[..., self.order] for n, s in found.items()}

    def apply(self, costs: "pj.Costs", table: pj.ScheduleTable) -> "pj.Costs":
        """Return the costs of a table whose microbatches differ, where a model gives no other."""
        from pipejax.costs.stage.microbatches import Packed, check_order, in_order

        count = table.num_microbatches
        if self.lengths is not None and self.workload is None:
            _check_count("--lengths", self.lengths, count)
            tokens = Packed.from_lengths(self.lengths).tokens
            costs = pj.costing.scaled_costs(costs, table, microbatches=tokens / tokens.mean())
        elif self.scale is not None:
            _check_count("--microbatch-scale", self.scale, count)
            costs = pj.costing.scaled_costs(costs, table, microbatches=self.scale)
        if self.order is None:
            return costs
        costs.check_shapes(table.num_stages, table.num_pipes, count)
        return in_order(costs, check_order(self.order, count, "--microbatch-order"))


class RecomputedAgain(NamedTuple):
    """A weight gradient recomputes once more: nothing can stand between its R and it."""

    def apply(self, costs: "pj.Costs", table: pj.ScheduleTable) -> "pj.Costs":
        """Add what R takes to what W takes."""
        del table
        costs.check_known((pj.Phase.W, pj.Phase.R))
        weight, again = np.asarray(costs.weight_grad), np.asarray(costs.recompute)
        if 1 in (weight.ndim, again.ndim):  # beside it one that differs by microbatch
            weight, again = (
                x[:, None] if x.ndim == 1 < other.ndim else x
                for x, other in ((weight, again), (again, weight))
            )
        return dataclasses.replace(costs, weight_grad=weight + again)


class OverlappedPairs(NamedTuple):
    """How far fused pairs overlap: 0 is perfect, 1 none."""

    factor: float

    def apply(self, costs: "pj.Costs", table: pj.ScheduleTable) -> "pj.Costs":
        """Set the factor."""
        del table
        if costs.pair is not None or costs.pair_factor is not None:
            raise ValueError(
                "--pair-factor: pair= or the file of --costs says already what a fused pair takes"
            )
        return dataclasses.replace(costs, pair_factor=self.factor)


class SlowWorkers(NamedTuple):
    """Factors on all that some workers execute."""

    factors: Mapping[int, float]

    def apply(self, costs: "pj.Costs", table: pj.ScheduleTable) -> "pj.Costs":
        """Slow them down."""
        from pipejax.costs.scaling import check_workers

        check_workers(self.factors, table, "--stragglers")
        return pj.costing.scaled_costs(costs, table, workers=self.factors)


class ScaledTimes(NamedTuple):
    """Times that are scaled by rules, to see what would be if."""

    rules: str

    @property
    def is_of_stages(self) -> bool:
        """Whether a rule names a stage or a boundary, which other tables have elsewhere."""
        return "@stage" in self.rules or "@boundary" in self.rules

    def apply(self, costs: "pj.Costs", table: pj.ScheduleTable) -> "pj.Costs":
        """Scale them."""
        try:
            return pj.costing.scaled_costs(costs, table, self.rules)
        except ValueError as error:
            raise ValueError(f"--scale {self.rules}: {error}") from None


Step = HostTimes | Microbatches | RecomputedAgain | OverlappedPairs | SlowWorkers | ScaledTimes


def _check_own(costs: "pj.Costs", table: pj.ScheduleTable, *, of_model: bool = False) -> None:
    """Name all kinds of a table's own that have no time."""
    used = set(table.used_phases)
    custom = [phase for phase in table.grammar.custom_phases if phase.kind.time and phase in used]
    lacks = [phase.name for phase in custom if costs.time(phase) is None]
    if lacks and of_model:
        raise ValueError(
            f"--model says nothing of kinds {', '.join(lacks)} of {table.name}: give --stage-times"
        )
    if lacks:
        more = ", ".join(f"{letters}=.." for letters in lacks)
        raise ValueError(f"{table.name} has kinds of ops of its own: give {more}, too")


class GivenTimes(NamedTuple):
    """Times of ops and of messages, as options give them."""

    times: Mapping[str, float]  # of ops by fields of `Costs` [s]
    messages: Sequence[Mapping[str, float]] = ({},)  # of a message, by level of the machine [s]
    per_worker: bool = False  # whether ops take so long on a worker, not on a stage
    # how many stages they are of, where that is not as many as the table has
    stages: int | None = None
    given: str = ""  # as it was written, with the option

    def levels(self, table: pj.ScheduleTable) -> "list[pj.Costs]":
        """Return the costs of a table if all messages went over links of a level."""
        from pipejax.costs.costs import needed_by

        found = []
        moved = [p for p in table.grammar.lane_sharding if p in table.used_phases]
        try:
            if lacks := [f"{p.name}=.." for p in moved if p.kind.time not in self.times]:
                what = "gathers and reductions beside compute take time"
                raise ValueError(f"{what}: give {', '.join(lacks)}, too")
            for each in self.messages:
                if self.per_worker:
                    found.append(pj.Costs.per_worker(table, **self._for(table), **each))
                else:
                    found.append(pj.Costs(**self._for(table), **each))
                    found[-1].check_known(needed_by(table))
                _check_own(found[-1], table)
        except ValueError as error:
            raise ValueError(f"{self.given}: {error}") from None
        if self.stages is None:
            return found
        return [pj.costing.restaged_costs(costs, self.stages, table) for costs in found]

    def of_any(self, tables: Sequence[pj.ScheduleTable]) -> "pj.Costs":
        """Return costs that hold for stages of any table, and kinds of these."""
        return pj.Costs(**self._for(*tables), **self.messages[0])

    def _for(self, *tables: pj.ScheduleTable) -> dict[str, Any]:
        """Times by field; those by letters are of kinds that a table defines, if it does."""
        from pipejax.costs.costs import TIME_FIELDS

        usual = {name: t for name, t in self.times.items() if name in TIME_FIELDS.values()}
        names = {
            phase.kind.time: phase.name for table in tables for phase in table.grammar.custom_phases
        }
        others = {field: self.times[name] for field, name in names.items() if name in self.times}
        return usual | {"others": others}


class CostsFile(NamedTuple):
    """A file of measured costs, of as many stages as the table has, or of so many."""

    path: str
    stages: int | None = None

    def levels(self, table: pj.ScheduleTable) -> "list[pj.Costs]":
        """Return the costs of a table if all messages went over links of a level."""
        from pipejax.costs.measured.costs_file import read_levels

        return read_levels(self.path, table, self.stages)


class ModelCosts(NamedTuple):
    """A model on a system; microbatches have the lengths that are given, or are alike."""

    workload: "pj.Workload"
    system: "pj.System"
    lengths: list[Any] | None = None

    def levels(self, table: pj.ScheduleTable) -> "list[pj.Costs]":
        """Return the costs of a table: of all levels one, which the system knows."""
        if self.lengths is not None:
            _check_count("--lengths", self.lengths, table.num_microbatches)
        if table.grammar.lane_sharding and self.workload.zero < 2:
            raise ValueError(
                "gathers and reductions beside compute are of what replicas split: give --zero 3, "
                f"or 2 for gradients alone, got --zero {self.workload.zero}"
            )
        costs = pj.stage_costs(self.workload, self.system, table, lengths=self.lengths)
        _check_own(costs, table, of_model=True)
        return [costs]


class TableSlots(NamedTuple):
    """A table's own slots, where no option gives times; or unit slots, the same for all tables."""

    in_units: bool = False

    def levels(self, table: pj.ScheduleTable) -> "list[pj.Costs]":
        """Return slots in place of seconds."""
        from pipejax.costs.measured.costs_file import slot_costs

        return [slot_costs(table, table.grammar.unit_slots if self.in_units else table.slots)]


Source = GivenTimes | CostsFile | ModelCosts | TableSlots


def _check_count(option: str, given: Sequence[Any] | NumpyArray, count: int) -> None:
    if len(given) != count:
        raise MismatchError(
            f"{option} has {len(given)} entries, the table has {count} microbatches"
        )


def _read_order(text: str) -> list[int]:
    """Read an order such as 2,0,1, or the file that `pipejax tune microbatches` wrote."""
    words = [word.strip() for word in text.split(",")]
    if all(word.isdigit() and is_plain(word) for word in words):
        return [int(word) for word in words]
    if len(words) > 1:
        raise ValueError(
            f"--microbatch-order must be numbers of microbatches, as 2,0,1, or a file, got {text!r}"
        )

    found = load_json(text).get("order")
    if not isinstance(found, list):
        raise ValueError(f'{text}: "order" must be a list, got {found!r}')
    return found
