"""`pipejax schedules`: what can be built, and which models and systems have a name."""

import warnings
from typing import Any

from pipejax.base.progress import Notice
from pipejax.cli.options.tables import written
from pipejax.cli.options.values import JsonFlag
from pipejax.cli.output.report import grid, print_all, print_json
from pipejax.schedules import Builder, find, names
from pipejax.schedules.cells.ops import Phase

SMALL = {"num_workers": 2, "num_microbatches": 2}  # that every built-in schedule has


def schedules(models: bool = False, systems: bool = False, json: JsonFlag = False) -> None:
    """List the schedules that can be built, with their sources; also models and systems.

    With --json it is a list of {name, phases, legal, source, ..}: phases of a table of two workers
    and two microbatches, and which numbers can be built; both are null where they are not known.

    Example:
      pipejax schedules
    """
    from pipejax.costs.model.model import load_model, model_names
    from pipejax.costs.system.system import load_system, system_names

    if models and systems:
        raise ValueError("--models and --systems: choose one")
    if models or systems:
        load, every = (load_model, model_names()) if models else (load_system, system_names())
        _print_sources({name: load(name).source for name in every}, json)
        return
    builders = _builders()
    if json:
        print_json([_as_json(name, builder) for name, builder in builders.items()])
        return
    print_all(
        grid(
            [
                ("schedule", builders),
                ("what it is", (builder.summary for builder in builders.values())),
                ("legal", (builder.legal or "-" for builder in builders.values())),
                ("options", (", ".join(map(written, each.options)) for each in builders.values())),
                ("source", (builder.source for builder in builders.values())),
            ]
        ),
        "models: " + ", ".join(model_names()),
        "systems: " + ", ".join(system_names()),
    )


def _print_sources(sources: dict[str, str], json: bool) -> None:
    if json:
        print_json([{"name": name, "source": source} for name, source in sources.items()])
    else:
        print_all(grid([("name", sources), ("source", sources.values())]))


def _builders() -> dict[str, Builder]:
    """All builders by name; what is installed and cannot be loaded is said."""
    found = {}
    for name in names():
        try:
            found[name] = find(name)
        except ValueError as error:
            warnings.warn(f"not loaded: {error}", Notice, stacklevel=2)
    return found


def _as_json(name: str, builder: Builder) -> dict[str, Any]:
    return {
        "name": name,
        "phases": _phases(builder),
        "legal": builder.legal or None,
        "source": builder.source,
        "summary": builder.summary,
        "options": builder.options,
    }


def _phases(builder: Builder) -> list[str] | None:
    """Letters of the phases of a small table, if there is one."""
    try:
        table = builder.function(**SMALL)
    except Exception:  # a user's own function may have needs, and faults, of its own
        return None
    there = set(table.ops.phase.tolist())
    return [phase.name for phase in Phase if phase in there]
