"""What a run says beyond `pj.evaluate`: paths and slack, uncertainty, closed forms, errors."""

from pipejax.analysis.comparison import closed_form as closed_form
from pipejax.analysis.formula.facets import regions as regions
from pipejax.analysis.formula.family import formula_family as formula_family
from pipejax.analysis.formula.form import smallest as smallest
from pipejax.analysis.formula.parameters import (
    comparison_text as comparison_text,
    named_parameters as named_parameters,
)
from pipejax.analysis.formula.versus import versus as versus
from pipejax.analysis.frames import frame as frame
from pipejax.analysis.paths.longest_paths import longest_paths as longest_paths
from pipejax.analysis.runs.evaluate import (
    activation_memory as activation_memory,
    bubble_ratio as bubble_ratio,
    gathered_weights as gathered_weights,
    op_counts as op_counts,
)
from pipejax.analysis.runs.staleness import op_times as op_times
from pipejax.analysis.runs.timeline import bars as bars, lane_times as lane_times
from pipejax.analysis.step.evidence import (
    DEFAULT_STACK as DEFAULT_STACK,
    EVIDENCE as EVIDENCE,
    MAX_MEAN_ERROR as MAX_MEAN_ERROR,
    MIN_CONFIGURATIONS as MIN_CONFIGURATIONS,
    Runs as Runs,
    as_numbers as as_numbers,
    as_runs as as_runs,
    error_range as error_range,
    group_errors as group_errors,
)
from pipejax.analysis.step.faults import find_faults as find_faults
from pipejax.analysis.step.step_report import step_parts as step_parts
from pipejax.analysis.step.validation import (
    judge as judge,
    measured_tables as measured_tables,
    prediction_errors as prediction_errors,
)
from pipejax.analysis.uncertainty.corners import corners as corners
from pipejax.analysis.uncertainty.distributions import (
    Distribution as Distribution,
    Jitter as Jitter,
    Straggler as Straggler,
)
from pipejax.analysis.uncertainty.jitter import (
    jitter_dataset as jitter_dataset,
    robustness as robustness,
)
from pipejax.analysis.uncertainty.sensitivity import (
    PARAMETERS as PARAMETERS,
    swings as swings,
)
from pipejax.costs.system.parts import RESOURCES as RESOURCES
from pipejax.engine.periodic_makespan import extrapolated_makespans as extrapolated_makespans
from pipejax.engine.recurrence import (
    critical_path as critical_path,
    slack as slack,
    total_negative_slack as total_negative_slack,
)
