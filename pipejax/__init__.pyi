"""The public names and where they live: `__init__.py` imports each when it is first used."""

from pipejax import schedules as schedules, training as training
from pipejax.analysis.comparison.comparison import compare as compare
from pipejax.analysis.formula.family import Family as Family, formula_family as formula_family
from pipejax.analysis.formula.form import Formula as Formula
from pipejax.analysis.formula.formula import formula as formula, read_formula as read_formula
from pipejax.analysis.formula.versus import Versus as Versus, versus as versus
from pipejax.analysis.paths.head_of_line_blocking import transfer_waits as transfer_waits
from pipejax.analysis.paths.incremental_run import IncrementalRun as IncrementalRun
from pipejax.analysis.paths.longest_paths import longest_paths as longest_paths
from pipejax.analysis.runs.activation_memory import activation_memory as activation_memory
from pipejax.analysis.runs.certificate import certificate as certificate
from pipejax.analysis.runs.chrome_trace import chrome_trace as chrome_trace
from pipejax.analysis.runs.evaluate import Evaluation as Evaluation, evaluate as evaluate
from pipejax.analysis.runs.staleness import staleness as staleness
from pipejax.analysis.step.step_report import StepReport as StepReport, step_report as step_report
from pipejax.analysis.step.validation import validate as validate
from pipejax.analysis.uncertainty.corners import Corners as Corners, corners as corners
from pipejax.analysis.uncertainty.distributions import (
    Distribution as Distribution,
    Jitter as Jitter,
    Straggler as Straggler,
)
from pipejax.analysis.uncertainty.jitter import jitter as jitter, robustness as robustness
from pipejax.analysis.uncertainty.sensitivity import sensitivity as sensitivity
from pipejax.analysis.verify.verify import verify as verify
from pipejax.costs.costs import Costs as Costs
from pipejax.costs.measured.costs_file import read_costs as read_costs
from pipejax.costs.measured.measured_rows import (
    CollectiveRows as CollectiveRows,
    read_collectives as read_collectives,
)
from pipejax.costs.measured.rows_file import read_rows as read_rows
from pipejax.costs.model.model import (
    LatentAttention as LatentAttention,
    MixtureOfExperts as MixtureOfExperts,
    Model as Model,
    load_model as load_model,
)
from pipejax.costs.model.pipeline_layout import PipelineLayout as PipelineLayout
from pipejax.costs.model.workload import Workload as Workload
from pipejax.costs.scaling import (
    scale_workers as scale_workers,
    scaled_costs as scaled_costs,
)
from pipejax.costs.stage.microbatches import (
    length_costs as length_costs,
    read_lengths as read_lengths,
    scale_microbatches as scale_microbatches,
)
from pipejax.costs.stage.stage_bytes import memory_bytes as memory_bytes
from pipejax.costs.stage.stage_costs import stage_costs as stage_costs
from pipejax.costs.system.system import System as System, load_system as load_system
from pipejax.costs.topology import Topology as Topology, topology_costs as topology_costs
from pipejax.engine.batched.makespans import (
    makespans as makespans,
    makespans_and_grad as makespans_and_grad,
)
from pipejax.engine.lowering.lower import lower as lower
from pipejax.engine.lowering.program import Program as Program
from pipejax.engine.periodic_makespan import (
    cycle_time as cycle_time,
    extrapolated_makespans as extrapolated_makespans,
)
from pipejax.engine.recurrence import (
    finish_times as finish_times,
    makespan as makespan,
    slack as slack,
    total_negative_slack as total_negative_slack,
)
from pipejax.plots.timeline import plot as plot
from pipejax.runtimes.formats import write_table as write_table
from pipejax.schedules.cells.cells import WeightRule as WeightRule
from pipejax.schedules.cells.ops import Op as Op, Phase as Phase, ScheduleError as ScheduleError
from pipejax.schedules.table.communication_cells import insert_transfers as insert_transfers
from pipejax.schedules.table.links import Links as Links
from pipejax.schedules.table.table import ScheduleTable as ScheduleTable
from pipejax.schedules.table.table_files import read_table as read_table
from pipejax.search.calibration.calibrate import (
    Calibration as Calibration,
    calibrate as calibrate,
)
from pipejax.search.calibration.calibrate_links import (
    LinkCalibration as LinkCalibration,
    calibrate_links as calibrate_links,
)
from pipejax.search.links.design import design_link_runs as design_link_runs
from pipejax.search.links.identify import identify_links as identify_links
from pipejax.search.links.link_runs import LinkRun as LinkRun
from pipejax.search.orders.microbatches import arrange as arrange
from pipejax.search.orders.places import place as place
from pipejax.search.orders.transfers import order as order
from pipejax.search.partition.partition import partition as partition
from pipejax.search.schedule.optimize import optimize as optimize
from pipejax.search.schedule.problem import InfeasibleError as InfeasibleError
from pipejax.search.tuning.tune import tune as tune
from pipejax.sweep.declaration import read_sweep as read_sweep
from pipejax.sweep.plan.plan import plan as plan
from pipejax.sweep.run import run_sweep as run_sweep

__version__: str
