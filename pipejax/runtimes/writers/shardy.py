"""Fragment orders of Shardy's MPMD: a module whose `schedule` is a PipelineSchedule.

Shardy asks a schedule for rules about the fragments of one mesh after another
(github.com/openxla/shardy, shardy/integrations/python/jax/mpmd/pipeline.py). What a fragment is
called, and on which mesh it is, is the user's choice, so the module knows fragments by stage,
microbatch and direction.
"""

from string import Template

from pipejax.runtimes.writers.mpmd_rows import checked, literal, ops_in, splits, title
from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.table.table import ScheduleTable

Fragment = tuple[int, int, int, str | None]
# how often a fragment is transposed, and its part of a backward that is split
PARTS = {
    Phase.F: (0, None),
    Phase.B: (1, None),
    Phase.I: (1, "KEEP_TRANSFERRED"),
    Phase.W: (1, "DROP_TRANSFERRED"),
}
MODULE = Template('''"""$title.

    from this_module import schedule  # for mpmd.make_config(..., pipeline_schedule=schedule)
"""

from shardy.integrations.python.jax.mpmd import pipeline

PLACEMENT = $placement  # worker of each stage
SPLIT = $split  # whether backwards are split
# stage, transpose count, call counter (microbatch) and split type, a row for each worker
ORDERS = $orders
MERGED = $merged  # those that run as one


def fragments_by_unit(fragments):
    """Return fragments that a schedule can order, by what they compute."""
    found = {}
    for fragment in fragments:
        unit = pipeline.get_scheduling_unit_info(fragment)
        if unit is not None:
            found[(fragment.stage_id, unit[1], unit[0], fragment.split_type)] = fragment
    return found


def rules(fragments, context):
    """Order the fragments of one mesh as its worker runs them, and merge its fused pairs."""
    found = fragments_by_unit(fragments)
    if not found:
        return [], []
    workers = {PLACEMENT[stage] for stage, _, _, _ in found}
    if len(workers) > 1:
        raise ValueError(f"a mesh holds stages of the workers {sorted(workers)} of the table")

    def fragment(stage, transpose_count, microbatch, split):
        unit = stage, transpose_count, microbatch
        kind = None if split is None else pipeline.SplitFragmentType[split]
        # a backward that passes no gradient on, as that of the first stage, is not split
        one = found.get((*unit, kind)) or found.get((*unit, None))
        if one is None:
            raise ValueError(f"no fragment of stage {stage}, microbatch {microbatch}: {split}")
        return one

    (worker,) = workers
    ordered = list(dict.fromkeys(fragment(*each) for each in ORDERS[worker]))
    merges = []
    for parts in MERGED[worker]:
        sources = list(dict.fromkeys(fragment(*each) for each in parts))
        origins = dict.fromkeys(origin for each in sources for origin in each.origins)
        target = pipeline.FragmentInfo(tuple(origins), mesh_name=sources[0].mesh_name)
        merges.append(pipeline.FragmentMergeRule(set(sources), target))
    return [pipeline.FragmentScheduleRule(ordered)], merges


schedule = pipeline.PipelineSchedule(
    schedule_merge_rule_builders=[rules],
    required_mpmd_options={
        "mpmd_pipeline_schedule": "None",
        "mpmd_split_bwd_fragments": SPLIT,
    },
)
''')


def to_shardy(table: ScheduleTable) -> str:
    """Return a table as a module of Python for Shardy; warn of what is left out."""
    own = checked(table, "Shardy")
    split = splits(own)
    cells = [
        [[_fragment(op) for op in ops_in(cell, split=split)] for cell in row] for row in own.rows()
    ]
    pairs = own.is_fused
    return MODULE.substitute(
        title=title(own, "Shardy"),
        placement=tuple(own.placement[0].tolist()),
        split=split,
        orders=literal([[each for cell in row for each in cell] for row in cells]),
        merged=literal(
            [cell for cell, fused in zip(row, is_pair, strict=True) if fused]
            for row, is_pair in zip(cells, pairs, strict=True)
        ),
    )


def _fragment(op: Op) -> Fragment:
    transpose_count, part = PARTS[op.phase]
    return op.stage, transpose_count, op.microbatch, part
