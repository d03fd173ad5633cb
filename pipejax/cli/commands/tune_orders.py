"""`pipejax tune messages|microbatches|places|lookahead|chunks`: searches that take no WHAT."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.line import command_line
from pipejax.cli.options.memory import MemoryLimit
from pipejax.cli.options.option import for_each, options, parse_pairs, parse_seconds, parse_share
from pipejax.cli.options.scenario import build, command_line as command_of_scenario, required
from pipejax.cli.options.tables import LinkOptions, RendezvousRun, RunOptions
from pipejax.cli.output.files import DRAWING, JSON, NO_OUTPUT, TABLE, Output
from pipejax.cli.output.numbers import gigabytes, percent, saving, seconds
from pipejax.cli.output.report import (
    SEARCH_FIELDS,
    Answer,
    best_so_far,
    pick,
    progress,
    run_search,
    savings,
    schedule_name,
    search_answer,
    search_end,
    table_sizes,
)
from pipejax.cli.output.tables import Column, TextTable, grid, rows_table
from pipejax.search.found import Found, gap as gap_of

if TYPE_CHECKING:
    from pipejax.costs.topology import PlacedCosts

BEST_KEY = "found"  # JSON key of the best order, beside other orders
BY_PRODUCER = "the order in which they are computed"
# 1SEND_B2 is the SEND of stage 1 for B of microbatch 2
CELL_WORDS = r"^(\d+)(\w+)_([A-Z]+)(\d+)$", r"\2 (\3 of microbatch \4, stage \1)"
WAITS = (
    Column("message", "send"),
    Column("workers", lambda row: f"{row['sender']} to {row['receiver']}"),
    Column("ready", "ready", seconds),
    Column("waits", "wait", seconds),
    Column("blocked", "blocked", seconds),
    Column("on worker", "worker"),
    Column("cell", "cell"),
    Column("behind", "front"),
)


@options
def messages(
    *,
    run: RendezvousRun = RendezvousRun(),
    iterations: int = 1000,
    time_limit: str = "60",
    gap: str = "0.1%",
    seed: int = 0,
    worst: int = 10,
    out: Annotated[Output, TABLE] = NO_OUTPUT,
    certificate: Annotated[Output, JSON] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Find which messages block others under rendezvous, and search a better order of them."""
    from pipejax.analysis.paths.head_of_line_blocking import queue_makespans
    from pipejax.search.orders.transfers import TransferSearch

    max_gap = parse_share(gap, "--gap")
    scenario = run.scenario()
    table, costs = build(scenario), required(scenario).table_costs()
    rendezvous = scenario.links

    def report(result: "Found[pj.results.TransferOrder]") -> Answer:
        best = result.best.table
        tables = {"own": table, "by producer": pj.links.insert_transfers(table, link=rendezvous)}
        makespans = {
            name: queue_makespans(ordered, costs, link=rendezvous)
            for name, ordered in {**tables, BEST_KEY: best}.items()
        }
        # a table that deadlocks in its own order has no waits: compare with the next best order
        before = "by producer" if result.baselines["own"] is None else "own"
        run_before = pj.evaluate(tables[before], costs, link=rendezvous)
        best_run = pj.evaluate(best, costs, link=rendezvous)
        waits, best_waits = map(pj.links.transfer_waits, (run_before, best_run))
        out.save_table(best)
        figure.save_timelines({"before": run_before, "after": best_run}, messages=True)
        if result.stopped != "interrupted" or certificate.path is not None:
            bounds = {"path": result.best.free_bound, "queue": result.lower_bound}
            certificate.save_certificate(pj.certificate(best_run, lower_bounds=bounds))
        sums = {before: waits.by_worker.sum(), BEST_KEY: best_waits.by_worker.sum()}
        more = {"makespans": makespans, "waits_of": before, "wait": sums}
        data = _messages_as_json(table, result, waits) | more
        # `export` adds what PyTorch needs beside SEND and RECV
        torch = {"table": str(out.path), "format": "torch-csv", "out": "torch.csv"}
        next_commands = () if out.path is None else (command_line("export", torch),)
        ends = search_end(result, "orders tried")
        details = {"waiting messages": _waiting(data, worst), "search": ends}
        return Answer(data, _messages_view(data, result), next=next_commands, details=details)

    search = TransferSearch(table, costs, rendezvous, seed)
    return run_search(search, iterations, time_limit, report, max_gap)


def _messages_as_json(
    table: pj.ScheduleTable,
    result: "Found[pj.results.TransferOrder]",
    waits: "pj.results.TransferWaits",
) -> dict[str, Any]:
    """Return the best order of messages for `--json`, with the waits in the order before."""
    return {
        **table_sizes(table),
        "queues": result.best.links.queues,
        "own_order": "cells" if table.has_communication else "default",
        "best": {"order": result.best.order.tolist()},
        **pick(result, SEARCH_FIELDS),
        "gain": saving(result.baselines["own"], result.value),
        "free_bound": result.best.free_bound,
        "free_gap": gap_of(result.value, result.best.free_bound),
        "waits": [
            pick(wait, "sender receiver ready start wait blocked worker")
            | {name: str(cell) for name, cell in pick(wait, "send cell front").items()}
            for wait in waits.transfers
            if wait.wait > 0
        ],
        "waits_by_front": [
            {"worker": worker, "front": str(front), "wait": wait}
            for (worker, front), wait in waits.by_front.items()
        ],
        "waits_by_worker": waits.by_worker,
    }


def _messages_view(
    data: Mapping[str, Any], result: "Found[pj.results.TransferOrder]"
) -> Iterator[object]:
    """Yield the best order's makespan, its gain, the longest wait and the lower bound."""
    order = "the default order" if data["own_order"] == "default" else "the file's own order"
    times = {order: result.baselines["own"], BY_PRODUCER: result.baselines["by producer"]}
    if data["gain"] is None:
        text = f"in the best order of messages, while {order} deadlocks"
    elif data["gain"] > 0:
        text = f"in the best order of messages, {percent(data['gain'])} less than in {order}"
    else:
        text = f"in {order} of messages, which no other order improves"
    yield (
        f"[bold]{seconds(result.value)}[/] per step {text} "
        f"({schedule_name(data)}, {data['workers']} workers, one queue per {data['queues']})"
    )
    yield savings("order of messages", "step time", times, result.value)
    before = order if data["waits_of"] == "own" else BY_PRODUCER
    if data["waits"]:
        longest, (sum_before, sum_after) = data["waits"][0], data["wait"].values()
        ops = (re.sub(*CELL_WORDS, longest[key]) for key in ("cell", "front"))
        yield (
            f"longest wait in {before}: {seconds(longest['wait'])} on worker {longest['worker']}, "
            f"{' behind '.join(ops)}"
        )
        after = f", in the best order {seconds(sum_after)}" if sum_after != sum_before else ""
        yield f"sum of all waits: {seconds(sum_before)}{after}"
    else:
        yield f"no message waits in {before}"
    text = f"{seconds(data['free_bound'])} per step, {percent(data['free_gap'])} less"
    is_best = data["free_gap"] <= 1e-12
    yield f"if no message blocked another: {'the same, so no order is faster' if is_best else text}"


def _waiting(data: Mapping[str, Any], count: int) -> Iterator[object]:
    """Yield a table of the longest waits of messages, and the sum for each worker."""
    yield rows_table(
        data["waits"][:count],
        WAITS,
        title=f"{len(data['waits'])} messages wait, order: {data['waits_of']}",
        caption="blocked: time before the message in front had started",
    )
    yield "wait by worker: " + ", ".join(map(seconds, data["waits_by_worker"]))


def _answer_permutation(
    scenario: "pj.Scenario",
    result: "Found[Any]",
    best: Mapping[str, Any],
    nouns: tuple[str, str],
    out: Output,
) -> Answer:
    """Answer with the best permutation of microbatches or workers, and write it to a file."""
    table, link, sizes = scenario.table(), scenario.links.model, table_sizes(scenario.table())
    permutation, option, meaning = best.get("order"), "--microbatch-order", ""
    if permutation is None:
        permutation, option = best["places"], "--worker-places"
        meaning = " (place of each worker, places numbered node by node)"
    in_file = {name: best[name] for name in ("order", "lengths", "places") if name in best}
    file_sizes = {name: size for name, size in sizes.items() if name != "stages"}
    out.save_json({**file_sizes, **in_file, "makespan": result.value})
    saved_share = saving(result.baselines["given"], result.value)
    gain = f"best {nouns[0]}, {percent(saved_share)} less than with the given {nouns[0]}"
    if saved_share == 0:
        gain = f"given {nouns[0]}; the search found none that is better"
    first_lines = [
        f"[bold]{seconds(result.value)}[/] per step with the {gain} ({schedule_name(sizes)}, "
        f"{table.num_workers} workers, {table.num_microbatches} microbatches, --link {link})",
        f"best {nouns[0]}: {option} {','.join(map(str, permutation))}{meaning}",
    ]
    return search_answer(first_lines, sizes | {"link": link, "best": best}, result, nouns)


@options
def microbatches(
    *,
    run: RunOptions = RunOptions(),
    iterations: int = 200,
    time_limit: str = "60",
    seed: int = 0,
    out: Annotated[Output, JSON] = NO_OUTPUT,
) -> Answer:
    """Find the best order of unequal microbatches; compare sorted and random orders."""
    from pipejax.search.orders.permutations import MicrobatchSearch, num_orders

    scenario = run.scenario()
    table = build(scenario)
    required(scenario)
    if run.stragglers is not None and table.num_pipes > 1:
        raise ValueError(
            "--stragglers: a new order moves microbatches to pipes whose stages are on other "
            "workers, so their slow workers would change: leave it out"
        )
    search = MicrobatchSearch(table, scenario.table_costs(), scenario.links, seed)
    lengths = scenario.microbatches.lengths

    def report(result: "Found[pj.results.MicrobatchOrder]") -> Answer:
        best = {"order": result.best.order.tolist()}
        if lengths is not None:
            best["lengths"] = [lengths[microbatch] for microbatch in best["order"]]
        tried = "orders tried, some of them again"
        if search.has_tried_all:
            tried = f"all {num_orders(search.kind):,} different orders tried"
        return _answer_permutation(scenario, result, best, ("order", tried), out)

    return run_search(search, iterations, time_limit, report)


@options
def places(
    *,
    run: RunOptions = RunOptions(),
    iterations: int = 200,
    time_limit: str = "60",
    seed: int = 0,
    out: Annotated[Output, JSON] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Find the best placement of workers; --comm: time in a node, time between nodes."""
    from pipejax.costs.topology import places_on
    from pipejax.search.orders.places import PlacementSearch

    scenario = run.scenario()
    table = build(scenario)
    required(scenario)
    if scenario.placed is None:
        raise ValueError(
            "tune places needs a machine of nodes: give --workers-per-node N and --comm with a "
            "time for each level, a --costs file with nodes, or --model with equal microbatches"
        )
    placed = scenario.placed(table)
    given_places = places_on(table, scenario.source.worker_places, "--worker-places")
    search = PlacementSearch(placed, given_places, scenario.links, seed)

    def report(result: "Found[pj.results.WorkerPlaces]") -> Answer:
        places = result.best.places
        best = {
            "places": places.tolist(),
            "nodes": [workers.tolist() for workers in placed.workers_by_node(places)],
            "boundaries": placed.boundaries_by_level(places).tolist(),
        }
        _draw_places(placed, result, figure)
        nouns = "placement", "placements with different messages between nodes tried"
        answer = _answer_permutation(scenario, result, best, nouns, out)
        return answer._replace(details={"nodes": [_nodes(placed, places)]})

    return run_search(search, iterations, time_limit, report)


def _nodes(placed: "PlacedCosts", best: Any) -> TextTable:
    """Make a table of the workers on each node, in order and in the best placement."""
    placements = {"in order": np.arange(placed.table.num_workers), "best": best}
    nodes = range(int(placed.nodes.max()) + 1)
    columns: list[tuple[str, list[str]]] = [("node", [*map(str, nodes), "between nodes"])]
    for name, places in placements.items():
        workers_by_node = [" ".join(map(str, row)) for row in placed.workers_by_node(places)]
        boundaries = placed.boundaries_by_level(places)  # level 0 is inside a node
        between = f"{boundaries[1:].sum()} of {boundaries.sum()}"
        columns.append((f"workers {name}", [*workers_by_node, between]))
    return grid(columns, caption="between nodes: stage boundaries whose messages leave a node")


def _draw_places(placed: "PlacedCosts", result: "Found[Any]", figure: Output) -> None:
    """Draw the workers on the machine in order and in the best places, if asked for."""
    if figure.path is None:
        return
    from pipejax.plots.charts import machine_picture  # matplotlib is an extra, slow to import

    time_in_order = seconds(result.baselines["in order"] or 0.0)
    placements = {
        f"in order: {time_in_order}": np.arange(placed.table.num_workers),
        f"best: {seconds(result.value)}": result.best.places,
    }
    figure.save_picture(machine_picture(placed, placements))


@options
def lookahead(
    *,
    run: RunOptions = RunOptions(),
    weights_limit: str | None = None,
    iterations: int = 1000,
    time_limit: str = "60",
    out: Annotated[Output, TABLE] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Search how far ahead workers gather weights, and of how many stages at once."""
    from pipejax.costs.edits import ShardingCells
    from pipejax.search.tuning.lookahead import LookaheadSearch

    scenario, link = required(run.scenario()), run.links()
    edit = scenario.find_edit(ShardingCells) or ShardingCells()
    for option, value in (("--lookahead", edit.lookahead), ("--residency", edit.residency)):
        if value:
            raise ValueError(f"{option} does not go with tune lookahead, which finds it")
    scenario = scenario.with_edit(ShardingCells(edit.lane, (0,)))
    table, workload, costs = build(scenario), scenario.workload, scenario.table_costs()
    limits, in_bytes = None, workload is not None
    if weights_limit is not None:
        values, in_bytes = MemoryLimit.read(weights_limit, "--weights-limit")
        limits = for_each(values, table.num_workers, "--weights-limit", "workers")
        if in_bytes and workload is None:
            raise ValueError("--weights-limit in bytes needs --model for the bytes of stages")
    sizes = np.ones(table.num_stages)
    if workload is not None and in_bytes:
        from pipejax.costs.stage.stage_work import gathered_sizes

        sizes = gathered_sizes(workload, table)
    lane, unit = edit.lane or "net", "bytes" if in_bytes else "stages"
    search = LookaheadSearch(table, costs, link, limits, sizes, lane)

    def report(result: "Found[pj.results.Gathering]") -> Answer:
        best = result.best
        best_json = pick(best, "lookahead residency peak") | {"unit": unit}
        data = {**table_sizes(table), "link": link.model, "lane": lane, "best": best_json}
        cells = ShardingCells(edit.lane, tuple(best.lookahead), tuple(best.residency))
        peaks = map(gigabytes if in_bytes else "{:g}".format, best.peak)
        columns = [("uses ahead", best.lookahead), ("stages at once", best.residency)]
        workers = [("worker", range(table.num_workers)), *columns, ("peak gathered", peaks)]
        out.save_table(best.table)
        tables = {"no lookahead": search.plain, "best": best.table}
        figure.save_timelines({k: pj.evaluate(t, costs, link=link) for k, t in tables.items()})
        first_line = (
            f"[bold]{seconds(result.value)}[/] per step with --lookahead "
            f"{_range(best.lookahead)} (how many uses ahead a worker gathers weights) and "
            f"--residency {_range(best.residency)} (of how many stages at once), "
            f"{schedule_name(data)} on {table.num_workers} workers"
        )
        nouns, details = ("lookahead", "settings tried"), {"workers": [grid(workers)]}
        command = command_of_scenario(scenario.with_edit(cells), "show")
        return search_answer([first_line], data, result, nouns, next=(command,), details=details)

    return run_search(search, iterations, time_limit, report)


def _range(numbers: Sequence[int]) -> str:
    least, largest = min(numbers), max(numbers)
    return f"{least}" if least == largest else f"{least} to {largest}"


# letters of --stage-times: arguments of `pj.search.chunks`
LETTERS = {"a": "fixed", "b": "per_token", "c": "per_pair", "g": "per_prefix_token"}
TIMES = "a=2ms,b=5us,c=0.7ns"


@options
def chunks(
    *,
    links: LinkOptions = LinkOptions(),
    prompt: int,
    workers: int,
    stage_times: str,
    num_chunks: int | None = None,
    multiple: int = 1,
    latency: str | None = None,
    transmit: str | None = None,
    seed: int = 0,
    time_limit: str = "60",
) -> Answer:
    """Cut a prompt into chunks so that the first token comes soonest, one stage per worker.

    A chunk of n tokens behind p tokens takes a + b n + c (n p + n^2 / 2) + g p on each stage.
    """
    link = links.links()
    messages = {"--latency": latency or "0", "--transmit": transmit or "0"}
    latency_seconds, by_token = (parse_seconds(text, name) for name, text in messages.items())

    def report(result: "Found[pj.results.PromptChunks]") -> Answer:
        sizes, durations = result.best.sizes, np.asarray(result.best.costs.forward)[0]
        ends = np.cumsum(sizes)
        chunks = f"{len(sizes)} chunks of {min(sizes)} to {max(sizes)} tokens"
        if len(sizes) == 1:
            chunks = "the whole prompt at once"
        best = {"sizes": sizes, "ends": ends, "seconds": durations}
        data = {"workers": workers, "prompt": prompt, "link": link.model, "best": best}
        time = f"[bold]{seconds(result.value)}[/] until the first token"
        first_lines = [f"{time} with {chunks} on {workers} workers"]
        columns = [("chunk", range(len(sizes))), ("tokens", sizes), ("last token", ends)]
        table = grid([*columns, ("time of a stage", map(seconds, durations))])
        nouns, details = ("chunks", "divisions of the prompt tried"), {"chunks": [table]}
        return search_answer(first_lines, data, result, nouns, time="first token", details=details)

    with best_so_far(report) as keep, progress("cutting") as on_progress:
        result = pj.search.chunks(
            prompt,
            workers,
            **_parse_times(stage_times),
            latency=latency_seconds,
            transmit_per_token=by_token,
            num_chunks=num_chunks,
            multiple=multiple,
            link=link,
            seed=seed,
            time_limit=parse_seconds(time_limit, "--time-limit"),
            on_progress=on_progress,
            on_best=keep,
        )
    return report(result)


def _parse_times(text: str) -> dict[str, Any]:
    """Read times [s] such as a=2ms,b=5us,c=0.7ns as arguments of `pj.search.chunks`."""
    times: dict[str, Any] = dict.fromkeys(LETTERS.values(), 0.0)
    form = f"--stage-times must have each letter once, as {TIMES}"
    for letter, value in parse_pairs(text, form).items():
        name = LETTERS[resolve_choice(letter, tuple(LETTERS), "--stage-times: letter")]
        times[name] = parse_seconds(value, f"--stage-times: {letter}")
    return times
