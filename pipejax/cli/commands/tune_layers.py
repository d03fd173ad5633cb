"""`pipejax tune layers`: which layers each stage holds, with a proof."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, RunOptions
from pipejax.cli.options.scenario import build, command_line, parse_scenario
from pipejax.cli.options.tables import SizedSchedule
from pipejax.cli.options.values import (
    CountIfGiven,
    Text,
    TimeLimit,
    parse_seconds,
)
from pipejax.cli.output.answer import Answer, best_so_far
from pipejax.cli.output.files import NO_OUTPUT, Output
from pipejax.cli.output.kinds import LAYOUT
from pipejax.cli.output.launches import launch_json, launch_lines
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import FOUND, Column, grid, heading, pick, sizes_of, table_of
from pipejax.schedules.naming import find

if TYPE_CHECKING:
    from pipejax.search.found import Found
    from pipejax.search.partition.partition import Partition

from pipejax.cli.commands.tune import tune_settings, tuned_model

WIDEST = 40  # blocks that the picture of a stage has at most


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
    """Search the best split and answer; if interrupted, what was found by then."""
    table, links = scenario.table(), scenario.links
    workload, system = tuned_model(scenario, "tune layers")
    began = time.monotonic()

    def report(found: "Found[Partition]") -> Answer:
        told = pj.costing.launches(found.best.workload, table)
        result = _split_as_json(table, links, found) | {
            "seconds": time.monotonic() - began,
            "launch": launch_json(told),
        }
        if out.path is not None and out.path.suffix == ".txt":
            out.save_text(f"{found.best.layout}\n")
        else:
            out.save_json(result)
        said = chain(_said(scenario, found, result), launch_lines(told, rest=True))
        assert scenario.source.workload is not None
        shown = scenario.with_workload(
            dataclasses.replace(
                scenario.source.workload,
                pipeline_layout=str(found.best.layout),
                embedding_units=0,  # units do not go with a layout
                loss_units=0,
            )
        )
        go_on = (command_line(shown, "show", out="layers.html"),)
        return Answer(result, said, {"wrote the layout to": out}, next=go_on)

    with best_so_far(report) as keep, progress("splitting", None) as bar:
        found = pj.search.layers(
            table,
            workload,
            system,
            link=links,
            no_memory_limit=not memory_limit,
            time_limit=limit,
            on_progress=bar.tell,
            on_best=keep,
        )
    return report(found)


def _split_as_json(
    table: pj.ScheduleTable, links: pj.Links, found: "Found[Partition]"
) -> dict[str, Any]:
    layout, best = found.best.layout, found.best
    has_mtp = layout.count("m").any()
    return {
        **sizes_of(table),
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
        **pick(found, FOUND),
        "defaults": {
            name: {**split._asdict(), "layout": str(split.layout)}
            for name, split in best.defaults.items()
        },
    }


def _said(
    scenario: "pj.Scenario", found: "Found[Partition]", result: Mapping[str, Any]
) -> Iterator[object]:
    proof = "no split is faster"
    if found.stopped != "optimal":
        proof = f"no split saves more than {percent(found.gap)} of it"
    if found.lower_bound == 0:
        proof = "of which nothing is proven"
    yield f"{heading(result)}: [bold]{seconds(found.value)}[/], {proof}"
    yield _stages(scenario, found)
    yield table_of(
        ({"name": name, **own} for name, own in result["defaults"].items()),
        (
            Column("other split", "name"),
            Column("layout", "layout"),
            Column("step time", "step_time", seconds),
            Column("fits", "fits", lambda fits: "yes" if fits else "no"),
            Column(
                "found saves", "step_time", lambda time: percent(1 - found.value / (time or 1.0))
            ),
        ),
    )
    yield f"{found.evaluated} splits evaluated in {result['seconds']:.1f} s"
    if found.stopped == "interrupted":
        yield "interrupted: this is the best so far"


def _stages(scenario: "pj.Scenario", found: "Found[Partition]") -> object:
    """Draw what each stage holds, with its times."""
    table, (_, system) = scenario.table(), tuned_model(scenario, "tune layers")
    costs = pj.stage_costs(found.best.workload, system, table)
    layers = found.best.layout.count("t") + found.best.layout.count("m")
    blocks = np.ceil(layers * min(1.0, WIDEST / max(layers.max(), 1))).astype(int)
    room = float(system.memory_available)
    holders = [sorted(set(workers)) for workers in table.placement.T.tolist()]
    needs = [found.best.memory_bytes[workers].max() for workers in holders]
    return grid(
        [
            ("stage", range(table.num_stages)),
            ("worker", [" ".join(map(str, workers)) for workers in holders]),
            ("holds", map(_held, found.best.layout.stages)),
            ("layers", ["█" * count for count in blocks]),
            ("F", map(seconds, np.asarray(costs.forward))),
            ("B", map(seconds, np.asarray(costs.backward))),
            (f"of {gigabytes(room)}", map(gigabytes, needs)),
        ]
    )


def _held(stage: str) -> str:
    words = {"E": "embedding", "t": "layers", "m": "MTP", "L": "head"}
    found = []
    for letter, word in words.items():
        if count := stage.count(letter):
            found.append(word if letter in "EL" else f"{count} {word}")
    return ", ".join(found) or "nothing"
