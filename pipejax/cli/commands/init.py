"""`pipejax init`: a file to begin with, which can be read as it is."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pipejax.base.checks import one_of
from pipejax.base.files import write_file
from pipejax.cli.options.values import JsonFlag, Text
from pipejax.cli.output.files import NO_OUTPUT, TEMPLATE, Output
from pipejax.cli.output.report import facts, print_all, print_json, print_plain
from pipejax.cli.output.templates import TEMPLATES, text_of


def init(
    kind: Annotated[
        str, typer.Argument(metavar="|".join(TEMPLATES), help="What the file is to hold.")
    ],
    model: Text = None,
    system: Text = None,
    out: Annotated[Output, TEMPLATE] = NO_OUTPUT,
    json: JsonFlag = False,
) -> None:
    """Write a file of costs, a model, a system or a sweep to begin with; it can be read as it is.

    Options:
      model: the one that a model's file is a copy of; llama3-70b if not given.
      system: the one that a system's file is a copy of; h100 if not given.
      out: costs.json, model.json, system.json or sweep.toml if not given.

    Example:
      pipejax init system --system b200 --out ours.json
    """
    kind = one_of(kind, TEMPLATES, "what to begin")
    template = TEMPLATES[kind]
    for name, given in (("model", model), ("system", system)):
        if given is not None and name != kind:
            raise ValueError(f"--{name} {given} does not go with {kind}: its file copies none")
    if out.path is None:
        out.path = Path(template.file)
    out.check(TEMPLATE._replace(suffixes=(Path(template.file).suffix,)))
    text = text_of(kind, out.path, {"model": model, "system": system}.get(kind))
    out.save(lambda draft: write_file(draft, text), lambda: text)
    command = template.used_by.replace("FILE", str(out.path))
    if json:
        told = {"keys": template.meanings, "used_by": command}
        return print_json({"kind": kind, **out.as_json(), **told})
    if out.written is not None:
        print_plain(f"wrote {out.written}")
    print_all(facts((key, escape(meaning)) for key, meaning in template.meanings.items()))
    print_plain(f"All keys are on the page {template.page} of the documentation. Try:")
    print_plain(f"  {command}")
