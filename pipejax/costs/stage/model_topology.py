"""Costs of a model as a function of workers' places, which decide the links of messages."""

import dataclasses
from typing import Any

import numpy as np

from pipejax.costs.model.workload import Workload
from pipejax.costs.precision import in_float64
from pipejax.costs.stage.stage_costs import stage_costs, with_factors, work_costs
from pipejax.costs.stage.stage_work import StageWork, stage_work
from pipejax.costs.system.system import System
from pipejax.costs.topology import Levels, PlacedCosts
from pipejax.schedules.table.table import ScheduleTable

FAR = 1e9  # place so far away that it is in another node
OF_COPIES = ("all_reduce", "update")  # costs with exchanges of copies, or of the two end stages


def model_levels(workload: Workload, system: System, table: ScheduleTable) -> Levels:
    """Return the link level of all pairs of places (places, places): 0 in a node, else 1."""
    place = np.arange(table.num_workers, dtype=float)
    near = workload.layout(table, 1.0).is_near(place[:, None], place, system.gpus_per_node)
    return np.where(near, 0, 1)


def model_placements(workload: Workload, system: System, table: ScheduleTable) -> PlacedCosts:
    """Compute costs of a model on a schedule as a function of its workers' places in nodes."""
    # Messages go over links of the node or of the network. So do gradients of stages that have
    # copies, and gradients of an embedding that the first and the last stage hold.
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
    shared_costs = []
    for copies_share, ends_share in np.ndindex(2, 2):  # 1 if copies, or ends, share a node
        nearest = np.where(work.stages.last > 0, 0.0 if ends_share else FAR, 0.0)
        farthest = nearest if copies_share else nearest + 2 * FAR
        stages = work.stages._replace(nearest=nearest, farthest=farthest)
        shared_costs.append(_work_costs(work._replace(stages=stages), system, in_order, table))
    by_sharing = {}
    for name in OF_COPIES:
        stack = np.stack([getattr(shared, name) for shared in shared_costs])
        by_sharing[name] = stack.reshape(2, 2, *stack.shape[1:])
    levels = model_levels(in_order, system, table)
    return PlacedCosts(table, costs, levels, messages, by_sharing)


@in_float64
def _work_costs(work: StageWork, system: System, workload: Workload, table: ScheduleTable) -> Any:
    return with_factors(work_costs(work, system), workload, table)
