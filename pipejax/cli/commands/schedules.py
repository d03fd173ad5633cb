"""`pipejax schedules`: what can be built, and which models and systems have a name."""

import warnings

from pipejax.base.progress import Notice
from pipejax.cli.options.tables import written
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.report import Column, pick, table_of
from pipejax.schedules import Builder, find, names
from pipejax.schedules.cells.ops import Phase

SOURCES = (Column("name", "name"), Column("source", "source"))
COLUMNS = (
    Column("schedule", "name"),
    Column("what it is", "summary"),
    Column("legal", "legal"),
    Column("options", "options", lambda options: ", ".join(map(written, options))),
    Column("source", "source"),
)
SMALL = {"num_workers": 2, "num_microbatches": 2}  # that every built-in schedule has


def schedules(models: bool = False, systems: bool = False) -> Answer:
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
        sources = [{"name": name, "source": load(name).source} for name in every]
        return Answer(sources, [table_of(sources, SOURCES)])
    rows = [
        {
            "name": name,
            "phases": _phases(builder),
            "legal": builder.legal or None,
            **pick(builder, "source summary options"),
        }
        for name, builder in _builders().items()
    ]
    others = {"models": model_names(), "systems": system_names()}
    names = (f"{kind}: {', '.join(every)}" for kind, every in others.items())
    return Answer(rows, [table_of(rows, COLUMNS), *names])


def _builders() -> dict[str, Builder]:
    """All builders by name; what is installed and cannot be loaded is said."""
    found = {}
    for name in names():
        try:
            found[name] = find(name)
        except ValueError as error:
            warnings.warn(f"not loaded: {error}", Notice, stacklevel=2)
    return found


def _phases(builder: Builder) -> list[str] | None:
    """Letters of the phases of a small table, if there is one."""
    try:
        table = builder.function(**SMALL)
    except Exception:  # a user's own function may have needs, and faults, of its own
        return None
    there = set(table.ops.phase.tolist())
    return [phase.name for phase in Phase if phase in there]
