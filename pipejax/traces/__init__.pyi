"""Measured runs: read, checked, replayed, explained and improved."""

from pipejax.schedules.registry import registered as registered
from pipejax.traces.clocks import Offset as Offset, aligned as aligned
from pipejax.traces.findings.analysis import (
    analyse as analyse,
    forecast as forecast,
    rebalance as rebalance,
)
from pipejax.traces.findings.attribution import attribute as attribute
from pipejax.traces.findings.op_times import measured_costs as measured_costs, op_times as op_times
from pipejax.traces.findings.suspects import suspects as suspects
from pipejax.traces.readers.reading import read as read
from pipejax.traces.record import Trace as Trace
from pipejax.traces.replaying.pipelines import find_pipelines as find_pipelines
from pipejax.traces.replaying.replay import replay as replay
from pipejax.traces.writers import (
    costs_text as costs_text,
    dataset as dataset,
    perfetto as perfetto,
    record_runs as record_runs,
)
