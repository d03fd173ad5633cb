"""The payload of an explorer page: data of schedules with their costs, memory and programs.

A slider sets a factor for all costs of one kind. With the initial factors, the costs on the page
equal those of `evaluate`. If messages are free, the slider of messages starts at 0, and its factor
1 makes a message as long as the mean forward.
"""

import base64
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.form import formula
from pipejax.analysis.runs.evaluate import ActivationMemory, Evaluation, activation_memory
from pipejax.analysis.runs.timeline import timed_beside_cells
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import ArgumentError
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.engine.lowering.program import ZERO, Program
from pipejax.engine.pricing import lower_and_price
from pipejax.plots import palette
from pipejax.plots.caption import link_settings
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import (
    COMPUTE,
    HOST,
    IN_FLIGHT,
    KINDS,
    SHARDING,
    STEP_END,
    AnyPhase,
    CustomPhase,
    Phase,
    ScheduleError,
)
from pipejax.schedules.table.held_activations import MemoryChanges, MemoryOps, with_items
from pipejax.schedules.table.links import LINKS
from pipejax.schedules.table.table import ScheduleTable

MAX_FACTOR, MAX_FREE_FACTOR = 4.0, 1.0  # right end of sliders, and of the slider of free messages
OF_COMPUTE = {phase.name: KINDS[phase].name for phase in COMPUTE}
OF_OTHERS = {
    "pair": "fused pair",
    **{phase.name: KINDS[phase].name for phase in (*HOST, *SHARDING, *STEP_END)},
    "latency": "latency",
    "transmit": "message",
}


class Factor(NamedTuple):
    """A slider, which multiplies all costs of one kind by a factor."""

    key: str  # kind of cost, as in `CostLayout.groups`
    name: str  # label of the slider
    initial: float  # initial factor: 1, or 0 if messages are free
    largest: float  # largest factor of the slider; users can type larger factors


def kinds(run: Evaluation) -> tuple[str, ...]:
    """Return the kind of each cost; "" for sums of other costs, which the page computes."""
    summed = {"message"} | ({"pair"} if run.costs.pair is None else set())
    return tuple("" if kind in summed else kind for kind in run.program.layout.cost_names)


def list_factors(
    runs: Sequence[Evaluation], other_phases: Collection[AnyPhase] = ()
) -> list[Factor]:
    """List a slider for each kind of cost of the runs and of phases in other tables."""
    used_kinds: set[str] = set()  # kinds with a cost above 0 that a program reads
    for run in runs:
        cost_kinds = np.array(kinds(run))
        program, vector = lower_and_price(run.table, run.costs, run.links)
        has_cost = read_by(program) & (vector > 0) & (cost_kinds != "")
        used_kinds |= {*cost_kinds[has_cost].tolist()}
    for phase in other_phases:
        if phase.kind.time and any(np.any(run.costs.time(phase)) for run in runs):
            used_kinds.add(phase.name)
    custom_phases = (phase for run in runs for phase in run.table.grammar.custom_phases)
    names = {**OF_COMPUTE, **{phase.name: phase.kind.name for phase in custom_phases}, **OF_OTHERS}
    if "latency" in used_kinds:
        names["transmit"] = "transmit time"
    has_free_messages = not used_kinds & {"latency", "transmit"}
    if has_free_messages and any(len(run.program.messages.producer) for run in runs):
        used_kinds.add("transmit")
    used_names = {key: name for key, name in names.items() if key in used_kinds}
    factors = {key: Factor(key, name, 1.0, MAX_FACTOR) for key, name in used_names.items()}
    if has_free_messages and "transmit" in factors:
        factors["transmit"] = Factor("transmit", names["transmit"], 0.0, MAX_FREE_FACTOR)
    return [*factors.values()]


def base_costs(
    run: Evaluation, factors: Sequence[Factor], unit: float
) -> Float[NumpyArray, " costs"]:
    """Return the costs [s] that factors multiply; free messages get the time `unit` [s]."""
    _, vector = lower_and_price(run.table, run.costs, run.links)
    base, cost_kinds = vector.copy(), np.array(kinds(run))
    for factor in factors:
        if factor.initial == 0:
            base[cost_kinds == factor.key] = unit
    return base


def read_by(program: Program) -> Bool[NumpyArray, " costs"]:
    """Return a mask (costs) of the costs that a program reads under at least one link model."""
    groups = np.array(program.layout.cost_names)
    is_read = np.zeros(len(groups), bool)
    is_read[program.duration_index] = True
    is_read[program.pair_index.ravel()] = True
    return is_read | np.isin(groups, ["latency", "transmit"])


def mean_forward(runs: Sequence[Evaluation]) -> float:
    """Return the mean forward time of all runs [s]; without forwards, the longest makespan."""
    times = (run.costs.forward for run in runs)
    means = [0.0 if time is None else float(np.mean(np.asarray(time))) for time in times]
    return float(np.mean(means)) or max(run.makespan for run in runs) or 1.0


MAX_FACETS = 12  # largest number of sums in a formula on the page
MAX_NODES = 200_000  # nodes of all programs that are searched, which takes a few seconds


class FormSearch:
    """Search for closed forms of programs, with a limit on the total number of nodes."""

    def __init__(self) -> None:
        self.nodes_left = MAX_NODES

    def form(
        self,
        program: Program,
        run: Evaluation,
        factors: Sequence[Factor],
        base: Float[NumpyArray, " costs"],
    ) -> dict[str, Any] | None:
        """Return a run's closed form as JSON; None if there is none or the program is too large."""
        overlaps = run.costs.pair_factor is not None and program.layout.num_pairs
        if overlaps or program.num_nodes > self.nodes_left:
            return None
        self.nodes_left -= program.num_nodes
        cost_kinds = np.array(kinds(run))
        parameters: dict[str, Any] = {}
        units: list[float] = []
        is_time: list[bool] = []
        fields = {phase.name: phase.kind.time for phase in run.table.grammar.timed_phases}
        for factor in factors:
            costs = base[cost_kinds == factor.key]
            if costs.size and costs.max() > 0:
                # equal costs give a parameter in seconds; unequal costs give a factor for all
                is_uniform = bool(costs.min() == costs.max())
                field = fields.get(factor.key, factor.key)
                parameters[factor.key] = 1.0 if is_uniform else getattr(run.costs, field)
                units.append(float(costs[0]) if is_uniform else 1.0)
                is_time.append(is_uniform)
        weights = _weights(run.costs, parameters, fields)
        try:
            closed_form = formula(program, weights, max_facets=MAX_FACETS)
        except ValueError:  # the form would have too many sums
            return None
        return {
            "parameters": [*parameters],
            "units": units,
            "isTime": is_time,
            "facets": [[float(count) for count in facet] for facet in closed_form.facets],
            "exact": closed_form.exact,
            "gap": closed_form.gap,
        }


def _weights(
    costs: Costs, parameters: Mapping[str, Any], fields: Mapping[str, str]
) -> dict[str, Costs]:
    """Return {parameter: costs in which the fields of all other parameters are 0}."""
    # `fields` maps letters of phases to fields of `Costs`
    parameter_fields = {key: fields.get(key, key) for key in parameters}
    set_fields = {field for field, value in vars(costs).items() if value is not None}
    zeros = dict.fromkeys(set_fields - {*parameter_fields.values()}, 0.0)
    return {
        key: unchecked_costs(zeros | {parameter_fields[key]: value})
        for key, value in parameters.items()
    }


Packed = dict[str, Any]  # result of `pack`
WHOLE = ("int8", "int16", "int32")  # types of whole numbers; the narrowest is used
REAL = "float64"
LEVEL = 6  # level of zlib; higher levels take much longer and save a few percent
Programs = Mapping[str, Program | ScheduleError]  # by link model; an error if it cannot run


class StepView(NamedTuple):
    """Tokens and compute of a model's step, from which a page computes rates."""

    tokens: float  # tokens of the whole job
    mfu_seconds: float  # step time at the peak FLOP/s [s]


class Explored(NamedTuple):
    """A schedule on a page, with its run and memory sizes."""

    run: Evaluation
    name: str = ""  # replaces the schedule's name
    step: StepView | None = None  # None if no model gives the costs
    # (workers, slots) measured starts [s] if `run` is a replay; sliders do not change them
    recorded: Float[NumpyArray, "workers slots"] | None = None
    memory: ActivationMemory | None = None  # activation memory in `unit`; None: count activations
    unit: str = "activations"  # unit of memory: "activations" or "bytes"
    limits: Float[NumpyArray, " workers"] | None = None  # (workers) limit of activations
    static: Float[NumpyArray, " workers"] | None = None  # (workers) memory of the whole step


class PagePhases(NamedTuple):
    """Phases of all tables on a page; each phase has a code that is unique on the page."""

    own_phases: tuple[CustomPhase, ...]  # phases that tables define; codes follow the usual ones

    @classmethod
    def from_tables(cls, tables: Iterable[ScheduleTable]) -> "PagePhases":
        """Collect the phases that tables define, without duplicates."""
        own_phases: list[CustomPhase] = []
        for grammar in dict.fromkeys(table.grammar for table in tables):
            for phase in (*grammar.lane_sharding, *grammar.custom_phases):
                if not any(_is_equal(phase, other) for other in own_phases):
                    own_phases.append(phase)
        return cls(tuple(own_phases))

    def as_json(self, used: Iterable[AnyPhase]) -> dict[int, dict[str, str]]:
        """Return {code: name, lane and colours} of all phases; colours of `used` are distinct."""
        looks = {**palette.USUAL, **palette.phase_looks([*used, *self.own_phases])}
        phases: dict[int, AnyPhase] = {int(phase): phase for phase in KINDS}  # no idle cell
        phases |= dict(enumerate(self.own_phases, len(Phase)))
        return {
            code: {
                "letter": phase.name,
                "name": looks[phase.name].name,
                "lane": phase.kind.lane,
                "fill": looks[phase.name].fill,
                "shade": looks[phase.name].shade,
                "deep": looks[phase.name].deep or looks[phase.name].fill,
            }
            for code, phase in phases.items()
        }

    def codes(self, grammar: Grammar) -> Int[NumpyArray, " codes"]:
        """Return an array: index it by a code of the grammar to get the code on the page."""
        page_codes = np.arange(len(grammar.phases))
        for phase in (*grammar.lane_sharding, *grammar.custom_phases):
            is_equal = [_is_equal(phase, other) for other in self.own_phases]
            page_codes[phase] = len(Phase) + is_equal.index(True)
        return page_codes


def _is_equal(phase: CustomPhase, other: CustomPhase) -> bool:
    return (phase.name, phase.kind) == (other.name, other.kind)


def payload(
    explored: Sequence[Explored], *, unit: str, choices: Sequence[Evaluation] = ()
) -> dict[str, Any]:
    """Collect the title, colours and data of a page as JSON; all runs must have equal links."""
    # The page first shows the runs `explored`; users can choose the runs `choices` instead.
    runs = [entry.run for entry in explored]
    if runs[0].links.eager_below:
        raise ArgumentError(
            "eager_below",
            runs[0].links.eager_below,
            "explore does not support eager_below: its sliders would change which messages are "
            "buffered; name the pairs of workers instead, as pair_links 0-1=queued",
        )
    other_phases = {phase for run in choices for phase in run.table.used_phases}
    phases = PagePhases.from_tables(run.table for run in (*runs, *choices))
    used_phases = [phase for run in runs for phase in run.table.used_phases]
    factors, mean, links = list_factors(runs, other_phases), mean_forward(runs), runs[0].links
    programs = [_programs_by_model(run) for run in runs]
    bases = [base_costs(run, factors, mean) for run in runs]
    forms: list[dict[str, Any]] = [{} for _ in runs]
    search = FormSearch()
    for model in sorted(LINKS, key=lambda name: name != links.model):  # first the shown model
        for k, entry in enumerate(explored):
            program = programs[k][model]
            # ops of a replay all have different times, so its form would have too many parameters
            if isinstance(program, Program) and entry.recorded is None:
                forms[k][model] = search.form(program, entry.run, factors, bases[k])
    other_parts = [
        (Explored(run), _programs_by_model(run), base_costs(run, factors, mean)) for run in choices
    ]
    count = len(runs) + sum(entry.recorded is not None for entry in explored)
    subtitle = f"{runs[0].workers} workers, {runs[0].microbatches} microbatches"
    if len({(run.workers, run.microbatches) for run in runs}) > 1:
        subtitle = "under one time axis"
    return {
        "title": explored[0].name or runs[0].schedule if count == 1 else f"{count} schedules",
        "subtitle": subtitle,
        "seconds": palette.SECONDS,
        "unit": unit,
        "links": list(LINKS),
        "link": links.model,
        "scope": link_settings(links),
        "phases": phases.as_json(used_phases),
        "factors": [factor._asdict() for factor in factors],
        "schedules": [
            _schedule_json(entry, programs[k], bases[k], factors, phases) | {"forms": forms[k]}
            for k, entry in enumerate(explored)
        ],
        "choices": [_schedule_json(*parts, factors, phases) for parts in other_parts],
    }


def _programs_by_model(run: Evaluation) -> Programs:
    """Lower the table of a run under every link model; keep all other settings of links."""
    programs: dict[str, Program | ScheduleError] = {}
    for model in LINKS:
        links = run.links.with_model(model)
        try:
            programs[model], _ = lower_and_price(run.table, run.costs, links)
        except ScheduleError as error:
            programs[model] = error
    return programs


def _schedule_json(
    explored: Explored,
    programs: Programs,
    base: Float[NumpyArray, " costs"],
    factors: Sequence[Factor],
    phases: PagePhases,
) -> dict[str, Any]:
    """Return the data of one schedule as JSON; ops have the order of their cells."""
    run, recorded = explored.run, explored.recorded
    nodes = [p.node_of_cell for p in programs.values() if isinstance(p, Program)]
    cells = np.flatnonzero(np.any(np.stack(nodes), axis=0))  # with a node in at least one program
    op_of_cell = np.full(run.table.cells.phase.size, -1)
    op_of_cell[cells] = np.arange(len(cells))
    extra_ops = np.unique(_node_keys(run.program, timed_beside_cells(run)), axis=0)
    recorded_starts = None
    if recorded is not None:  # set the costs of a replay that its program does not read to 0
        base = np.where(read_by(run.program), base, 0.0)
        starts = np.append(recorded.ravel()[cells], np.full(len(extra_ops), np.nan))
        recorded_starts = {"name": "as it ran", "starts": pack({"start": starts})}
    keys = ["", *(factor.key for factor in factors)]
    kind_numbers = np.array([keys.index(kind) if kind in keys else 0 for kind in kinds(run)])
    return {
        "name": explored.name or run.schedule,
        "workers": run.workers,
        "stagesPerWorker": run.table.stages_per_worker,
        "stages": run.stages,
        "microbatches": run.microbatches,
        "pipes": run.table.num_pipes,
        "slices": run.table.grammar.slices,
        "peakInFlight": run.peak_in_flight.tolist(),
        "ops": _packed_ops(run, cells, extra_ops, phases),
        "messages": _packed_messages(run.program, op_of_cell),
        "costs": pack({"base": base, "kind": kind_numbers, **_fused_pairs(run)})
        | {
            "firstPair": run.program.layout.first_pair if run.costs.pair is None else -1,
            "firstLink": run.program.layout.first_link,
        },
        "memory": {
            **_packed_memory(run, explored.memory or activation_memory(run), op_of_cell),
            "unit": explored.unit,
            "limits": None if explored.limits is None else explored.limits.tolist(),
            "static": None if explored.static is None else explored.static.tolist(),
        },
        "step": None if explored.step is None else explored.step._asdict(),
        "recorded": recorded_starts,
        "forms": {},  # schedules to choose are too many for a search of their forms
        "programs": {
            model: {"error": program.reason}
            if isinstance(program, ScheduleError)
            else _packed_program(program, cells, extra_ops)
            for model, program in programs.items()
        },
    }


def _fused_pairs(run: Evaluation) -> dict[str, NumpyArray]:
    """Return {"pair": (pairs, 2) cost indices of both ops, "overlap": (pairs) overlap factors}."""
    # A pair takes as long as the longer op plus the factor times the shorter op.
    program, layout = run.program, run.program.layout
    factor = 1.0 if run.costs.pair_factor is None else run.costs.pair_factor
    by_stage = np.asarray(factor) if np.ndim(factor) == 2 else np.reshape(factor, (-1, 1))
    overlap = np.broadcast_to(by_stage, layout.op_shape).ravel()[program.pair_stage]
    return {"pair": np.asarray(program.pair_index), "overlap": overlap}


def _node_keys(
    program: Program, nodes: Int[NumpyArray, " nodes"]
) -> Int[NumpyArray, "nodes fields"]:
    """Return (nodes, 4) phase, stage, microbatch and worker, which identify a node everywhere."""
    fields = program.phase, program.stage, program.microbatch, program.worker
    return np.stack([np.asarray(field)[nodes] for field in fields], axis=1)


def _packed_ops(
    run: Evaluation,
    cells: Int[NumpyArray, " ops"],
    extra_ops: Int[NumpyArray, "extra_ops fields"],
    phases: PagePhases,
) -> Packed:
    """Pack the fields of ops: first ops in cells, then all-reduces and updates."""
    table, extra_fields = run.table, extra_ops.T
    fields = {
        name: np.append(getattr(table.cells, name).ravel()[cells], extra)
        for name, extra in zip(("phase", "stage", "microbatch"), extra_fields[:3], strict=True)
    }
    fields["phase"] = phases.codes(table.grammar)[fields["phase"]]
    zeros = np.zeros(len(extra_ops), int)
    partners = {
        f"with_{name}": np.append(getattr(table.partners, name).ravel()[cells], zeros)
        for name in ("phase", "stage", "microbatch")
    }
    worker = np.append(cells // table.num_slots, extra_fields[3])
    pipe = np.append(table.pipe.ravel()[cells], zeros)
    placement = pack({"placement": table.placement})
    return pack(fields | partners | {"worker": worker, "pipe": pipe}) | {"placement": placement}


def _packed_messages(program: Program, op_of_cell: Int[NumpyArray, " cells"]) -> Packed:
    """Pack messages with the numbers of their producer ops and consumer ops."""
    messages = program.messages
    cell_of_node = np.zeros(program.num_nodes, int)
    cell_of_node[program.node_of_cell.ravel()] = np.arange(program.node_of_cell.size)
    return pack(
        {
            "producer": op_of_cell[cell_of_node[messages.producer]],
            "consumer": op_of_cell[cell_of_node[messages.consumer]],
            "phase": messages.phase,
            "stage": messages.stage,
            "microbatch": messages.microbatch,
        },
        steps=("producer", "consumer"),
    )


def _packed_program(
    program: Program, cells: Int[NumpyArray, " ops"], extra_ops: Int[NumpyArray, "extra_ops fields"]
) -> Packed:
    """Pack a program: the edges of each node, as distances to predecessors and indices of lags."""
    preds, lags = np.asarray(program.preds), np.asarray(program.lag_index)
    is_edge = (preds > 0) | (lags != ZERO)  # drop edges from the source, which ends at time 0
    node, column = np.nonzero(is_edge)
    extra_nodes = program.beside_cells
    keys = [tuple(row) for row in _node_keys(program, extra_nodes).tolist()]
    node_by_key = dict(zip(keys, extra_nodes.tolist(), strict=True))
    return pack(
        {
            "degree": is_edge.sum(axis=1),
            "back": node - preds[node, column],
            "lag": lags[node, column],
            "durations": np.asarray(program.duration_index),
            "op": np.append(
                program.node_of_cell.ravel()[cells],
                [node_by_key[tuple(row)] for row in extra_ops.tolist()],
            ).astype(int),
            "carrier": program.messages.carrier,
            "arrives": program.messages.lag_index,
        },
        steps=("lag", "durations", "op", "carrier", "arrives"),
    )


def _packed_memory(
    run: Evaluation, memory: ActivationMemory, op_of_cell: Int[NumpyArray, " cells"]
) -> Packed:
    """Pack changes of activation memory: moment, worker, index of a size, number of such sizes."""
    # A moment is 2 x op for the start of an op, and 2 x op + 1 for its end. The index of a size is
    # part x count + stage; if sizes differ by microbatch, each (stage, microbatch) is a stage.
    ops, table = MemoryOps.from_content(run.table), run.table
    number = op_of_cell[ops.worker * table.num_slots + ops.start]
    moments = ops._replace(start=2 * number, end=2 * number + 1)
    needed_by_w = memory.weight_share * memory.sizes
    sizes = np.stack([memory.sizes, needed_by_w, memory.checkpoints, *memory.at_work])
    count = run.stages
    if sizes.ndim == 3:
        microbatch = table.ops.microbatch[np.isin(table.ops.phase, np.unique(ops.phase))]
        moments = moments._replace(stage=moments.stage * run.microbatches + microbatch)
        count *= run.microbatches
    parts = MemoryChanges.from_ops(moments, table.grammar, at_work=bool(memory.at_work.any()))
    return pack(
        {
            "size": with_items(sizes.reshape(len(sizes), -1), parts.items).ravel(),
            "share": np.array([*IN_FLIGHT, *parts.items]),
            "moment": parts.time,
            "place": parts.part * count + parts.stage % count,
            "change": parts.change,
            "worker": parts.worker,
        },
        steps=("moment", "worker"),
    )


# Arrays in a page: whole numbers in as few bytes as they need, deflated, in base64. The browser
# unpacks them with `DecompressionStream`. Positions are stored as differences, which repeat in a
# schedule and so compress well. Differences >= 0 are stored plus 1, because 0 means no position.


def pack(arrays: Mapping[str, NumpyArray], steps: tuple[str, ...] = ()) -> Packed:
    """Compress arrays into JSON; arrays in `steps` become differences of their nonzero values."""
    packed = {}
    for name, array in arrays.items():
        flat = np.ravel(array)
        if name in steps:
            flat = flat.astype(np.int64)
            step = np.diff(flat[flat != 0], prepend=0)
            flat[flat != 0] = step + (step >= 0)  # 0 marks no value: 5, 5, 0, 6 -> 6, 1, 0, 2
        narrowest = REAL
        if flat.dtype.kind != "f":
            largest = max(int(flat.max(initial=0)), -int(flat.min(initial=0)))
            narrowest = next(kind for kind in WHOLE if largest <= np.iinfo(kind).max)
        packed[name] = flat.astype(narrowest)
    # widest numbers first, so the offset of each array is a multiple of its item size
    order = sorted(packed, key=lambda name: -packed[name].itemsize)
    parts = (packed[name] for name in order)
    content = b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)
    return {
        "arrays": [
            [name, packed[name].dtype.name, packed[name].size, name in steps] for name in order
        ],
        "data": base64.b64encode(zlib.compress(content, LEVEL)).decode(),
    }


# Write the page: one file with its style sheet, its scripts and its data

HERE = Path(__file__).parent
# JavaScript modules, each after the modules that it imports
SCRIPTS = (
    *("text", "unpacking", "schedule", "choice"),
    *("state", "palette", "residuals", "bars", "curves", "panels", "sliders", "input", "explorer"),
)
# import and export statements of modules, which the page replaces by functions
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def page(
    explored: Sequence[Explored],
    *,
    unit: str = "s",
    show: Mapping[str, bool] | None = None,
    view: tuple[float, float] | None = None,
    title: str = "",
    choices: Sequence[Evaluation] = (),
) -> str:
    """Return the HTML of a page that shows runs and recomputes them at other op times."""
    scene = payload(explored, unit=unit, choices=choices) | {"show": dict(show or {}), "view": view}
    scene["title"] = title or scene["title"]
    return rendered(
        HERE / "page.html",
        title=f"{scene['title']}, {scene['subtitle']}",
        style=_read("page.css"),
        script="\n".join(map(_script, SCRIPTS)),
        # < is escaped, so no text in the data can end the script element
        scene=json.dumps(scene, allow_nan=False).replace("<", "\\u003c"),
    )


def rendered(template: Path, **values: Any) -> str:
    """Fill an HTML template; values are escaped unless the template marks them as safe."""
    from jinja2 import Environment, StrictUndefined  # optional: only the command line needs it

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def _script(name: str) -> str:
    """Wrap a JavaScript module in a function, because pages on disk cannot load modules."""
    text = _read(f"{name}.js")
    exported = ", ".join(match[1] for match in _EXPORT.findall(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = modules.\2;", text))
    return f"modules.{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
