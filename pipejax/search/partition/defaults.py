"""How runtimes split a model that nobody tuned: the baselines of an optimal split."""

import contextlib

from pipejax.base.checks import MismatchError
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import Workload, stage_layers
from pipejax.schedules.table.table import ScheduleTable

ENDS = {  # what Megatron counts as a layer: embedding, loss
    "megatron": (0, 0),
    "megatron, embedding counted": (1, 0),
    "megatron, loss counted": (0, 1),
    "megatron, embedding and loss counted": (1, 1),
}


def default_layouts(workload: Workload, table: ScheduleTable) -> dict[str, PipelineLayout]:
    """Splits by name, as far as the runtimes take so many layers on so many stages.

    Megatron divides layers evenly, with embedding and loss counted as layers if asked
    (`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`); where that
    does not come out even, it takes the layers of the first and the last worker by hand, so that
    the others have the same. torchtitan counts both ends as a layer and gives what is left over to
    the first stages. Layers for further tokens are on the last stage.
    """
    layers, stages = int(workload.model.layers), table.num_stages
    found = {name: _even(layers, stages, ends) for name, ends in ENDS.items()}
    found["megatron, first and last set"] = _first_and_last(layers, table)
    found["torchtitan"] = _torchtitan(layers, stages)
    with contextlib.suppress(MismatchError):  # fewer layers than stages
        units = workload.embedding_units, workload.loss_units
        found["by stage shares"] = stage_layers(workload.model, table, units).tolist()
    mtp = [0] * (stages - 1) + [int(workload.model.mtp_layers)]
    return {
        name: PipelineLayout.with_layers(split, mtp)
        for name, split in found.items()
        if split is not None and min(split) >= 0
    }


def _even(layers: int, stages: int, ends: tuple[int, int]) -> list[int] | None:
    each, rest = divmod(layers + sum(ends), stages)
    split = [each] * stages
    split[0] -= ends[0]
    split[-1] -= ends[1]
    return None if rest else split


def _first_and_last(layers: int, table: ScheduleTable) -> list[int] | None:
    """The most even split with a number of its own on the first and on the last worker."""
    workers = table.num_workers
    several, rest = divmod(table.num_stages, workers)
    if rest or workers < 3 or layers % several:
        return None
    total = layers // several  # of one stage of each worker
    ways = []
    for middle in range(1, (total - 2) // (workers - 2) + 1):
        first, odd = divmod(total - (workers - 2) * middle, 2)
        ways.append([first, *[middle] * (workers - 2), first + odd])
    if not ways:
        return None
    return min(ways, key=lambda way: (max(way), max(way) - min(way), way[0] + way[-1])) * several


def _torchtitan(layers: int, stages: int) -> list[int] | None:
    if stages == 1:
        return [layers]
    each, more = divmod(layers + 2, stages)
    split = [each + (stage < more) for stage in range(stages)]
    split[0] -= 1
    split[-1] -= 1
    return split if each else None
