"""Readers of the links, op times and memory sizes of a certificate, which check these values."""

from collections.abc import Callable
from typing import Any

from pipejax.checker.rules import TIMED
from pipejax.checker.table import Table
from pipejax.checker.values import (
    MalformedError,
    check_keys,
    check_numbers,
    check_word,
    depth,
    is_list,
    is_share,
    is_time,
    is_whole,
    require,
)

MODELS = ("delay", "queued", "blocking", "rendezvous")
QUEUES = ("worker", "pair", "direction")
NO_LINKS = {
    "model": "delay",
    "queues": "worker",
    "posting": "early",
    "host_links": [],
    "shared_links": [],
    "pair_links": [],
    "eager_below": 0,
}
MESSAGE = ("latency", "transmit")
SIZES = ("sizes", "weight_share", "checkpoints")
AT_WORK = "at_work"  # key of memory that B, I and W hold while they run and recompute
Prices = dict[str, Any]


def read_links(record: Any, table: Table, where: str) -> Prices:
    """Check a record of links; add `pairs` {(sender, receiver): model} and `has_rendezvous`."""
    check_keys(record, NO_LINKS.keys(), where)
    check_word(record["model"], MODELS, f"{where}: model")
    check_word(record["queues"], QUEUES, f"{where}: queues")
    check_word(record["posting"], ("early", "program"), f"{where}: posting")
    workers, eager_below = len(table.rows), record["eager_below"]
    require(is_time(eager_below), f"{where}: eager_below", "a number of at least 0", eager_below)

    def is_worker(value: Any) -> bool:
        return is_whole(value) and value < workers

    def is_pair(value: Any) -> bool:
        return is_list(value, is_worker) and len(value) == 2 and value[0] != value[1]

    def is_model_of_pair(value: Any) -> bool:
        is_two = isinstance(value, list) and len(value) == 2
        return is_two and is_pair(value[0]) and isinstance(value[1], str) and value[1] in MODELS

    workers_text = f"workers are 0 to {workers - 1}"
    pair_links = record["pair_links"]
    is_valid = is_list(pair_links, is_model_of_pair)
    require(is_valid, f"{where}: pair_links", f"pairs with models; {workers_text}", pair_links)
    pairs = {tuple(pair): model for pair, model in pair_links}
    is_valid = len(pairs) >= len(pair_links)
    require(is_valid, f"{where}: pair_links", "pairs of which none stands twice", pair_links)
    models = {record["model"], *pairs.values()}
    has_rendezvous = "rendezvous" in models
    if not has_rendezvous and (record["posting"] != "early" or eager_below):
        raise MalformedError(f"{where}: posting by program and eager_below need rendezvous")
    needs_cells = record["posting"] == "program" and not table.has_communication
    if needs_cells and any(table.crossing()):
        raise MalformedError(f"{where}: posting by program needs a table with SEND and RECV cells")
    shared = record["shared_links"]
    if shared != "pairs":
        is_groups = is_list(shared, lambda group: is_list(group, is_pair) and group)
        is_valid = is_groups and all(len({*map(tuple, g)}) == len(g) for g in shared)
        allowed = f'"pairs", or groups of different pairs of workers; {workers_text}'
        require(is_valid, f"{where}: shared_links", allowed, shared)
    if shared and models == {"delay"}:
        raise MalformedError(f"{where}: shared_links need another model than delay")
    host = record["host_links"]
    is_groups = is_list(host, lambda group: is_list(group, is_worker) and group)
    is_valid = is_groups and len({w for group in host for w in group}) >= sum(map(len, host))
    require(is_valid, f"{where}: host_links", f"different workers; {workers_text}", host)
    return {**record, "pairs": pairs, "has_rendezvous": has_rendezvous}


def full_shape(key: str, table: Table, *values: Any) -> tuple[int, ...]:
    """Return the shape of times or sizes; it has a microbatch axis if one of `values` has one."""
    scope = table.rules.scope(key)
    shape: tuple[int, ...] = (table.num_stages,)
    if key in MESSAGE:
        shape = 2, len(table.placement), len(table.rules.graph) or table.num_stages - 1
    elif scope == "worker":
        shape = (len(table.rows),)
    differs = any(depth(value) > len(shape) for value in values)
    can_differ = key != "A" and scope != "stage"  # whether microbatches may differ
    return (*shape, len(table.pipes)) if differs and can_differ else shape


def _check_values(
    value: Any, key: str, table: Table, where: str, check: Callable[[Any], bool] = is_time
) -> None:
    check_numbers(value, full_shape(key, table, value), f"{where}: {key}", check)


def read_seconds(
    seconds: Any, table: Table, where: str, *, is_in_units: bool, has_bounds: bool
) -> Prices:
    """Check that every op of a table has a time [s], and return the times."""
    require(isinstance(seconds, dict), where, "an object of times", seconds)
    if {"pair", "pair_factor"} <= set(seconds):
        raise MalformedError(f"{where}: pair and pair_factor both price a fused pair")
    timed = {*TIMED, *table.rules.kinds}
    cells = [cell for row in table.rows for cell in row]
    priced = [cell for cell in cells if len(cell) == 1 or "pair" not in seconds]
    needed = {op.letters for cell in priced for op in cell} & timed | {"A", "U", *MESSAGE}
    if has_bounds and table.rules.is_usual:
        needed |= {*"FBIW"}
    legal = timed | {"pair", "pair_factor", *MESSAGE}
    check_keys(seconds, sorted(needed | (set(seconds) & legal)), where)
    for key, value in seconds.items():
        _check_values(value, key, table, where, is_whole if is_in_units else is_time)
    return seconds


def read_memory(memory: Any, table: Table, where: str) -> Prices:
    """Check and return the sizes of activations, and the memory held while B, I and W run."""
    has_work = isinstance(memory, dict) and AT_WORK in memory
    check_keys(memory, (*SIZES, AT_WORK) if has_work else SIZES, where)
    for key in SIZES:
        is_part = key == "weight_share" and not has_work
        _check_values(memory[key], key, table, where, is_share if is_part else is_time)
    if has_work:
        is_valid = isinstance(memory[AT_WORK], list) and len(memory[AT_WORK]) == 3
        require(is_valid, f"{where}: {AT_WORK}", "lists of B, I and W", memory[AT_WORK])
        for value in memory[AT_WORK]:
            _check_values(value, AT_WORK, table, where)
    return dict(memory)
