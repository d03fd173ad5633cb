"""`pipejax tune lookahead`: how far ahead of their use workers gather sharded weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.cli.options.memory import read_weights_limit
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, RunOptions
from pipejax.cli.options.scenario import build, command_line, required
from pipejax.cli.options.values import Text, TimeLimit, parse_seconds
from pipejax.cli.output.answer import Answer, searched
from pipejax.cli.output.files import NO_OUTPUT, Output, draw_runs, save_table
from pipejax.cli.output.kinds import DRAWING, TABLE
from pipejax.cli.output.numbers import gigabytes, seconds
from pipejax.cli.output.report import FOUND, TextTable, grid, pick, savings, search_end, table_sizes

if TYPE_CHECKING:
    from pipejax.search.found import Found
    from pipejax.search.tuning.lookahead import Gathering


@options
def lookahead(
    *,
    run: RunOptions = RunOptions(),
    links: LinkOptions = LinkOptions(),
    weights_limit: Text = None,
    iterations: int = 1000,
    time_limit: TimeLimit = "60",
    out: Annotated[Output, TABLE] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Search how far ahead each worker gathers sharded weights, and of how many stages at once.

    Options:
      weights_limit: a number of stages, or bytes with --model (20GB); one for all workers or each.
      iterations: steps of the search.
      out: the table with the cells (.json).
      figure: runs without lookahead and with it.

    Example:
      pipejax tune lookahead -s interleaved-1f1b -P 4 -M 8 -V 3 -T F=1,B=2,UNSHARD=1,REDUCE_GRAD=1
      --weights-limit 2
    """
    from pipejax.costs.edits import ShardingCells
    from pipejax.search.tuning.lookahead import LookaheadSearch

    limit = parse_seconds(time_limit, "--time-limit")
    scenario, link = required(run.scenario(links.links())), links.links()
    asked = scenario.find_edit(ShardingCells) or ShardingCells()
    for option, value in (("--lookahead", asked.lookahead), ("--residency", asked.residency)):
        if value:
            raise ValueError(f"{option} does not go with tune lookahead, which finds it")
    scenario = scenario.with_edit(ShardingCells(asked.lane, (0,)))
    table, workload, costs = build(scenario), scenario.workload, scenario.table_costs()
    sizes = np.ones(table.num_stages)
    if workload is not None:
        from pipejax.costs.stage.stage_work import gathered_sizes

        sizes = gathered_sizes(workload, table)
    limits, in_bytes = read_weights_limit(weights_limit, table, workload)
    sizes = sizes if in_bytes else np.ones(table.num_stages)
    lane = asked.lane or "net"
    search = LookaheadSearch(table, costs, link, limits, sizes, lane)

    def report(result: "Found[Gathering]") -> Callable[[], Answer]:
        best = result.best
        data = {
            **table_sizes(table),
            "link": link.model,
            "lane": lane,
            "best": {
                **pick(best, "lookahead residency peak"),
                "unit": "bytes" if in_bytes else "stages",
            },
            **pick(result, FOUND),
        }
        cells = ShardingCells(asked.lane, tuple(best.lookahead), tuple(best.residency))

        def answer() -> Answer:
            save_table(best.table, out)
            tables = {"no lookahead": search.plain, "best": best.table}
            runs = {name: pj.evaluate(t, costs, link=link) for name, t in tables.items()}
            draw_runs(runs, figure)
            return Answer(
                data | figure.as_json(),
                _view(data, result),
                {"wrote the table to": out, "drawn to": figure},
                next=(command_line(scenario.with_edit(cells), "show"),),
                details={
                    "workers": [_workers(data["best"])],
                    "search": search_end(result, "tables"),
                },
            )

        return answer

    return searched(search, iterations, limit, report)


def _view(data: Mapping[str, Any], result: "Found[Gathering]") -> Iterator[object]:
    ahead, count = data["best"]["lookahead"], data["best"]["residency"]
    yield (
        f"[bold]{seconds(result.value)}[/] with weights gathered {_range(ahead)} uses ahead, "
        f"at most {_range(count)} stages of a worker at once ({escape(data['schedule'])}, "
        f"{data['workers']} workers)"
    )
    yield savings("lookahead", "makespan", result.baselines, result.value)


def _range(numbers: Sequence[int]) -> str:
    least, largest = min(numbers), max(numbers)
    return f"{least}" if least == largest else f"{least} to {largest}"


def _workers(best: Mapping[str, Any]) -> TextTable:
    peaks = map(gigabytes if best["unit"] == "bytes" else "{:g}".format, best["peak"])
    columns = [("uses ahead", best["lookahead"]), ("stages at once", best["residency"])]
    return grid([("worker", range(len(best["peak"]))), *columns, ("peak gathered", peaks)])
