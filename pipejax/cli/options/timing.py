"""Options of `evaluate` that look behind the makespan: slack, corners, the paths that come next."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape

import pipejax as pj
from pipejax.cli.options.declared import CountIfGiven, Text
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.op_values import op_values, values_by_phase
from pipejax.cli.output.paths import paths_json, paths_table
from pipejax.cli.output.tables import facts, grid

if TYPE_CHECKING:
    from pipejax.analysis.corners import Corners

NOMINAL = "nominal"  # the corner of the costs that are given

ROUNDING = 1e-12  # of the makespan: below it a slack is what sums in double precision leave


class TimingSettings(NamedTuple):
    """What is to be shown beside the makespan.

    Attributes:
      target: slack is against it, and what workers are late is summed up.
      corner: also hot:compute@worker3*1.3,F@stage0*2; may be given several times. Slack is the
        worst of all.
      paths: with what they count, and what becomes critical next.
    """

    slack: bool = False
    target: Text = None
    corner: list[str] | None = None
    paths: CountIfGiven = None
    distinct_counts: bool = False

    def of(self, evaluation: "pj.Evaluation") -> "TimingReport":
        """Find it for a run."""
        report = TimingReport({}, [])
        target = None if self.target is None else parse_seconds(self.target, "--target")
        if self.slack or self.corner or target is not None:
            found = pj.corners(evaluation.program, self._costs(evaluation), target=target)
            if target is not None:
                report.add_target(found)
            if self.corner:
                report.add_corners(found, evaluation)
            if self.slack:
                report.add_slack(found, evaluation)
        if self.paths is not None:
            distinct = self.distinct_counts
            paths = pj.longest_paths(evaluation, self.paths, distinct_counts=distinct)
            report.json["paths"] = paths_json(paths)
            report.tables.append(paths_table(paths))
        return report

    def _costs(self, evaluation: "pj.Evaluation") -> "dict[str, pj.Costs]":
        """Costs by corner."""
        costs = {NOMINAL: evaluation.costs}
        for text in self.corner or ():
            name, colon, rules = (part.strip() for part in text.partition(":"))
            if not (name and colon and rules):
                raise ValueError(f"--corner must be NAME:RULES, as slow:transmit*2, got {text!r}")
            if name in costs:
                raise ValueError(f"--corner: {name!r} is the name of another corner")
            try:
                costs[name] = pj.scaled_costs(evaluation.costs, evaluation.table, rules)
            except ValueError as error:
                raise ValueError(f"--corner {text}: {error}") from None
        return costs


class TimingReport(NamedTuple):
    """What was found.

    Attributes:
      json: for `--json`, by key.
      tables: for people.
    """

    json: dict[str, Any]
    tables: list[object]

    def add_target(self, found: "Corners") -> None:
        """Say whether the run at the given costs ends in time."""
        late, spare = float(found.total_negative_slack[0]), float(found.slack[0].min())
        self.json.update(
            {"target": found.target, "worst_slack": spare, "total_negative_slack": late}
        )
        rows = [
            ("target", seconds(found.target or 0.0)),
            ("worst slack", seconds(spare)),
            ("total negative slack", f"{seconds(late)}  over the workers' last ends"),
        ]
        self.tables.append(facts(rows))

    def add_corners(self, found: "Corners", evaluation: "pj.Evaluation") -> None:
        """Compare corners: makespan, lateness, and how many ops have their least slack there."""
        binding = [op.value for op in op_values(evaluation, found.binding.astype(float))]
        columns: dict[str, list[Any]] = {
            "name": list(found.names),
            "makespan": found.makespan.tolist(),
            "worst_slack": found.slack.min(axis=1).tolist(),
            "total_negative_slack": found.total_negative_slack.tolist(),
            "binding_ops": [binding.count(corner) for corner in range(len(found.names))],
        }
        if found.target is None:  # each against its own makespan: none is late
            columns = {k: v for k, v in columns.items() if "slack" not in k}
        rows = zip(*columns.values(), strict=True)
        self.json["corners"] = [dict(zip(columns, row, strict=True)) for row in rows]
        shown: dict[str, Callable[[Any], str]] = {"name": escape, "binding_ops": str}
        heads = {"name": "corner", "binding_ops": "ops it binds"}
        self.tables.append(
            grid(
                (heads.get(name, name.replace("_", " ")), [*map(shown.get(name, seconds), column)])
                for name, column in columns.items()
            )
        )

    def add_slack(self, found: "Corners", evaluation: "pj.Evaluation") -> None:
        """List the slack of every op, of all corners the worst."""
        ops = op_values(evaluation, found.worst_slack)
        self.json["slack"] = [{"op": v.op, "worker": v.worker, "slack": v.value} for v in ops]
        if len(found.names) > 1:
            binding = op_values(evaluation, found.binding.astype(float))
            for entry, binds in zip(self.json["slack"], binding, strict=True):
                entry["corner"] = found.names[int(binds.value)]
        rounding = ROUNDING * evaluation.makespan

        def shown(slack: float) -> str:
            return seconds(slack if abs(slack) > rounding else 0.0)

        self.tables.append(values_by_phase(ops, "slack", shown))
