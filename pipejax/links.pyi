"""Messages and the link models that machines follow."""

from pipejax.analysis.paths.head_of_line_blocking import transfer_waits as transfer_waits
from pipejax.schedules.table.communication_cells import insert_transfers as insert_transfers
from pipejax.search.calibration.calibrate_links import calibrate_links as calibrate_links
