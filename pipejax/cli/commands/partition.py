"""`pipejax partition`: which layers each stage holds."""

import json as json_text
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.values import JsonFlag, TimeLimit, parse_seconds
from pipejax.cli.output.files import LAYOUT, NO_OUTPUT, Output
from pipejax.cli.output.report import (
    FOUND,
    best_so_far,
    gigabytes,
    grid,
    percent,
    pick,
    print_all,
    print_json,
    print_written,
    progress,
    seconds,
)

if TYPE_CHECKING:
    from pipejax.search.found import Found
    from pipejax.search.partition.partition import Partition

WIDEST = 40  # blocks that the picture of a stage has at most


def partition(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    no_memory_limit: bool = False,
    time_limit: TimeLimit = "60",
    out: Annotated[Output, LAYOUT] = NO_OUTPUT,
    json: JsonFlag = False,
) -> None:
    """Split a model into the stages that make the step shortest, for Megatron and torchtitan.

    Options:
      out: all that --json prints (.json), or Megatron's layout alone (.txt), for
        `--pipeline-layout`.

    Example:
      pipejax partition -s 1f1b -P 4 -M 16 -m llama3-8b -y h100 --minibatch 16 --tensor-parallel 2
    """
    if pricing is None or pricing.workload is None or pricing.system is None:
        raise ValueError("partition needs --model NAME --system NAME --minibatch N")
    workload, system = pricing.workload, pricing.system
    pricing.check_alike("partition")
    if pricing.offloads:
        raise ValueError(
            "--offload does not go with partition: what O takes follows from the split"
        )
    limit = parse_seconds(time_limit, "--time-limit")

    began = time.monotonic()

    def report(found: "Found[Partition]") -> None:
        result = _as_json(table, links, found) | {"seconds": time.monotonic() - began}
        text = (
            str(found.best.layout)
            if out.path is not None and out.path.suffix == ".txt"
            else json_text.dumps(result, indent=2)
        )
        out.save(lambda draft: write_file(draft, text + "\n"), lambda: text + "\n")
        if json:
            return print_json(result | out.as_json())
        _print(table, workload, system, found, result)
        print_written("wrote the layout to", out.written)

    with (
        best_so_far(report) as keep,
        progress("splitting", None) as bar,
    ):
        found = pj.search.layers(
            table,
            workload,
            system,
            link=links,
            memory_limit=not no_memory_limit,
            time_limit=limit,
            on_progress=bar.tell,
            on_best=keep,
        )
    report(found)


def _as_json(table: pj.ScheduleTable, links: pj.Links, found: "Found[Partition]") -> dict[str, Any]:
    layout, best = found.best.layout, found.best
    has_mtp = layout.count("m").any()
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "link": links.model,
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


def _print(
    table: pj.ScheduleTable,
    workload: "pj.Workload",
    system: "pj.System",
    found: "Found[Partition]",
    result: Mapping[str, Any],
) -> None:
    proof = "no split is faster"
    if found.stopped != "optimal":
        proof = f"no split saves more than {percent(found.gap)} of it"
    if found.lower_bound == 0:
        proof = "of which nothing is proven"
    print_all(
        f"[bold]{escape(table.name)}[/], {table.num_workers} workers, {table.num_stages} stages, "
        f"{table.num_microbatches} microbatches: [bold]{seconds(found.value)}[/], {proof}",
        _stages(table, workload, system, found),
        _defaults(found),
        f"Megatron: --pipeline-model-parallel-size {table.num_workers} "
        f'--pipeline-model-parallel-layout "{found.best.layout}"',
    )
    if result["best"]["module_fqns_per_model_part"] is not None:
        listed = json_text.dumps(result["best"]["module_fqns_per_model_part"])
        print_all(escape(f"torchtitan: module_fqns_per_model_part = {listed}"))
    print_all(f"{found.evaluated} splits evaluated in {result['seconds']:.1f} s")
    if found.stopped == "interrupted":
        print_all("interrupted: this is the best so far")


def _stages(
    table: pj.ScheduleTable, workload: "pj.Workload", system: "pj.System", found: "Found[Partition]"
) -> object:
    """Draw what each stage holds, with its times."""
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
    """Say what the letters of a stage are."""
    words = {"E": "embedding", "t": "layers", "m": "MTP", "L": "head"}
    found = []
    for letter, word in words.items():
        if count := stage.count(letter):
            found.append(word if letter in "EL" else f"{count} {word}")
    return ", ".join(found) or "nothing"


def _defaults(found: "Found[Partition]") -> object:
    splits = found.best.defaults
    saved = [1 - found.value / (each.step_time or 1.0) for each in splits.values()]
    return grid(
        [
            ("other split", splits),
            ("layout", [str(each.layout) for each in splits.values()]),
            ("step time", [seconds(each.step_time) for each in splits.values()]),
            ("fits", ["yes" if each.fits else "no" for each in splits.values()]),
            ("found saves", map(percent, saved)),
        ]
    )
