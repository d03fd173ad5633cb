"""Remedies that a solver finds: they take some seconds."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from pipejax.analysis.runs.activation_memory import activation_memory
from pipejax.search.partition.partition import layers
from pipejax.search.remedies.setup import Setup
from pipejax.search.schedule.optimize import optimize
from pipejax.search.schedule.problem import LINKS_OF_SEARCH

SECONDS = 8.0  # that each search may take


def optimised(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """The fastest schedule found of these stages in the memory that the run uses."""
    if setup.links.model not in LINKS_OF_SEARCH:
        return
    peak = activation_memory(setup.run).peak
    try:
        found = optimize(
            setup.table,
            setup.costs,
            memory_limit=np.maximum(peak, 1.0),
            link=setup.links,
            time_limit=SECONDS,
        )
    except (ValueError, ModuleNotFoundError):  # no problem that it knows, or no solver
        return
    yield (
        "order of ops, in the memory of now",
        dataclasses.replace(
            setup,
            table=found.best.table,
            schedule=None,
            options={**setup.options, "optimise": ",".join(f"{each:g}" for each in peak)},
        ),
    )


def layouts(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """The fastest split of a model's layers over the stages."""
    workload, system = setup.source.workload, setup.source.system
    if workload is None or system is None or workload.pipeline_layout:
        return
    try:
        found = layers(setup.table, workload, system, link=setup.links, time_limit=SECONDS)
    except ValueError:
        return
    layout = str(found.best.layout)
    source = setup.source.with_workload(found.best.workload)
    ends = dict.fromkeys(("embedding_units", "loss_units"))
    options = {**setup.options, **ends, "pipeline_layout": layout}
    what = f"layers over stages: {layout}"
    yield what, dataclasses.replace(setup, source=source, options=options)
