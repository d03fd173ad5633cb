"""Files beside tables, costs, models and systems."""

from pipejax.analysis.formula.form import read_formula as read_formula
from pipejax.analysis.runs.chrome_trace import chrome_trace as chrome_trace
from pipejax.base.files import (
    ATTRIBUTES as ATTRIBUTES,
    atomic_write as atomic_write,
    check_writable as check_writable,
    checksum as checksum,
    is_dataset as is_dataset,
    provenance as provenance,
    write_file as write_file,
)
from pipejax.costs.measured.measured_rows import (
    CollectiveRows as CollectiveRows,
    MeasuredRows as MeasuredRows,
    joined as joined,
    read_collectives as read_collectives,
)
from pipejax.costs.measured.rows_file import read_rows as read_rows
from pipejax.costs.stage.microbatches import read_lengths as read_lengths
from pipejax.costs.system.system import DATA as DATA
