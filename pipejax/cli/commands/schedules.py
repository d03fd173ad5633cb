"""`pipejax schedules`: what can be built, and which models, systems and stacks have a name."""

import warnings
from collections.abc import Callable
from typing import Any

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


def schedules(models: bool = False, systems: bool = False, stacks: bool = False) -> Answer:
    """List the schedules that can be built, with their sources; also models, systems and stacks.

    With --json it is a list of {name, phases, legal, source, ..}: phases of a table of two workers
    and two microbatches, and which numbers can be built; both are null where they are not known.

    Example:
      pipejax schedules
    """
    from pipejax.costs.model.model import load_model, model_names
    from pipejax.costs.model.stack import load_stack, stack_names
    from pipejax.costs.system.system import load_system, system_names

    lists: dict[str, tuple[bool, Callable[[str], Any], tuple[str, ...]]] = {
        "--models": (models, load_model, model_names()),
        "--systems": (systems, load_system, system_names()),
        "--stacks": (stacks, load_stack, stack_names()),
    }
    asked = [name for name, (is_asked, *_) in lists.items() if is_asked]
    if asked[1:]:
        raise ValueError(f"{asked[0]} and {asked[1]}: choose one")
    if asked:
        _, load, every = lists[asked[0]]
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
    said = (f"{kind[2:]}: {', '.join(every)}" for kind, (*_, every) in lists.items())
    return Answer(rows, [table_of(rows, COLUMNS), *said])


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
