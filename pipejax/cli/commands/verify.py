"""`pipejax verify`: a certificate, or a table with its costs, derived again without the engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import pipejax as pj
from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import build, required
from pipejax.cli.options.tables import LinkOptions, SizedCostOptions
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.report import Answer, pick, plain

MAX_PROBLEMS = 10  # that the report lists


@options
def verify(
    file: Annotated[Path, Parameter(name="FILE", help="What --certificate saved, or a schedule.")],
    /,
    *,
    run: SizedCostOptions = SizedCostOptions(),
    links: LinkOptions = LinkOptions(),
) -> Answer:
    """Check a saved result, or the step time of a schedule file, by a second calculation.

    Exit code 0 if all claims hold, 1 if one does not.
    """
    from pipejax.costs.sources import TableFile

    (costs, edits, files), link, activations = run.cost_fields, links.links(), run.activations
    scenario = pj.Scenario(TableFile(str(file)), costs=costs, link=link, edits=edits, files=files)
    is_alone = link == pj.Links() and activations == ActivationOptions(None, None)
    if not scenario.has_times and is_alone and file.suffix != ".csv":
        verdict = pj.verify(file)
    else:
        build(required(scenario))
        evaluation = scenario.evaluate()
        held = activations.scenario_sizes(scenario).held(evaluation)
        verdict = pj.verify(pj.certificate(evaluation, memory=held.memory))
    problems = [*map(str, verdict.problems)]
    bounds = [bound._asdict() for bound in verdict.bounds]
    result = pick(verdict, "makespan unit ok") | {"problems": problems, "bounds": bounds}
    result |= {"form": verdict.form} if verdict.form else {}
    return Answer(result, _view(verdict, problems), holds=verdict.ok)


def _view(verdict: "pj.results.Verdict", problems: list[str]) -> Iterator[object]:
    """Yield whether the claims hold, and the first wrong claims."""
    time = seconds if verdict.unit == "seconds" else lambda value: f"{value:g} {verdict.unit}"
    claims = "all claims hold" if verdict.ok else f"[red]{len(problems)} claims do not hold[/]"
    makespan = "" if verdict.makespan is None else f": step time {time(verdict.makespan)}"
    yield f"{claims}{makespan}"
    if verdict.form:
        yield plain(f"the form is {verdict.form}")
    for bound in verdict.bounds:
        word = "derived again" if bound.checked else "not checked: it rests on the solver's word"
        yield plain(f"lower bound {time(bound.value)} by {bound.by}, {word}")
    yield from map(plain, problems[:MAX_PROBLEMS])
    if problems[MAX_PROBLEMS:]:
        yield f"and {len(problems) - MAX_PROBLEMS} more"
