"""`pipejax schedules`: what can be built."""

from rich.table import Table

from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.output.numbers import console, print_json
from pipejax.schedules import REGISTRY


def schedules(json: JsonFlag = False) -> None:
    """List the schedules that can be built, with their sources; also models and systems."""
    from pipejax.costs.model import model_names
    from pipejax.costs.system import system_names

    if json:
        listed = [
            {
                "name": name,
                "summary": builder.summary,
                "options": list(builder.options),
                "source": builder.source,
            }
            for name, builder in REGISTRY.items()
        ]
        print_json(
            {"schedules": listed, "models": list(model_names()), "systems": list(system_names())}
        )
        return
    grid = Table("schedule", "what it is", "options", "source")
    for name, builder in REGISTRY.items():
        options = ", ".join(f"--{option.replace('_', '-')}" for option in builder.options)
        grid.add_row(name, builder.summary, options, builder.source)
    out = console()
    out.print(grid)
    out.print("models: " + ", ".join(model_names()))
    out.print("systems: " + ", ".join(system_names()))
