"""Options of `evaluate` that look behind the makespan: slack, and the paths that come next."""

from typing import Any, NamedTuple

import pipejax as pj
from pipejax.cli.options.declared import CountIfGiven
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.op_values import OpValue, op_values, values_by_phase
from pipejax.cli.output.paths import paths_json, paths_table


class TimingSettings(NamedTuple):
    """What is to be shown beside the makespan.

    Attributes:
      slack: Show how much longer ops could take at no cost.
      paths: Show so many of the longest paths, with what they count: what becomes critical next.
      distinct_counts: Of paths with equal counts show one, the longest.
    """

    slack: bool = False
    paths: CountIfGiven = None
    distinct_counts: bool = False

    def of(self, evaluation: "pj.Evaluation") -> "TimingReport":
        """Find it for a run."""
        found, tables = dict[str, Any](), list[object]()
        if self.slack:
            spare = _slack(evaluation)
            found["slack"] = [{"op": v.op, "worker": v.worker, "slack": v.value} for v in spare]
            tables.append(values_by_phase(spare, "slack", seconds))
        if self.paths is not None:
            paths = pj.longest_paths(evaluation, self.paths, distinct_counts=self.distinct_counts)
            found["paths"] = paths_json(paths)
            tables.append(paths_table(paths))
        return TimingReport(found, tables)


class TimingReport(NamedTuple):
    """What was found.

    Attributes:
      json: for `--json`, by key.
      tables: for people.
    """

    json: dict[str, Any]
    tables: list[object]


def _slack(evaluation: "pj.Evaluation") -> list[OpValue]:
    """Slack of every op in seconds; on the critical path 0, up to rounding."""
    from pipejax.analysis.evaluate import lower_and_price
    from pipejax.base import longest_path
    from pipejax.engine.recurrence_host import run_on_host

    given = evaluation.table, evaluation.costs, evaluation.links
    run = run_on_host(*lower_and_price(*given))
    return op_values(evaluation, longest_path.slack(run.preds, run.duration, run.lag))
