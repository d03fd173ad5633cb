"""The public names by namespace, as their stubs list them."""

import inspect
import typing

import pipejax as pj

NAMES = {"": pj.__all__} | {
    name: getattr(pj, name).__all__ for name in pj.__all__ if inspect.ismodule(getattr(pj, name))
}
# parts that the papers' sweeps and figures are made of: told in a sentence, without an example
PARTS = {
    "analysis": """Runs as_numbers as_runs error_range group_errors bars bubble_ratio closed_form
        comparison_text critical_path jitter_dataset judge measured_tables named_parameters op_counts
        op_times prediction_errors regions smallest swings""",
    # of scenarios: records without checks
    "costing": """CostsFile GivenTimes HostTimes MeasuredCosts Microbatches ModelCosts PairFactor
        RecomputeCells RecomputedAgain ScaledTimes ShardingCells SlotCosts SlowWorkers TableFile
        NodeCosts Efficiency StageWork cost_vector stage_bytes stage_work work_costs""",
    "files": """MeasuredRows atomic_write check_writable checksum is_dataset joined provenance
        write_file""",
    "results": "Bar",
    "schedules": """LimitedPipe held_in_rows peak_in_flight slot_times static_bytes
        zero_bubble_starts""",
}
PARTS = {f"{room}.{name}" for room, names in PARTS.items() for name in names.split()}


def public():
    return [f"{room}.{name}" if room else name for room, names in NAMES.items() for name in names]


def get_classes(annotation):
    """Classes of pipejax that an annotation names."""
    if inspect.isclass(annotation) and annotation.__module__.startswith("pipejax."):
        yield annotation
    for part in typing.get_args(annotation):
        yield from get_classes(part)
