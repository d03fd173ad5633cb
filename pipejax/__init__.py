"""pipejax: how long one LLM training step takes under a pipeline schedule, exactly and fast."""

from pipejax import schedules
from pipejax.costs import Costs, NodeCosts, price
from pipejax.evaluate import Evaluation, evaluate
from pipejax.files import read_table, write_table
from pipejax.lowering import lower
from pipejax.memory import in_flight, peak_in_flight
from pipejax.ops import Op, Phase
from pipejax.program import Program, pad
from pipejax.recurrence import finish_times, makespan
from pipejax.table import ScheduleError, ScheduleTable
