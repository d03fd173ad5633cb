"""Fused pairs that overlap, in a batch: a time for every kind of pair in place of the factor.

The engine reads sums of two costs, and max(F, B) + k min(F, B) is none. So what each kind of pair
takes is counted before, as a JAX function, and a program that reads one time for each kind runs.
"""

import dataclasses
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.remembered import remembered
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.precision import is_traced, known
from pipejax.engine.batched.cost_rows import Leaves
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import overlapped
from pipejax.schedules.cells.ops import Phase


@remembered
def with_pairs_apart(program: Program) -> Program:
    """Let every kind of fused pair have a time of its own; a program keeps the result."""
    layout = dataclasses.replace(program.layout, pairs_apart=True)
    kinds = np.arange(layout.num_pairs, dtype=np.int32)
    return dataclasses.replace(program, pair_stage=kinds, layout=layout)


def with_pair_times(program: Program, leaves: Leaves) -> Leaves:
    """Replace the factor among the leaves of a batch by `pair`, (N or 1, pairs) [s].

    A JAX function of the leaves.
    """
    times = {name: leaf for name, leaf in leaves.items() if name != "pair_factor"}
    return times | {"pair": _pair_times(program, leaves)}


def counts_of_ops(program: Program, leaves: Leaves, counts: Leaves) -> Leaves:
    """Pass counts of fused pairs on to the costs of their ops, and to the factor."""
    own = dict(counts)
    of_pairs = own.pop("pair", None)
    if of_pairs is None:  # none is on a path
        return own
    read = [name for name in ("forward", "backward", "input_grad", "pair_factor") if name in leaves]
    traced = is_traced(leaves) or is_traced(counts)
    with nullcontext() if traced else jax.core.eval_context(), known(of_pairs.dtype):
        whole = {
            name: jnp.broadcast_to(leaves[name], (len(of_pairs), *leaves[name].shape[1:]))
            for name in read
        }
        _, back = jax.vjp(lambda own: _pair_times(program, own), whole)
        (more,) = back(jnp.asarray(of_pairs))
    xp: Any = jnp if traced else np
    return own | {name: own.get(name, 0) + xp.asarray(value) for name, value in more.items()}


def _pair_times(program: Program, leaves: Leaves) -> Any:
    """Times of every kind of fused pair, (N or 1, pairs) [s]."""
    layout = program.layout
    xp: Any = jnp if any(isinstance(leaf, jax.Array) for leaf in leaves.values()) else np
    forward, backward = np.asarray(program.pair_index).T
    phase, _ = layout.op_at(backward)

    def entries(field: str, stage: Any, microbatch: Any) -> Any:
        leaf = leaves[field]  # N or 1, then stages or 1, then microbatches
        if leaf.ndim == 1:
            return leaf[:, None]
        stage = stage if leaf.shape[1] > 1 else np.zeros_like(stage)
        return leaf[:, stage] if leaf.ndim == 2 else leaf[:, stage, microbatch]

    def of(kind: Phase, position: Any) -> Any:
        stage, microbatch = layout.op_at(position)[1], (position - 1) % layout.columns
        return entries(PHASE_FIELDS[kind.name], stage, microbatch)

    with known(leaves["pair_factor"].dtype):
        kinds = [of(kind, backward) for kind in (Phase.B, Phase.I) if (phase == kind).any()]
        of_backward = kinds[0] if len(kinds) == 1 else xp.where(phase == Phase.B, *kinds)
        of_forward = np.divmod(np.asarray(program.pair_stage), layout.columns)
        factor = entries("pair_factor", *of_forward)
        return overlapped(of(Phase.F, forward), of_backward, factor, xp)
