"""What to change about a run that was recorded: the remedies of `explain` at its mean times."""

import dataclasses
from collections.abc import Sequence

from pipejax.base.checks import check_types
from pipejax.base.progress import OnProgress
from pipejax.search.remedies.explain import Explanation, explain_setup
from pipejax.search.remedies.setup import MeasuredTimes, Schedule, Setup, begin
from pipejax.traces.findings.op_times import costs_of
from pipejax.traces.replaying.pipelines import registered
from pipejax.traces.replaying.replay import Replay


def setup_of(replayed: Replay, stage_layers: Sequence[int] | None = None) -> Setup:
    """The table that ran most, at the mean times of its ops and messages, over its links."""
    table, known = replayed.pipelines.table, registered(replayed.pipelines.table)
    schedule = None if known is None else Schedule(*known)
    if schedule is not None:
        table = dataclasses.replace(table, name=schedule.name)
    source = MeasuredTimes(costs_of(replayed), table.num_stages)
    return begin(table, replayed.links, source, schedule, stage_layers)


def advise(
    replayed: Replay,
    *,
    stage_layers: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    search: bool = False,
    on_progress: OnProgress | None = None,
) -> Explanation:
    """Say what would make the pipelines of a trace shorter.

    An op takes its mean over steps, replicas and microbatches here; what differs from microbatch to
    microbatch is for `pj.search.deal`. What the workers hold is not in a trace: remedies may need
    as much as the run does now.

    Args:
      replayed: a replayed trace.
      stage_layers: (stages) layers of each stage; then they are moved whole.
      schedules: names of those that are tried; all of the registry if None.
      search: whether to run the solvers too, which take some seconds.
      on_progress: called with how much is done, of how much, and a text.

    Returns:
      As `pj.explain`: parts, causes and remedies of the mean pipeline.

    Raises:
      ValueError: as `pj.explain`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.1))
      >>> replayed = pj.traces.replay(pj.traces.pipelines_of(pj.traces.of_runs([run])))
      >>> pj.traces.advise(replayed, schedules=["zb-h1"]).remedies[0].what
      'schedule zb-h1; 16 microbatches of 0.5 times the size'
    """
    check_types(replayed=(replayed, Replay))
    return explain_setup(
        setup_of(replayed, stage_layers),
        None,
        schedules=schedules,
        search=search,
        on_progress=on_progress,
    )
