"""`pipejax tune layers`: which layers each stage holds, with a proof."""

import dataclasses
import time
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.cli.commands.tune import tune_settings, tuned_model
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, RunOptions
from pipejax.cli.options.scenario import build, command_line, parse_scenario
from pipejax.cli.options.tables import SizedSchedule
from pipejax.cli.options.values import CountIfGiven, Text, TimeLimit, parse_seconds
from pipejax.cli.output.answer import Answer, best_so_far
from pipejax.cli.output.files import NO_OUTPUT, Output
from pipejax.cli.output.kinds import LAYOUT
from pipejax.cli.output.launches import launch_json, launch_lines
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import FOUND, grid, pick, savings, search_end, table_sizes
from pipejax.schedules.naming import find

WIDEST = 40  # blocks of the largest stage in its picture


@options
def layers(
    *,
    run: RunOptions = RunOptions(),
    links: LinkOptions = LinkOptions(),
    method: Text = None,
    microbatch_size: CountIfGiven = None,
    no_memory_limit: bool = False,
    time_limit: TimeLimit = "60",
    out: Annotated[Output, LAYOUT] = NO_OUTPUT,
) -> Answer:
    """Split a model into the stages that make the step shortest, for Megatron and torchtitan.

    Options:
      method: in place of the proof, with at least one layer on every stage.
      microbatch_size: of --method, in place of --microbatches; the one that is best alone if
        neither is given.
      out: all that --json prints (.json), or Megatron's layout alone (.txt), for
        `--pipeline-layout`.

    Example:
      pipejax tune layers -s 1f1b -P 4 -M 16 -m llama3-8b -y h100 --minibatch 16
      --tensor-parallel 2
    """
    point = None  # of --method, which sizes microbatches too
    if method is not None and run.table is None:
        schedule = run.name or "1f1b"
        workers = run.workers or (find(schedule).sizes or (8,))[0]
        point = SizedSchedule(schedule, workers, None)
    scenario = parse_scenario(run, links.links(), point=point)
    workload, _ = tuned_model(scenario, "tune layers")
    if run.offload is not None:
        raise ValueError(
            "--offload does not go with tune layers: what O takes follows from the split"
        )
    limit = parse_seconds(time_limit, "--time-limit")
    if method is None:
        if microbatch_size is not None:
            raise ValueError("--microbatch-size has no effect without --method")
        build(scenario)
        return _search_split(scenario, limit, not no_memory_limit, out)
    if out.path is not None or run.table is not None:
        option = "--out" if run.table is None else "--table"
        raise ValueError(f"{option} does not go with --method: leave one of them out")
    if run.microbatches is not None and microbatch_size is None:
        microbatch_size, rest = divmod(workload.minibatch, run.microbatches)
        if rest:
            raise ValueError(
                f"--microbatches {run.microbatches} does not divide the minibatch of "
                f"{workload.minibatch}"
            )
    return tune_settings(
        scenario,
        "layers",
        over=["layers"],
        method=method,
        no_memory_limit=no_memory_limit,
        microbatch_size=microbatch_size,
    )


def _search_split(scenario: "pj.Scenario", limit: float, memory_limit: bool, out: Output) -> Answer:
    """Search the best split and answer; if interrupted, answer with the best so far."""
    table, links, start = scenario.table(), scenario.links, time.monotonic()
    workload, system = tuned_model(scenario, "tune layers")

    def report(result: "pj.results.Found[pj.results.Partition]") -> Answer:
        best = result.best
        named, per_node = scenario.files.get("launcher"), float(system.gpus_per_node)
        launches = pj.costing.launches(best.workload, table, named, per_node)
        data = _as_json(table, links, result) | {
            "seconds": time.monotonic() - start,
            "launch": launch_json(launches),
        }
        if out.path is not None and out.path.suffix == ".txt":
            out.save_text(f"{best.layout}\n")
        else:
            out.save_json(data)
        # units do not go with a layout
        units: Any = {"embedding_units": 0, "loss_units": 0, "pipeline_layout": str(best.layout)}
        assert scenario.source.workload is not None
        split = scenario.with_workload(dataclasses.replace(scenario.source.workload, **units))
        times = {name: default.step_time for name, default in best.defaults.items()}
        return Answer(
            data,
            chain(_view(table, system, result), launch_lines(x for x in launches if not x.lacks)),
            {"wrote the layout to": out},
            next=(command_line(split, "show", out="layers.html"),),
            details={
                "stages": [_stages(table, system, result)],
                "other splits": [
                    savings("split", "step time", times, result.value),
                    *search_end(result, "splits"),
                ],
                "launchers": launch_lines(launches, rest=True),
            },
        )

    with best_so_far(report) as keep, progress("splitting", None) as bar:
        result = pj.search.layers(
            table,
            workload,
            system,
            link=links,
            no_memory_limit=not memory_limit,
            time_limit=limit,
            on_progress=bar.tell,
            on_best=keep,
        )
    return report(result)


def _as_json(
    table: pj.ScheduleTable, links: pj.Links, result: "pj.results.Found[pj.results.Partition]"
) -> dict[str, Any]:
    layout, best = result.best.layout, result.best
    has_mtp = layout.count("m").any()
    return {
        **table_sizes(table),
        "link": links.model,
        "what": "layers",
        "best": {
            "layers": layout.count("t").tolist(),
            "mtp": layout.count("m").tolist(),
            "pipeline_layout": str(layout),
            # torchtitan has no layers for further tokens in pipelines
            "module_fqns_per_model_part": None if has_mtp else layout.module_fqns(),
            "memory_bytes": best.memory_bytes.tolist(),
            "fits": best.fits,
        },
        **pick(result, FOUND),
        "defaults": {
            name: {**split._asdict(), "layout": str(split.layout)}
            for name, split in best.defaults.items()
        },
    }


def _view(
    table: pj.ScheduleTable, system: "pj.System", result: "pj.results.Found[pj.results.Partition]"
) -> Iterator[object]:
    """Yield the answer, and the stages that differ from most others."""
    best = result.best
    yield (
        f"[bold]{seconds(result.value)}[/] per step with {best.layout} on {table.num_workers} "
        f"workers, {table.num_microbatches} microbatches{_saving(result)}"
    )
    need, room = best.memory_bytes.max(), float(system.memory_available)
    proof = f"no split saves more than {percent(result.gap)} of it"
    if result.lower_bound == 0:
        proof = "it is not proven to be the best"
    elif result.stopped == "optimal":
        proof = "no split is faster"
    yield f"{proof}; memory: {gigabytes(need)} of {gigabytes(room)}"
    if result.stopped == "interrupted":
        yield "interrupted: this is the best so far"


def _saving(result: "pj.results.Found[pj.results.Partition]") -> str:
    """Return how much the split saves against the fastest default that fits."""
    times = {name: split.step_time for name, split in result.best.defaults.items() if split.fits}
    if not times:
        return ""
    name = min(times, key=lambda name: times[name])
    saved = 1 - result.value / times[name] if times[name] else 0.0
    return f": {percent(saved)} less than {name}" if saved > 1e-9 else f": as fast as {name}"


def _stages(
    table: pj.ScheduleTable, system: "pj.System", result: "pj.results.Found[pj.results.Partition]"
) -> object:
    """Draw the layers of each stage, with its times and its memory."""
    best = result.best
    costs = pj.stage_costs(best.workload, system, table)
    layers = best.layout.count("t") + best.layout.count("m")
    blocks = np.ceil(layers * min(1.0, WIDEST / max(layers.max(), 1))).astype(int)
    room = float(system.memory_available)
    holders = [sorted(set(workers)) for workers in table.placement.T.tolist()]
    needs = [best.memory_bytes[workers].max() for workers in holders]
    return grid(
        [
            ("stage", range(table.num_stages)),
            ("worker", [" ".join(map(str, workers)) for workers in holders]),
            ("holds", map(_contents, best.layout.stages)),
            ("layers", ["█" * count for count in blocks]),
            ("F", map(seconds, np.asarray(costs.forward))),
            ("B", map(seconds, np.asarray(costs.backward))),
            (f"of {gigabytes(room)}", map(gigabytes, needs)),
        ]
    )


def _contents(stage: str) -> str:
    """Return what a stage of a layout holds, in words: "Ett" is "embedding, 2 layers"."""
    words = {"E": "embedding", "t": "layers", "m": "MTP", "L": "head"}
    counts = {letter: stage.count(letter) for letter in words if letter in stage}
    texts = (words[a] if a in "EL" else f"{count} {words[a]}" for a, count in counts.items())
    return ", ".join(texts) or "nothing"
