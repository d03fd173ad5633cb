"""Schedules by name, own ones, and what tables hold."""

from pipejax.schedules.builders.published import Builder as Builder
from pipejax.schedules.cells.cells import WeightRule as WeightRule
from pipejax.schedules.cells.grammar import Grammar as Grammar, Rule as Rule
from pipejax.schedules.cells.ops import OpKind as OpKind
from pipejax.schedules.heuristics.memory_limited_pipe import (
    LimitedPipe as LimitedPipe,
    zero_bubble_starts as zero_bubble_starts,
)
from pipejax.schedules.naming import (
    build as build,
    find as find,
    listed as listed,
    named as named,
    names as names,
    register as register,
)
from pipejax.schedules.registry import EXTENDED as EXTENDED, REGISTRY as REGISTRY
from pipejax.schedules.table.held_activations import (
    gathered_peak as gathered_peak,
    held_in_rows as held_in_rows,
    peak_in_flight as peak_in_flight,
    static_bytes as static_bytes,
)
from pipejax.schedules.table.sharding import insert_sharding as insert_sharding
from pipejax.schedules.table.slot_simulation import slot_times as slot_times
