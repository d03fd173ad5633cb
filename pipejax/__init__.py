"""pipejax: how long one LLM training step takes under a pipeline schedule, exactly and fast.

The names here are the library; `import pipejax as pj` is the convention. They follow the line
from a schedule to a number: build or read a table, lower it to a program, price it, evaluate.
"""

from importlib.metadata import PackageNotFoundError, version

from pipejax import schedules
from pipejax.analysis.activation_memory import ActivationMemory, activation_memory
from pipejax.analysis.chrome_trace import chrome_trace
from pipejax.analysis.comparison import Levels, levels
from pipejax.analysis.distributions import Distribution, Jitter, Straggler
from pipejax.analysis.evaluate import Evaluation, evaluate
from pipejax.analysis.head_of_line_blocking import (
    TransferWait,
    TransferWaits,
    queue_makespans,
    transfer_waits,
)
from pipejax.analysis.jitter import Jittered, jitter, sample_costs
from pipejax.analysis.robustness import Robustness, robustness
from pipejax.analysis.staleness import Staleness, staleness
from pipejax.costs.costs import Costs
from pipejax.costs.measured import read_costs
from pipejax.costs.model import Model, load_model
from pipejax.costs.roofline import stage_costs
from pipejax.costs.system import System, load_system
from pipejax.costs.workload import Workload, memory_bytes
from pipejax.engine.batched.makespans import (
    makespans,
    makespans_and_grad,
    makespans_of,
    stream_makespans,
)
from pipejax.engine.lowering.communication_cells import insert_transfers
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program, pad
from pipejax.engine.periodic_makespan import makespans_at, throughput
from pipejax.engine.pricing import NodeCosts, price
from pipejax.engine.recurrence import CriticalPath, critical_path, finish_times, makespan, slack
from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.cells.weight_rule import WeightRule
from pipejax.schedules.table.held_activations import in_flight, peak_in_flight
from pipejax.schedules.table.table import ScheduleError, ScheduleTable
from pipejax.schedules.table.table_files import read_table, write_table
from pipejax.search.schedule import InfeasibleError, Solution, Store, StoreWarning, optimize
from pipejax.search.transfers.search import TransferOrder, search_transfer_order

try:
    __version__ = version("pipejax")
except PackageNotFoundError:  # run from a folder of sources that is not installed
    __version__ = "unknown"

__all__ = [
    "ActivationMemory",
    "Costs",
    "CriticalPath",
    "Distribution",
    "Evaluation",
    "InfeasibleError",
    "Jitter",
    "Jittered",
    "Levels",
    "Model",
    "NodeCosts",
    "Op",
    "Phase",
    "Program",
    "Robustness",
    "ScheduleError",
    "ScheduleTable",
    "Solution",
    "Staleness",
    "Store",
    "StoreWarning",
    "Straggler",
    "System",
    "TransferOrder",
    "TransferWait",
    "TransferWaits",
    "WeightRule",
    "Workload",
    "activation_memory",
    "chrome_trace",
    "critical_path",
    "evaluate",
    "finish_times",
    "in_flight",
    "insert_transfers",
    "jitter",
    "levels",
    "load_model",
    "load_system",
    "lower",
    "makespan",
    "makespans",
    "makespans_and_grad",
    "makespans_at",
    "makespans_of",
    "memory_bytes",
    "optimize",
    "pad",
    "peak_in_flight",
    "price",
    "queue_makespans",
    "read_costs",
    "read_table",
    "robustness",
    "sample_costs",
    "schedules",
    "search_transfer_order",
    "slack",
    "stage_costs",
    "staleness",
    "stream_makespans",
    "throughput",
    "transfer_waits",
    "write_table",
]
