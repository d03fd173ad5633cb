"""Options of launchers, as they are printed."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.text import Text

import pipejax as pj
from pipejax.cli.output.report import pick, plain

LONGEST = 2000  # characters of the options of a launcher that are printed


def launch_json(launches: "Iterable[pj.results.Launch]") -> dict[str, Any]:
    """Return the options of each launcher for `--json`, by its name."""
    return {launch.launcher: pick(launch, "options lacks program") for launch in launches}


def layout_json(workload: "pj.Workload | None", table: pj.ScheduleTable) -> dict[str, Any]:
    """Return the layers of each stage, and notes where launchers differ by default."""
    if workload is None:
        return {}
    from pipejax.costs.model.workload import assign_layers

    layers = [int(count) for count in assign_layers(workload, table).layers]
    notes = []
    if len({*layers}) > 1:
        reason = "Megatron-LM needs equal layers, or --pipeline-layout"
        if workload.embedding_units or workload.loss_units:
            reason = "embedding and head count as layers"
        if workload.pipeline_layout:
            reason = "as --pipeline-layout has them"
        notes.append(f"layers of stages: {' '.join(map(str, layers))} ({reason})")
    parts, is_default = workload.expert_tensor, not workload.expert_tensor_parallel
    if workload.has_experts and parts > 1 and is_default:
        notes.append(
            f"tensor parallelism cuts each expert in {parts} parts, Megatron-LM's default; "
            "torchtitan's is 1: --expert-tensor-parallel"
        )
    return {"layers_of_stages": layers} | ({"notes": notes} if notes else {})


def launch_lines(launches: "Iterable[pj.results.Launch]", *, rest: bool = False) -> Iterator[Text]:
    """Yield the options of each launcher; of one that cannot run the layout, what it lacks."""
    for launch in launches:
        lacks = f"lacks {'; '.join(launch.lacks)}" if launch.lacks else ""
        options = launch.text if rest or not lacks else ""
        if len(options) > LONGEST:
            options = f"{len(options)} characters of options, which --json prints"
        yield plain(f"{launch.launcher}: {'; the rest: '.join(filter(None, (lacks, options)))}")
