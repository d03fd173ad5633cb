"""Costs of a model for any places of workers in nodes, which decide what links messages use."""

import dataclasses
from typing import Any

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.costs.model.workload import Workload
from pipejax.costs.precision import in_float64
from pipejax.costs.stage.stage_costs import stage_costs, with_factors, work_costs
from pipejax.costs.stage.stage_work import StageWork, stage_work
from pipejax.costs.system.system import System
from pipejax.costs.topology import Levels, PlacedCosts
from pipejax.schedules.table.table import ScheduleTable

FAR = 1e9  # place in a node of its own
OF_COPIES = ("all_reduce", "update")  # costs with exchanges of copies, or of the ends of a pipe


def model_levels(workload: Workload, system: System, table: ScheduleTable) -> Levels:
    """Return the level of the link between all pairs of places: 0 in a node, 1 between nodes."""
    place = np.arange(table.num_workers, dtype=float)
    near = workload.layout(table, 1.0).is_near(place[:, None], place, system.gpus_per_node)
    return np.where(near, 0, 1)


def model_placements(workload: Workload, system: System, table: ScheduleTable) -> PlacedCosts:
    """Price a model on a schedule, for any assignment of workers to places in nodes."""
    # Messages go over links of the node or of the network. So do gradients of stages that have
    # copies, and those of an embedding that the first and the last stage hold.
    in_order = dataclasses.replace(workload, worker_places=())
    costs = stage_costs(in_order, system, table)
    size = workload.microbatch_size(table) / table.grammar.slices  # a message carries one slice
    work = stage_work(in_order, table, microbatch_size=size)
    links = system.peer_link, system.network
    zeros = np.zeros((2, table.num_pipes, table.num_stages - 1))
    messages = {
        "latency": np.stack([zeros + link.latency for link in links]),
        "transmit": np.stack([zeros + work.message_bytes / link.rate for link in links]),
    }
    sharing_costs = [
        [_copy_costs(work, system, in_order, table, copies, ends) for ends in (False, True)]
        for copies in (False, True)
    ]
    by_sharing = {
        name: np.array([[getattr(costs, name) for costs in row] for row in sharing_costs])
        for name in OF_COPIES
    }
    levels = model_levels(in_order, system, table)
    return PlacedCosts(table, costs, levels, messages, by_sharing)


def _copy_costs(
    work: StageWork,
    system: System,
    workload: Workload,
    table: ScheduleTable,
    copies_share: bool,
    ends_share: bool,
) -> Costs:
    """Price stages if their copies share a node or not, and if first and last stage do or not."""
    last_place = 0.0 if ends_share else FAR
    nearest: Float[NumpyArray, " stages"] = np.where(work.stages.last > 0, last_place, 0.0)
    farthest = nearest if copies_share else nearest + 2 * FAR
    stages = work.stages._replace(nearest=nearest, farthest=farthest)
    return _price(work._replace(stages=stages), system, workload, table)


@in_float64
def _price(work: StageWork, system: System, workload: Workload, table: ScheduleTable) -> Any:
    return with_factors(work_costs(work, system), workload, table)
