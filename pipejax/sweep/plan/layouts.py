"""Layouts of a job: every legal choice of degrees, microbatch size and schedule, as columns.

Edge units are the number of layers that embedding and head each count as when layers are assigned
to stages. Layouts with equal degrees in `IDEA` are one idea; only its fastest layout is reported.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.analysis.step.evidence import memory_factors, operand_bits, sure_memory
from pipejax.base import checks
from pipejax.base.array_types import Bool, Index, Int, NumpyArray, Shaped
from pipejax.base.display import short_repr
from pipejax.base.progress import Notice
from pipejax.base.ties import row_classes
from pipejax.costs.model.launchers import default_overlap, find_launcher, machine_launches
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import Workload, assign_layers, missing_parts, stage_layers
from pipejax.costs.model.workload_fields import RECOMPUTE, WORKLOAD_FIELDS, check_recompute
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import check_machine
from pipejax.costs.system.parts import HEADROOM
from pipejax.costs.system.system import System
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import check_usual
from pipejax.sweep.plan.programs import ProgramShape, build_table, refusal

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
ZERO = tuple(range(1 + (WORKLOAD_FIELDS["zero"].largest or 0)))
EDGE_UNITS = (0, 1)  # default choices
# parts of a layer that published recipes of models with latent attention recompute
LATENT_PARTS = ("mla_up_proj", "mla_up_proj+mlp")
COUNTED = (
    *("tensor", "context", "expert", "expert_tensor", "data", "pipeline", "stages_per_worker"),
)
SHARED = tuple(sorted(name for name, field in WORKLOAD_FIELDS.items() if field.in_plan))
IDEA = ("tensor", "pipeline", "expert", "expert_tensor")
CHOICES = (*COUNTED, "microbatch_size", "zero", "edge_units", "recompute")


@short_repr
@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A training job, and the layouts that it may use."""

    model: Model  # the transformer
    system: System  # the machine
    gpus: int  # number of accelerators, all of which are used
    minibatch: int  # sequences per step of the whole job
    schedules: tuple[str, ...] = SCHEDULES  # names of schedules with a fixed order of ops
    # {axis in `CHOICES`: allowed values}; other axes have all legal values
    choices: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    links: Links = dataclasses.field(default_factory=Links)
    # fields of `Workload` that all layouts have in common (`SHARED`)
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stack: str = ""  # name of the software; empty for the software in the system's file
    memory_limit: float | None = None  # memory for tensors of an accelerator [B]; None: `headroom`
    headroom: float = HEADROOM  # share of an accelerator's memory that tensors may not use
    launcher: str = ""  # launcher that must run the layouts; empty for any launcher

    def __post_init__(self) -> None:
        checks.check_types(model=(self.model, Model), system=(self.system, System))
        for name in ("gpus", "minibatch"):
            count = checks.whole_number(getattr(self, name), name, maximum=checks.MAX_COUNT)
            object.__setattr__(self, name, count)
        object.__setattr__(self, "schedules", _check_schedules(self.schedules))
        chosen = {name: _check_values(name, values) for name, values in self.choices.items()}
        object.__setattr__(self, "choices", chosen)
        object.__setattr__(self, "links", Links.resolve(self.links))
        checks.share(self.headroom, "headroom")
        if self.launcher:
            object.__setattr__(self, "launcher", find_launcher(self.launcher).name)
        if self.memory_limit is not None:
            checks.positive(self.memory_limit, "memory_limit")
        for name in self.shared:
            if name not in SHARED:
                raise checks.unknown("field of all layouts", name, SHARED)
        workload = Workload(self.model, self.minibatch, **self.shared)  # checks the fields
        check_machine(workload, self.system)
        for recompute in chosen.get("recompute", ()):
            dataclasses.replace(workload, recompute=recompute)  # checks the recomputation

    @property
    def usable_memory(self) -> float:
        """Return the memory of an accelerator that a layout may need [B]."""
        if self.memory_limit is not None:
            return float(self.memory_limit)
        return (1 - self.headroom) * float(self.system.memory_available)

    @property
    def memory_factors(self) -> list[float]:
        """List the ratios measured / predicted memory of the launcher's runs, ascending."""
        source = find_launcher(self.launcher).source if self.launcher else ""
        return memory_factors(source, bits=operand_bits(self.shared.get("precision", "")))

    @property
    def safe_memory(self) -> float:
        """Return the predicted memory [B] up to which layouts fit despite the largest error."""
        if self.memory_limit is not None:
            return self.usable_memory
        available = float(self.system.memory_available)
        return sure_memory(self.usable_memory, available, self.memory_factors)

    @functools.cached_property
    def recomputations(self) -> tuple[str, ...]:
        """List the names that `Layouts.recompute` indexes: modes, then parts of layers."""
        extra = find_launcher(self.launcher).recomputations if self.launcher else ()
        usual = (*LATENT_PARTS, *extra)
        parts = [parts for parts in usual if not missing_parts(self.model, parts)]
        return tuple(dict.fromkeys((*RECOMPUTE, *self.choices.get("recompute", parts))))

    @property
    def has_sequence_parallel(self) -> bool:
        """Return whether layouts with tensor parallelism have sequence parallelism."""
        return not self.launcher or find_launcher(self.launcher).has_sequence_parallel

    @property
    def edge_units(self) -> tuple[int, ...]:
        """Return the allowed edge units."""
        return self.choices.get("edge_units", EDGE_UNITS)

    def allowed(self, axis: str, values: Sequence[Any]) -> list[Any]:
        """Return the values of an axis that the request allows."""
        choices = self.choices.get(axis)
        return [value for value in values if choices is None or value in choices]


def _check_schedules(names: Sequence[str]) -> tuple[str, ...]:
    """Return full names of schedules; refuse those that a plan cannot build for any size."""
    full_names = tuple(schedules.named(name) for name in names)
    if not full_names or len(set(full_names)) < len(full_names):
        text = ", ".join(names) or "none"
        raise checks.wrong("schedules", f"must be different names, got {text}")
    for name in full_names:
        if schedules.find(name).sizes is not None:
            raise ValueError(f"schedule {name} is one table: a plan takes schedules of any size")
        if schedules.find(name).planned:
            raise ValueError(
                f"schedule {name} is planned from the times of one layout: a plan takes schedules "
                "with a fixed order of ops"
            )
        table = schedules.build(name, num_workers=4, num_microbatches=8)
        check_whole(table, "a plan")
        check_usual(table, "a plan")
        if table.updates_within:
            raise ValueError(f"schedule {name} is asynchronous: a plan needs synchronous steps")
    return full_names


def _check_values(axis: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Check the values that a request allows for an axis of layouts, such as tensor."""
    if axis not in CHOICES:
        raise checks.unknown("choice", axis, CHOICES)
    if not values:
        raise ValueError(f"{axis} must have at least one value")
    if axis == "recompute":
        return tuple(dict.fromkeys(check_recompute(value) for value in values))
    if axis == "zero":
        return tuple(checks.resolve_choice(value, ZERO, axis) for value in values)
    limits = {"minimum": 0 if axis == "edge_units" else 1, "maximum": checks.MAX_COUNT}
    return tuple(checks.whole_number(value, axis, **limits) for value in values)


# limits if the request does not choose context or stages_per_worker
MIN_TOKENS = 1024  # least tokens of a sequence on an accelerator of context parallelism
MAX_STAGES = 16  # largest number of stages of a worker
UNEVEN = 0.1  # largest share of layers by which the fullest stage may exceed the mean
IN_GROUPS = "interleaved-1f1b"  # schedule whose number of microbatches is a multiple of P

Column = Int[NumpyArray, " layouts"]
Columns = Sequence[Shaped[NumpyArray, " layouts"]]


@short_repr
class Layouts(NamedTuple):
    """Layouts of a job as columns, with one entry per layout."""

    schedule: Column  # index in the request's `schedules`
    pipeline: Column  # P
    stages_per_worker: Column  # V
    tensor: Column  # t
    context: Column  # c
    expert: Column  # e
    expert_tensor: Column  # number of accelerators that split each expert; 1 without experts
    data: Column  # d
    microbatch_size: Column  # b [sequences]
    microbatches: Column  # M
    recompute: Column  # index in the request's `recomputations`
    zero: Column  # ZeRO stage, 0 to 3
    edge_units: Column

    def __len__(self) -> int:
        return len(self.schedule)

    def take(self, rows: Bool[NumpyArray, " layouts"] | Column) -> "Layouts":
        """Return the selected layouts."""
        return Layouts(*(column[rows] for column in self))

    @property
    def stages(self) -> Column:
        """Return the number of stages of each layout's pipeline."""
        return self.pipeline * self.stages_per_worker

    @property
    def idea(self) -> Column:
        """Return a number per layout, equal for layouts with equal degrees and use of ZeRO 3."""
        columns = np.stack([*(getattr(self, axis) for axis in IDEA), self.zero >= 3], axis=1)
        return np.unique(columns, axis=0, return_inverse=True)[1].ravel()

    def described(self, request: PlanRequest, row: int) -> dict[str, Any]:
        """Return the fields of one layout, named as in rows of measured runs."""
        fields = {name: int(column[row]) for name, column in self._asdict().items()}
        del fields["edge_units"]
        return fields | {
            "schedule": request.schedules[fields["schedule"]],
            "recompute": request.recomputations[fields["recompute"]],
            "sequence_parallel": fields["tensor"] > 1 and request.has_sequence_parallel,
            "embedding_units": int(self.edge_units[row]),
            "loss_units": int(self.edge_units[row]),
        }


def enumerate_layouts(request: PlanRequest) -> Layouts:
    """Return every legal layout of a job, each layout as one row of the columns."""
    # t c d P is the number of accelerators, and d b M is the minibatch. Tensor parallelism stays
    # inside a node, and divides heads and MLP. Experts are whole or split into t parts; the number
    # of accelerators that they are spread over divides t c d. Context parallelism divides a
    # sequence into 2 c equal parts, which balance the causal mask. If workers have several stages,
    # layers and edge units are divided evenly. Layouts whose schedule does not exist for P or M are
    # left out.
    splits = [
        (schedule, workers, stages, *degrees, data, size, request.minibatch // (data * size))
        for schedule, workers, stages in _all_pipes(request)
        for *degrees, data in _all_degrees(request, workers)
        for size in _sizes(request, data)
    ]
    if not splits:
        raise ValueError(_no_layout_text(request))
    # flash attention keeps no scores, which selective recomputation would free
    skipped_mode = "selective" if request.model.flash_attention else None
    modes = [mode for mode in request.recomputations if mode != skipped_mode]
    options = [
        (request.recomputations.index(recompute), zero, units)
        for recompute in request.allowed("recompute", modes)
        for zero in request.allowed("zero", ZERO)
        for units in request.edge_units
    ]
    # every split with every option, as the fields of `Layouts` in their order
    split_rows = np.repeat(np.array(splits, np.int64), len(options), axis=0)
    option_rows = np.tile(np.array(options, np.int64).reshape(-1, 3), (len(splits), 1))
    layouts = Layouts(*np.hstack([split_rows, option_rows]).T)
    layouts = layouts.take(_is_legal(request, layouts))
    columns = [*layouts[:3], layouts.microbatches, layouts.edge_units, layouts.recompute]
    refusals = _reasons_by_class(columns, lambda row: _table_refusal(request, layouts, row))
    layouts = layouts.take(refusals == "")
    if not len(layouts):
        raise ValueError(_no_layout_text(request, *refusals[:1]))
    layouts = layouts.take(~_is_repeated(request, layouts))
    lacks = _launcher_refusals(request, layouts)
    for name in ("tensor", "context", "expert"):
        refusals = lacks[getattr(layouts, name) > 1]
        if len(refusals) and "" not in refusals:
            text = f"no layout has {name} above 1: {min(refusals, key=len)}"
            warnings.warn(text, Notice, stacklevel=2)
    layouts = layouts.take(lacks == "")
    if not len(layouts):
        raise ValueError(_no_layout_text(request, lacks[0]))
    return layouts


def layout_workload(request: PlanRequest, layouts: Layouts, row: int) -> Workload:
    """Return the workload of one layout."""
    layout = layouts.described(request, row)
    is_default = request.model.moe is None or layout["expert_tensor"] == layout["tensor"]
    return Workload(
        request.model,
        layout["microbatch_size"] * layout["microbatches"],
        tensor_parallel=layout["tensor"],
        data_parallel=layout["data"],
        sequence_parallel=layout["sequence_parallel"],
        recompute=layout["recompute"],
        context_parallel=layout["context"],
        expert_parallel=layout["expert"],
        expert_tensor_parallel=0 if is_default else layout["expert_tensor"],
        zero=layout["zero"],
        embedding_units=layout["embedding_units"],
        loss_units=layout["loss_units"],
        **{**default_overlap(request.launcher, layout["zero"]), **request.shared},
    )


def program_shape(request: PlanRequest, layouts: Layouts, row: Index) -> ProgramShape:
    """Return the program shape of a layout: schedule, workers and stages per worker."""
    workers, per_worker = int(layouts.pipeline[row]), int(layouts.stages_per_worker[row])
    return ProgramShape(request.schedules[layouts.schedule[row]], workers, per_worker)


def _launcher_refusals(request: PlanRequest, layouts: Layouts) -> NumpyArray:
    """Return for each layout why the launcher cannot run it; "" if it can."""
    if not request.launcher:
        return np.full(len(layouts), "", object)
    # A launcher may refuse schedules, numbers of microbatches that P does not divide, and
    # combinations of exchanges. So one layout is checked for each class of layouts that are equal
    # in all of these. `small` has fewer microbatches, in a number that every schedule can build:
    # 2 P plus the remainder of M over P.
    has_groups = layouts.microbatches % layouts.pipeline == 0
    few_microbatches = 2 * layouts.pipeline + layouts.microbatches % layouts.pipeline
    columns = layouts._asdict() | {
        "microbatches": np.minimum(layouts.microbatches, few_microbatches),
        "microbatch_size": np.ones_like(layouts.microbatch_size),
    }
    small = Layouts(**columns)
    degrees = ("tensor", "context", "expert", "expert_tensor", "data")
    # a class depends on which exchanges exist, but not on degrees
    classes = columns | {name: columns[name] > 1 for name in degrees}
    classes["microbatches"] = has_groups
    relations = layouts.expert_tensor == layouts.tensor, layouts.data % layouts.expert == 0

    def find_reason(row: int) -> str:
        workload = layout_workload(request, small, row)
        table = build_table(program_shape(request, small, row), int(small.microbatches[row]))
        software = request.system, request.stack, request.launcher
        return machine_launches(workload, table, *software)[0].refusal

    return _reasons_by_class([*classes.values(), *relations], find_reason)


def _is_legal(request: PlanRequest, rows: Layouts) -> Bool[NumpyArray, " layouts"]:
    """Return for each layout whether schedule, stages, microbatches and ZeRO go together."""
    layers = int(request.model.layers) + 2 * rows.edge_units
    max_layers = -(-layers // rows.stages)  # layers of the fullest stage (rounded up)
    is_even = (rows.stages_per_worker == 1) | (max_layers * rows.stages / layers <= 1 + UNEVEN)
    is_even |= "stages_per_worker" in request.choices
    is_even &= rows.stages <= layers
    needs_groups = np.array([name == IN_GROUPS for name in request.schedules])[rows.schedule]
    has_groups = ~needs_groups | (rows.microbatches % rows.pipeline == 0)
    can_split = (rows.zero == 0) | (rows.data * rows.context > 1)  # ZeRO needs several replicas
    return is_even & has_groups & can_split


def _reasons_by_class(columns: Columns, find_reason: Callable[[int], str]) -> NumpyArray:
    """Return the reason of each row; `find_reason` is called once for rows with equal columns."""
    first_rows, classes = row_classes(columns)
    return np.array([find_reason(row) for row in first_rows.tolist()], object)[classes]


def _table_refusal(request: PlanRequest, layouts: Layouts, row: int) -> str:
    """Return why a layout has no table, or why block:N is impossible; "" if both are fine."""
    shape = program_shape(request, layouts, row)
    reason = refusal(shape, int(layouts.microbatches[row]))
    is_block = ":" in request.recomputations[layouts.recompute[row]]
    if is_block and not reason:
        table = build_table(shape, 2 * shape.workers)  # layers do not depend on microbatches
        try:
            assign_layers(layout_workload(request, layouts, row), table)
        except checks.MismatchError as error:
            return str(error)
    return reason


def _is_repeated(request: PlanRequest, rows: Layouts) -> Bool[NumpyArray, " layouts"]:
    """Return for each layout without edge units whether all stages have equally many layers."""
    repeated = np.zeros(len(rows), bool)
    if request.edge_units != EDGE_UNITS:
        return repeated
    for schedule, workers, stages in {*zip(*(column.tolist() for column in rows[:3]), strict=True)}:
        if workers * stages > request.model.layers:
            continue
        table = build_table(ProgramShape(request.schedules[schedule], workers, stages), 2 * workers)
        layers, layers_with_units = (
            stage_layers(request.model, table, (units, units)) for units in EDGE_UNITS
        )
        is_pipe = (rows.schedule == schedule) & (rows.pipeline == workers)
        is_pipe &= rows.stages_per_worker == stages
        has_without_units = (is_pipe & (rows.edge_units == 0)).any()
        if has_without_units and np.array_equal(layers, layers_with_units):
            repeated |= is_pipe & (rows.edge_units == 1)
    return repeated


def _all_pipes(request: PlanRequest) -> list[tuple[int, int, int]]:
    """List (index of the schedule, workers P, stages per worker V) of a job."""
    pipes = []
    num_layers = int(request.model.layers) + 2 * max(request.edge_units)
    for index, name in enumerate(request.schedules):
        for workers in request.allowed("pipeline", checks.divisors(request.gpus)):
            limit = num_layers // workers
            if "stages_per_worker" not in schedules.find(name).options:
                two_workers = schedules.build(name, num_workers=2, num_microbatches=4)
                stage_counts: Sequence[int] = [two_workers.num_stages // 2]
            elif workers == 1:
                continue  # on one worker, more stages change nothing
            elif "stages_per_worker" in request.choices:
                stage_counts = range(2, limit + 1)
            else:
                stage_counts = range(2, min(limit, MAX_STAGES) + 1)
            pipes += [
                (index, workers, stages)
                for stages in request.allowed("stages_per_worker", stage_counts)
                if stages <= limit
            ]
    return pipes


def _all_degrees(request: PlanRequest, workers: int) -> list[tuple[int, int, int, int, int]]:
    """List all (tensor, context, expert, expert_tensor, data) that use all accelerators."""
    if request.gpus % workers:
        return []
    num_experts = 1 if request.model.moe is None else int(request.model.moe.experts)
    stage_gpus, degrees = request.gpus // workers, []
    for tensor in request.allowed("tensor", checks.divisors(stage_gpus)):
        if not _can_split_layer(request, tensor):
            continue
        for context in request.allowed("context", checks.divisors(stage_gpus // tensor)):
            data = stage_gpus // tensor // context
            if not (_can_split_sequence(request, context) and request.allowed("data", [data])):
                continue
            for parts in request.allowed("expert_tensor", _expert_parts(request, tensor)):
                counts = [n for n in checks.divisors(num_experts) if stage_gpus % (n * parts) == 0]
                experts = request.allowed("expert", counts)
                degrees += [(tensor, context, expert, parts, data) for expert in experts]
    return degrees


def _expert_parts(request: PlanRequest, tensor: int) -> list[int]:
    """List the numbers of parts that an expert may be split into; by default 1 and t."""
    moe = request.model.moe
    if moe is None:
        return [1]
    parts = checks.divisors(tensor) if "expert_tensor" in request.choices else sorted({1, tensor})
    return [part for part in parts if int(moe.expert_hidden) % part == 0]


def _can_split_layer(request: PlanRequest, tensor: int) -> bool:
    """Return whether t accelerators can split a layer; by default, only within a node."""
    if tensor > request.system.gpus_per_node and "tensor" not in request.choices:
        return False
    sizes = (request.model.heads, request.model.kv_heads, request.model.ffn_hidden)
    return all(int(size) % tensor == 0 for size in sizes)


def _can_split_sequence(request: PlanRequest, context: int) -> bool:
    """Return whether c accelerators can split a sequence; by default, not into short pieces."""
    sequence = int(request.model.sequence)
    if context == 1:
        return True
    is_long = sequence // context >= MIN_TOKENS or "context" in request.choices
    return is_long and sequence % (2 * context) == 0


def _sizes(request: PlanRequest, data: int) -> list[int]:
    """List microbatch sizes, which divide a replica's sequences; [] if d does not divide d b M."""
    sequences, remainder = divmod(request.minibatch, data)
    return [] if remainder else request.allowed("microbatch_size", checks.divisors(sequences))


def _allowed_text(request: PlanRequest) -> str:
    """Describe the requested degrees, or the limit by the size of a node."""
    texts = [
        f"--{name} {' or '.join(map(str, request.choices[name]))} is asked for"
        for name in ("tensor", "context", "expert", "expert_tensor", "data", "pipeline")
        if name in request.choices
    ]
    node_size = f"{float(request.system.gpus_per_node):g}"
    return ", ".join(texts) or f"tensor at most {node_size}, as many as a node has"


def _no_layout_text(request: PlanRequest, refused: str = "") -> str:
    """Return the condition that leaves no layout, or `refused`, the first reason of a refusal."""
    what = f"no layout of {request.model.name} on {request.gpus} accelerators is legal: "
    pipes = _all_pipes(request)
    if not pipes:
        return what + (
            f"no number of workers that divides {request.gpus} leaves a layer for every stage "
            f"({int(request.model.layers)} layers)"
        )
    degrees = [degree for pipe in pipes for degree in _all_degrees(request, pipe[1])]
    if not degrees:
        return what + (
            "no degrees of tensor, context and data parallelism use all accelerators and divide "
            f"heads, MLP and sequence ({_allowed_text(request)})"
        )
    replicas = sorted({degree[-1] for degree in degrees})
    if all(request.minibatch % data for data in replicas):
        return what + (
            f"a minibatch of {request.minibatch} is divided by none of the possible numbers of "
            f"replicas, {', '.join(map(str, replicas))}"
        )
    if refused:
        return what + refused
    return what + "the requested schedules, stages, ZeRO and microbatches exclude each other"
