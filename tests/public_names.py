"""The public names by namespace, as their stubs list them."""

import inspect
import typing

import pipejax as pj

NAMES = {"": pj.__all__} | {
    name: getattr(pj, name).__all__ for name in pj.__all__ if inspect.ismodule(getattr(pj, name))
}
# parts that the papers' sweeps and figures are made of: told in a sentence, without an example
PARTS = {
    *(
        f"analysis.{name}"
        for name in ("Runs", "as_numbers", "as_runs", "error_range", "group_errors")
    ),
    "analysis.bars",
    "analysis.bubble_ratio",
    "analysis.closed_form",
    "analysis.comparison_text",
    "analysis.critical_path",
    "analysis.jitter_dataset",
    "analysis.judge",
    "analysis.measured_tables",
    "analysis.named_parameters",
    "analysis.op_counts",
    "analysis.op_times",
    "analysis.prediction_errors",
    "analysis.regions",
    "analysis.smallest",
    "analysis.swings",
    "costing.NodeCosts",
    "costing.Efficiency",
    *(
        f"costing.{name}"  # of scenarios: records without checks
        for name in [
            "CostsFile",
            "GivenTimes",
            "HostTimes",
            "MeasuredCosts",
            "Microbatches",
            "ModelCosts",
            "PairFactor",
            "RecomputeCells",
            "RecomputedAgain",
            "ScaledTimes",
            "ShardingCells",
            "SlotCosts",
            "SlowWorkers",
            "TableFile",
        ]
    ),
    "costing.StageWork",
    "costing.cost_vector",
    "costing.stage_bytes",
    "costing.stage_work",
    "costing.work_costs",
    "files.MeasuredRows",
    "results.Bar",
    "files.check_writable",
    "files.checksum",
    "files.atomic_write",
    "files.is_dataset",
    "files.joined",
    "files.provenance",
    "files.write_file",
    "schedules.LimitedPipe",
    "schedules.held_in_rows",
    "schedules.peak_in_flight",
    "schedules.slot_times",
    "schedules.static_bytes",
    "schedules.zero_bubble_starts",
}


def public():
    """Every public name, with its namespace."""
    return [f"{room}.{name}" if room else name for room, names in NAMES.items() for name in names]


def get_classes(annotation):
    """Classes of pipejax that an annotation names."""
    if inspect.isclass(annotation) and annotation.__module__.startswith("pipejax."):
        yield annotation
    for part in typing.get_args(annotation):
        yield from get_classes(part)
