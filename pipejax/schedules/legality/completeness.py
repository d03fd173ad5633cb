"""Every op is there once, on the worker of its stage."""

import numpy as np

from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.ops import HOST, SHARDING, Op, Phase, format_cell
from pipejax.schedules.cells.schedule_error import ScheduleError


def check_workers(content: Content) -> None:
    """Every op stands on the worker of its stage, every microbatch keeps to one pipe."""
    row = np.arange(content.num_workers)[:, None]
    pipe_of = content.pipe_of_microbatch
    for cells in (content.cells, content.partners):
        held = (cells.phase != Phase.IDLE) & ~np.isin(cells.phase, SHARDING)
        should = np.where(held, content.placement[cells.pipe, cells.stage], row)
        for worker, slot in np.argwhere(should != row):
            op = format_cell(content.cell(worker, slot))
            raise ScheduleError(
                f"op {op} stands on worker {worker}, but stage {cells.stage[worker, slot]} of "
                f"pipe {cells.pipe[worker, slot]} is placed on worker {should[worker, slot]}",
                place=(worker, slot),
            )
        for worker, slot in np.argwhere(held & (pipe_of[cells.microbatch] != cells.pipe)):
            raise ScheduleError(
                f"microbatch {cells.microbatch[worker, slot]} is in two pipes",
                place=(worker, slot),
            )
        here = (content.placement[:, cells.stage] == row).any(axis=0)
        for worker, slot in np.argwhere(np.isin(cells.phase, SHARDING) & ~here):
            op = format_cell(content.cell(worker, slot))
            raise ScheduleError(
                f"op {op} stands on worker {worker}, which does not hold that stage",
                place=(worker, slot),
            )


def check_once(content: Content) -> None:
    """No op stands twice."""
    keys, places = [], []
    sizes = len(Phase), content.num_stages, content.num_microbatches
    for cells in (content.cells, content.partners):
        held = (cells.phase != Phase.IDLE) & ~np.isin(cells.phase, SHARDING)
        op = cells.phase[held], cells.stage[held], cells.microbatch[held]
        keys.append(np.ravel_multi_index(op, sizes))
        places.append(np.flatnonzero(held))
    key, place = np.concatenate(keys), np.concatenate(places)
    order = np.lexsort((place, key))
    for k in np.flatnonzero(np.diff(key[order]) == 0):
        phase, stage, microbatch = map(int, np.unravel_index(key[order[k]], sizes))
        (first, before), (worker, slot) = map(content.place, place[order[k : k + 2]])
        place_of = (
            f"on worker {worker}: in slots {before} and {slot}"
            if first == worker
            else f"on worker {first} in slot {before} and on worker {worker} in slot {slot}"
        )
        op = Op(Phase(phase), stage, microbatch)
        raise ScheduleError(f"op {op} stands twice {place_of}", place=(worker, slot))


def check_complete(content: Content) -> None:
    """Every microbatch meets every stage: a forward, and a whole or a split backward.

    An activation that is offloaded is loaded too.
    """
    stages, microbatches = content.num_stages, content.num_microbatches
    forwards = content.cells.phase == Phase.F
    if stages * microbatches > forwards.sum():  # before anything of that size is allocated
        present = set(
            zip(
                content.cells.stage[forwards].tolist(),
                content.cells.microbatch[forwards].tolist(),
                strict=True,
            )
        )
        stage, microbatch = next(
            (s, m) for m in range(microbatches) for s in range(stages) if (s, m) not in present
        )
        raise _missing(content, Op(Phase.F, stage, microbatch), "there is no forward")
    where = content.where
    has = {phase: where[phase] != NOWHERE for phase in (Phase.B, Phase.I, Phase.W)}
    for phase, absent, why in (
        (Phase.B, ~has[Phase.B] & ~has[Phase.I] & ~has[Phase.W], "there is no backward"),
        (Phase.I, ~has[Phase.I] & has[Phase.W], "there is a weight gradient alone"),
        (Phase.W, has[Phase.I] & ~has[Phase.W], "there is an input gradient alone"),
    ):
        for stage, microbatch in np.argwhere(absent):
            raise _missing(content, Op(phase, int(stage), int(microbatch)), why)
    _check_offloads(content)
    for stage, microbatch in np.argwhere(has[Phase.B] & (has[Phase.I] | has[Phase.W])):
        worker, slot = content.place(where[Phase.B][stage, microbatch])
        op = Op(Phase.B, int(stage), int(microbatch))
        raise ScheduleError(
            f"op {op} on worker {worker} does the backward twice: it is also split into I and W",
            place=(worker, slot),
        )


def _check_offloads(content: Content) -> None:
    """What is offloaded is loaded for its backward; loads and waits have an offload."""
    has = {phase: content.where[phase] != NOWHERE for phase in (*HOST, Phase.WAIT_O)}
    for phase, absent, why in (
        (Phase.L, has[Phase.O] & ~has[Phase.L], "the backward needs what is offloaded"),
        (Phase.O, ~has[Phase.O] & has[Phase.L], "there is a load alone"),
        (Phase.O, ~has[Phase.O] & has[Phase.WAIT_O], "there is a wait for it alone"),
    ):
        for stage, microbatch in np.argwhere(absent):
            raise _missing(content, Op(phase, int(stage), int(microbatch)), why)


def _missing(content: Content, op: Op, why: str) -> ScheduleError:
    worker = int(content.placement[content.pipe_of_microbatch[op.microbatch], op.stage])
    return ScheduleError(f"missing op {op} on worker {worker}: {why}", place=(worker, None))
