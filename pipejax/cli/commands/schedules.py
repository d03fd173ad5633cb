"""`pipejax schedules`: what can be built."""

from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.schedule import written
from pipejax.cli.output.numbers import print_json
from pipejax.cli.output.report import pick, print_all, print_plain
from pipejax.cli.output.tables import grid
from pipejax.schedules import Builder, find, names


def schedules(json: JsonFlag = False) -> None:
    """List the schedules that can be built, with their sources; also models and systems.

    Example:
      pipejax schedules
    """
    from pipejax.costs.model import model_names
    from pipejax.costs.system import system_names

    builders, broken = _builders()
    if json:
        listed = [
            {"name": name, **pick(builder, "summary options source")}
            for name, builder in builders.items()
        ]
        found = {"schedules": listed, "models": model_names(), "systems": system_names()}
        print_json(found | ({"not_loaded": broken} if broken else {}))
        return
    every = builders.values()
    print_all(
        grid(
            [
                ("schedule", builders),
                ("what it is", (builder.summary for builder in every)),
                ("options", (", ".join(map(written, builder.options)) for builder in every)),
                ("source", (builder.source for builder in every)),
            ]
        ),
        "models: " + ", ".join(model_names()),
        "systems: " + ", ".join(system_names()),
    )
    for reason in broken.values():
        print_plain(f"not loaded: {reason}")


def _builders() -> tuple[dict[str, Builder], dict[str, str]]:
    """All builders by name; of what is installed and cannot be loaded, why."""
    found, broken = {}, {}
    for name in names():
        try:
            found[name] = find(name)
        except ValueError as error:
            broken[name] = str(error)
    return found, broken
