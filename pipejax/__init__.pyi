"""The public names and where they live: `__init__.py` imports each when it is first used."""

from pipejax import schedules as schedules
from pipejax.analysis.activation_memory import (
    ActivationMemory as ActivationMemory,
)
from pipejax.analysis.activation_memory import (
    activation_memory as activation_memory,
)
from pipejax.analysis.chrome_trace import chrome_trace as chrome_trace
from pipejax.analysis.comparison import (
    Levels as Levels,
)
from pipejax.analysis.comparison import (
    levels as levels,
)
from pipejax.analysis.distributions import (
    Distribution as Distribution,
)
from pipejax.analysis.distributions import (
    Jitter as Jitter,
)
from pipejax.analysis.distributions import (
    Straggler as Straggler,
)
from pipejax.analysis.evaluate import (
    Evaluation as Evaluation,
)
from pipejax.analysis.evaluate import (
    evaluate as evaluate,
)
from pipejax.analysis.head_of_line_blocking import (
    TransferWait as TransferWait,
)
from pipejax.analysis.head_of_line_blocking import (
    TransferWaits as TransferWaits,
)
from pipejax.analysis.head_of_line_blocking import (
    queue_makespans as queue_makespans,
)
from pipejax.analysis.head_of_line_blocking import (
    transfer_waits as transfer_waits,
)
from pipejax.analysis.jitter import (
    Jittered as Jittered,
)
from pipejax.analysis.jitter import (
    jitter as jitter,
)
from pipejax.analysis.jitter import (
    sample_costs as sample_costs,
)
from pipejax.analysis.robustness import (
    Robustness as Robustness,
)
from pipejax.analysis.robustness import (
    robustness as robustness,
)
from pipejax.analysis.staleness import (
    Staleness as Staleness,
)
from pipejax.analysis.staleness import (
    staleness as staleness,
)
from pipejax.costs.costs import Costs as Costs
from pipejax.costs.measured import read_costs as read_costs
from pipejax.costs.model import (
    Model as Model,
)
from pipejax.costs.model import (
    load_model as load_model,
)
from pipejax.costs.roofline import stage_costs as stage_costs
from pipejax.costs.system import (
    System as System,
)
from pipejax.costs.system import (
    load_system as load_system,
)
from pipejax.costs.workload import (
    Workload as Workload,
)
from pipejax.costs.workload import (
    memory_bytes as memory_bytes,
)
from pipejax.engine.batched.makespans import (
    makespans as makespans,
)
from pipejax.engine.batched.makespans import (
    makespans_and_grad as makespans_and_grad,
)
from pipejax.engine.lowering.communication_cells import insert_transfers as insert_transfers
from pipejax.engine.lowering.lower import lower as lower
from pipejax.engine.lowering.program import (
    Program as Program,
)
from pipejax.engine.lowering.program import (
    pad as pad,
)
from pipejax.engine.periodic_makespan import (
    cycle_time as cycle_time,
)
from pipejax.engine.periodic_makespan import (
    extrapolated_makespans as extrapolated_makespans,
)
from pipejax.engine.pricing import (
    NodeCosts as NodeCosts,
)
from pipejax.engine.pricing import (
    price as price,
)
from pipejax.engine.recurrence import (
    CriticalPath as CriticalPath,
)
from pipejax.engine.recurrence import (
    critical_path as critical_path,
)
from pipejax.engine.recurrence import (
    finish_times as finish_times,
)
from pipejax.engine.recurrence import (
    makespan as makespan,
)
from pipejax.engine.recurrence import (
    slack as slack,
)
from pipejax.schedules.cells.ops import (
    Op as Op,
)
from pipejax.schedules.cells.ops import (
    Phase as Phase,
)
from pipejax.schedules.cells.schedule_error import (
    ScheduleError as ScheduleError,
)
from pipejax.schedules.cells.weight_rule import WeightRule as WeightRule
from pipejax.schedules.table.held_activations import (
    in_flight as in_flight,
)
from pipejax.schedules.table.held_activations import (
    peak_in_flight as peak_in_flight,
)
from pipejax.schedules.table.links import Links as Links
from pipejax.schedules.table.table import (
    ScheduleTable as ScheduleTable,
)
from pipejax.schedules.table.table_files import (
    read_table as read_table,
)
from pipejax.schedules.table.table_files import (
    write_table as write_table,
)
from pipejax.search.schedule.optimize import (
    optimize as optimize,
)
from pipejax.search.schedule.problem import (
    InfeasibleError as InfeasibleError,
)
from pipejax.search.schedule.solution import (
    Solution as Solution,
)
from pipejax.search.schedule.store import (
    SolvedProblems as SolvedProblems,
)
from pipejax.search.schedule.store import (
    StoreWarning as StoreWarning,
)
from pipejax.search.transfers.search import (
    TransferOrder as TransferOrder,
)
from pipejax.search.transfers.search import (
    search_transfer_order as search_transfer_order,
)

__version__: str
