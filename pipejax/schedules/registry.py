"""Published schedules: builders with sources and checks, and recognition of a table's schedule."""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from pipejax.base.cached_method import cached_method
from pipejax.base.checks import MAX_COUNT, check_fits, check_types, whole_number, wrong
from pipejax.base.display import ResultDict
from pipejax.schedules.builders.published import ANY, EXTENDED_BUILDERS, USUAL_BUILDERS, Builder
from pipejax.schedules.cells.cells import BYTES_PER_CELL
from pipejax.schedules.cells.ops import AnyPhase, Phase
from pipejax.schedules.legality import check_shares, check_slots
from pipejax.schedules.table.slot_simulation import without_idle_slots
from pipejax.schedules.table.table import ScheduleTable

OWN_ORDER = "own"  # name of a schedule whose table has the name of another schedule
BUILT = "_built"  # attribute of tables that a builder made from sizes only: their names are right
Rows = tuple[tuple[AnyPhase, ...], *tuple[bytes, ...]] | tuple[()]  # equal for equal rows
SIZES = {"num_workers", "num_microbatches", "stages_per_worker", "waves", "slices"}


def registered(table: ScheduleTable) -> tuple[str, Mapping[str, int]] | None:
    """Find the registered schedule with the same rows as a table, and its options, or None.

    Args:
      table: any schedule, without communication.

    Returns:
      Name and options of the builder. Planned schedules, whose rows depend on times, are not tried.
      Recomputations (R) do not count: they do not change the order of other ops.

    Example:
      >>> import pipejax as pj
      >>> rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
      >>> pj.traces.registered(pj.ScheduleTable.from_rows(rows))
      ('1f1b', {})
    """
    check_types(table=(table, ScheduleTable))
    return _find_schedule(table, (Phase.R,))


def _find_schedule(
    table: ScheduleTable, ignored: tuple[Phase, ...], names: Collection[str] | None = None
) -> tuple[str, Mapping[str, int]] | None:
    """Find the name and options of the registered schedule with the rows of a table, or None."""
    # Ops of ignored phases do not count. With `names`, only these schedules are tried.
    slices, per_worker = table.grammar.slices, table.num_stages // table.num_workers
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches // slices}
    values = {"stages_per_worker": per_worker, "waves": per_worker // 2, "slices": slices}
    has_offloads = Phase.O in table.used_phases
    rows = _rows_without_idle(table, ignored)
    # try the table's name first, because most names are right
    for name in sorted(names or REGISTRY, key=lambda name: name != table.name):
        builder = REGISTRY[name]
        options = {key: value for key, value in values.items() if key in builder.options}
        if builder.planned or (not options and builder.stages_per_worker != per_worker):
            continue
        if has_offloads and "offload" not in builder.options:
            continue
        arguments = name, tuple((size | options).items()), ignored
        # rows are built again only if their hashes are equal
        if _hash_of_rows(*arguments) == hash(rows) and _registered_rows(*arguments) == rows:
            return name, options
    return None


@functools.lru_cache(maxsize=4096)
def _hash_of_rows(name: str, *arguments: Any) -> int:
    return hash(_registered_rows(name, *arguments))


def _registered_rows(
    name: str, options: tuple[tuple[str, int], ...], ignored: tuple[Phase, ...]
) -> Rows:
    """Return a registered schedule's rows; empty if it does not exist for these numbers."""
    try:
        with without_idle_slots():
            return _rows_without_idle(BUILT_IN[name].function(**dict(options)), ignored)
    except ValueError:
        return ()


@cached_method
def schedule_name(table: ScheduleTable) -> str:
    """Return the name of a table's schedule; if unknown, the table's own name or "own"."""
    if vars(table).get(BUILT):
        return table.name
    # R is ignored: launchers recompute by a further option, which does not change the order
    match, builder = _find_schedule(table, (Phase.R,)), REGISTRY.get(table.name)
    if match is not None or (table.grammar.is_usual and interleaved_groups(table)):
        return match[0] if match else "interleaved-1f1b"
    # a file can have any name, and another order of messages makes another schedule
    return table.name if builder is None or builder.planned else OWN_ORDER


@cached_method
def matching_name(table: ScheduleTable, names: tuple[str, ...]) -> str:
    """Return the first of these schedules, without options, that has a table's rows; else ""."""
    match = _find_schedule(table, (Phase.R,), names)
    return match[0] if match else ""


@cached_method
def interleaved_groups(table: ScheduleTable) -> int:
    """Return the group size with which Megatron-LM builds this interleaved order, or 0."""
    sizes = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
    sizes["stages_per_worker"] = table.num_stages // table.num_workers
    if sizes["stages_per_worker"] < 2:
        return 0
    rows = _rows_without_idle(table, (Phase.R,))
    # the first group passes stage 0 before the first worker turns to its next stage
    first_row = (op for op in itertools.chain(*next(table.rows())) if op.phase != Phase.R)
    first = itertools.takewhile(lambda op: op.stage == 0, first_row)
    size = len({op.microbatch for op in first})
    name = "interleaved-1f1b" if table.grammar.is_usual else "combined-1f1b"
    options = tuple((sizes | {"group_size": size}).items())
    return size if size and _registered_rows(name, options, (Phase.R,)) == rows else 0


def has_same_order(table: ScheduleTable, other: ScheduleTable) -> bool:
    """Return whether two tables have the same ops in order, grammar and placement."""
    is_same = table.grammar == other.grammar and np.array_equal(table.placement, other.placement)
    return is_same and _rows_without_idle(table, ()) == _rows_without_idle(other, ())


@cached_method
def _rows_without_idle(table: ScheduleTable, ignored: tuple[Phase, ...]) -> Rows:
    """Return a table's rows without idle cells and without ops of ignored phases, as bytes."""
    members = [np.stack(cells[:3], axis=-1) for cells in (table.cells, table.partners)]
    ops = np.stack(members, axis=2, dtype=np.int64)  # (workers, slots, 2, 3)
    is_counted = ~np.isin(ops[..., 0], (Phase.IDLE, *ignored))
    is_pair = np.broadcast_to(is_counted.all(axis=2, keepdims=True), is_counted.shape)
    arrays = ops[is_counted], is_pair[is_counted], is_counted.sum(axis=(1, 2))
    phases = tuple(phase for phase in table.used_phases if phase not in ignored)
    return phases, *(array.tobytes() for array in arrays)


# modules with builders, in the order of lists of schedules
MODULES = (
    *("one_f_one_b", "chimera", "dualpipe", "zero_bubble"),
    *("v_shape", "asynchronous", "encoders"),
)
for _module in MODULES:
    importlib.import_module(f"pipejax.schedules.builders.{_module}")


def _with_checks(builder: Builder) -> Callable[..., ScheduleTable]:
    """Return a builder's function, extended by checks of its arguments."""
    signature = inspect.signature(builder.function)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    @functools.wraps(builder.function)
    def checked_build(*arguments: Any, **options: Any) -> ScheduleTable:
        """Check all arguments, build the table, and mark it if it follows from sizes alone."""
        bound = signature.bind(*arguments, **options).arguments
        for option, value in bound.items():
            is_count = signature.parameters[option].annotation in (int, int | None)
            if is_count and value is not defaults[option]:
                least = int(defaults[option] != 0)  # 0 is legal only if it is the default
                bound[option] = whole_number(value, option, minimum=least, maximum=MAX_COUNT)
            if signature.parameters[option].annotation is bool and not isinstance(value, bool):
                raise wrong(option, f"must be true or false, got {value!r}", value)
        if "slots" in bound:
            check_slots(bound["slots"])
            bound["slots"] = {**defaults["slots"], **bound["slots"]}
        if bound.get("stage_shares") is not None:
            check_shares(bound["stage_shares"], bound["num_workers"])
        check_size(builder, **defaults | bound)
        table = builder.function(**bound)
        vars(table)[BUILT] = not builder.planned and SIZES.issuperset(bound)
        return table

    return checked_build


def _registry(builders: Mapping[str, Builder]) -> Mapping[str, Builder]:
    """Return {name: builder that checks its arguments}."""
    return ResultDict(
        (name, builder._replace(function=_with_checks(builder), legal=builder.legal or ANY))
        for name, builder in builders.items()
    )


REGISTRY = _registry(USUAL_BUILDERS)  # builders with the default grammar
EXTENDED = _registry(EXTENDED_BUILDERS)  # builders with an extended grammar
BUILT_IN = {**REGISTRY, **EXTENDED}


def check_size(
    builder: Builder, *, num_workers: int, num_microbatches: int, **options: Any
) -> None:
    """Refuse a table that cannot fit into the memory of this machine, before it is built."""
    stages_per_worker = options.get("stages_per_worker", builder.stages_per_worker)
    if "waves" in options:
        stages_per_worker *= 2 * options["waves"]
    stages = num_workers * stages_per_worker
    slices = options.get("slices", 1)
    passes = num_microbatches * (num_workers if slices is None else slices)
    # a row has a column for each of its ops, and for each step of a microbatch through all stages
    cells = num_workers * 2 * max(stages_per_worker * passes, stages)
    num_bytes = cells * BYTES_PER_CELL + 2 * stages * passes * builder.bytes_per_op
    what = f"{num_workers} workers with {stages} stages and {num_microbatches} microbatches need"
    check_fits(num_bytes, what)
