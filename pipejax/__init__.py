"""pipejax: how long one LLM training step takes under a pipeline schedule, exactly and fast.

The names here are the library; `import pipejax as pj` is the convention. They follow the line
from a schedule to a number: build or read a table, lower it to a program, price it, evaluate.
"""

from importlib.metadata import PackageNotFoundError, version

from pipejax import schedules
from pipejax.activation_memory import ActivationMemory, activation_memory
from pipejax.batch import makespans, makespans_and_grad, makespans_of, stream_makespans
from pipejax.compare import Levels, levels
from pipejax.cost_files import read_costs
from pipejax.costs import Costs, NodeCosts, price
from pipejax.evaluate import Evaluation, evaluate
from pipejax.factors import Distribution, Jitter, Straggler
from pipejax.files import read_table, write_table
from pipejax.hardware import System, load_system
from pipejax.jitter import Jittered, jitter, sample_costs
from pipejax.long_schedules import makespans_at, throughput
from pipejax.lowering import lower
from pipejax.memory import in_flight, peak_in_flight
from pipejax.ops import Op, Phase
from pipejax.optimize import InfeasibleError, Solution, Store, StoreWarning, optimize
from pipejax.program import Program, pad
from pipejax.recurrence import CriticalPath, critical_path, finish_times, makespan, slack
from pipejax.robustness import Robustness, robustness
from pipejax.staleness import Staleness, staleness
from pipejax.table import ScheduleError, ScheduleTable
from pipejax.trace import chrome_trace
from pipejax.transfer_cells import insert_transfers
from pipejax.transfer_order import TransferOrder, search_transfer_order
from pipejax.transfer_waits import (
    TransferWait,
    TransferWaits,
    queue_makespans,
    transfer_waits,
)
from pipejax.transformer import Model, load_model
from pipejax.weights import WeightRule
from pipejax.work import stage_costs
from pipejax.workload import Workload, memory_bytes

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
