"""The public names and where they live: each is imported when it is first used."""

from pipejax import (
    analysis as analysis,
    costing as costing,
    files as files,
    links as links,
    plots as plots,
    results as results,
    schedules as schedules,
    search as search,
    traces as traces,
    training as training,
    typing as typing,
)
from pipejax.analysis.certificates import certificate as certificate, verify as verify
from pipejax.analysis.comparison import compare as compare
from pipejax.analysis.formula.form import formula as formula
from pipejax.analysis.runs.evaluate import Evaluation as Evaluation, evaluate as evaluate
from pipejax.analysis.runs.staleness import staleness as staleness
from pipejax.analysis.scenario import Scenario as Scenario
from pipejax.analysis.step.step_report import step_report as step_report
from pipejax.analysis.step.validation import validate as validate
from pipejax.analysis.uncertainty.jitter import jitter as jitter
from pipejax.analysis.uncertainty.sensitivity import sensitivity as sensitivity
from pipejax.costs.costs import Costs as Costs
from pipejax.costs.measured.costs_file import read_costs as read_costs
from pipejax.costs.model.model import Model as Model, load_model as load_model
from pipejax.costs.model.stack import Stack as Stack, load_stack as load_stack
from pipejax.costs.model.workload import Workload as Workload
from pipejax.costs.stage.stage_costs import stage_costs as stage_costs
from pipejax.costs.stage.stage_work import memory_bytes as memory_bytes
from pipejax.costs.system.system import System as System, load_system as load_system
from pipejax.costs.topology import Topology as Topology
from pipejax.engine.batched.makespans import (
    makespans as makespans,
    makespans_and_grad as makespans_and_grad,
)
from pipejax.engine.lowering.lower import lower as lower
from pipejax.engine.lowering.program import Program as Program
from pipejax.engine.periodic_makespan import cycle_time as cycle_time
from pipejax.engine.recurrence import finish_times as finish_times, makespan as makespan
from pipejax.plots.timeline import plot as plot
from pipejax.runtimes.exports import write_table as write_table
from pipejax.schedules.cells.ops import Op as Op, Phase as Phase, ScheduleError as ScheduleError
from pipejax.schedules.table.links import Links as Links
from pipejax.schedules.table.table import ScheduleTable as ScheduleTable
from pipejax.schedules.table.table_files import read_table as read_table
from pipejax.search.calibration.calibrate import calibrate as calibrate
from pipejax.search.remedies.explain import explain as explain
from pipejax.search.schedule.optimize import optimize as optimize
from pipejax.search.tuning.tune import tune as tune
from pipejax.sweep.declaration import read_sweep as read_sweep
from pipejax.sweep.plan.plan import plan as plan
from pipejax.sweep.run import run_sweep as run_sweep

__version__: str
