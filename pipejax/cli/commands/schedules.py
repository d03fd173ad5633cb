"""`pipejax schedules`: what can be built, and which models, systems and stacks have a name."""

import warnings
from collections.abc import Callable
from typing import Any

import pipejax as pj
from pipejax.base.progress import Notice
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import option_text
from pipejax.cli.output.report import Answer, has_lines, is_json, pick
from pipejax.cli.output.tables import Column, rows_table
from pipejax.schedules import Builder, find, names


def _scaled(factor: float) -> Callable[[float], str]:
    """Return a function that writes a number divided by a factor, or a dash for no number."""
    return lambda value: f"{float(f'{value / factor:.4g}'):.5g}" if value else "-"


NAME, SOURCE = Column("name", "name"), Column("source", "source")
MODELS = (
    NAME,
    Column("billion parameters", "parameters", _scaled(1e9)),
    Column("of these active", "active_parameters", _scaled(1e9)),
    *(Column(name, name) for name in ("layers", "hidden", "sequence")),
    Column("experts", "experts", _scaled(1)),
)
SYSTEMS = (
    NAME,
    Column("peak [TFLOP/s]", "peak_flops", _scaled(1e12)),
    Column("memory [GB]", "memory_capacity", _scaled(1e9)),
    Column("its rate [TB/s]", "memory_bandwidth", _scaled(1e12)),
    Column("of a node", "gpus_per_node", _scaled(1)),
    Column("node link [GB/s]", "node_bandwidth", _scaled(1e9)),
    Column("network link [GB/s]", "network_bandwidth", _scaled(1e9)),
)
COLUMNS = (
    Column("schedule", "name"),
    Column("what it is", "summary"),
    Column("sizes allowed", "legal"),
    Column("options", "options", lambda options: ", ".join(map(option_text, options))),
    Column("source", "source"),
)
LETTERS = "P workers, r one of them, M microbatches, V stages per worker, K slices of a microbatch"
SMALL_SIZE = {"num_workers": 4, "num_microbatches": 8}  # of which every built-in schedule exists


@options
def schedules(*, models: bool = False, systems: bool = False, stacks: bool = False) -> Answer:
    """List the schedules that can be built, with their sources; also models, systems and stacks.

    Of models the sizes, of systems the rates and memory of one accelerator, links each way; their
    sources are in --json and --format csv.

    With --json it is a list of {name, phases, legal, source, ..}: phases of a table of four workers
    and eight microbatches, and which numbers can be built; both are null where they are not known.
    """
    from pipejax.costs.model.model import load_model, model_names
    from pipejax.costs.model.stack import load_stack, stack_names
    from pipejax.costs.system.system import load_system, system_names

    lists: dict[str, tuple[bool, Callable[[str], Any], tuple[str, ...]]] = {
        "--models": (models, lambda name: _model(load_model(name)), model_names()),
        "--systems": (systems, lambda name: _system(load_system(name)), system_names()),
        "--stacks": (stacks, lambda name: pick(load_stack(name), "source"), stack_names()),
    }
    selected = [option for option, (is_selected, *_) in lists.items() if is_selected]
    if selected[1:]:
        raise ValueError(f"{selected[0]} and {selected[1]} are two lists: choose one")
    if selected:
        _, load, list_names = lists[selected[0]]
        rows = [{"name": name, **load(name)} for name in list_names]
        columns = {"--models": MODELS, "--systems": SYSTEMS}.get(selected[0], (NAME, SOURCE))
        if SOURCE not in columns and not has_lines():
            columns = (*columns, SOURCE)
        return Answer(rows, [f"{len(rows)} {selected[0][2:]}", rows_table(rows, columns)])
    rows = [
        {
            "name": name,
            # takes half of the time, and is in no column
            "phases": _phases(builder) if is_json() else None,
            "legal": builder.legal or None,
            **pick(builder, "source summary options"),
        }
        for name, builder in _builders().items()
    ]
    other_lists = (f"{option[2:]}: {', '.join(items)}" for option, (*_, items) in lists.items())
    lead = f"{len(rows)} schedules; {LETTERS}"
    return Answer(rows, [lead, rows_table(rows, COLUMNS), *other_lists])


def _model(model: "pj.Model") -> dict[str, Any]:
    """Return the sizes of a model: all parameters, and the parameters active for a token."""
    experts = 0 if model.moe is None else model.moe.experts
    sizes = pick(model, "source parameters active_parameters layers hidden sequence")
    return sizes | {"experts": experts}


def _system(system: "pj.System") -> dict[str, Any]:
    """Return the rates of a system in SI units, per accelerator."""
    rates = pick(system, "source peak_flops memory_capacity memory_bandwidth gpus_per_node")
    links = {"node_bandwidth": system.node.bandwidth, "network_bandwidth": system.network.bandwidth}
    return rates | links


def _builders() -> dict[str, Builder]:
    """Return all builders by name; warn of those that cannot be loaded."""
    builders = {}
    for name in names():
        try:
            builders[name] = find(name)
        except ValueError as error:
            warnings.warn(f"not loaded: {error}", Notice, stacklevel=2)
    return builders


def _phases(builder: Builder) -> list[str] | None:
    try:
        table = builder.function(**SMALL_SIZE)
    except Exception:  # a user's own function may have needs, and faults, of its own
        return None
    return [phase.name for phase in table.used_phases]
