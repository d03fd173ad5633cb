"""Write the page: one file with its style sheet, its scripts and its data."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipejax.plots import palette
from pipejax.plots.explorer.payload import NOTHING, Carried, Explored, payload

HERE = Path(__file__).parent
# JavaScript modules, each after the modules that it imports
SCRIPTS = (
    *("text", "unpacking", "schedule", "tables", "lowering", "choice"),
    *("state", "palette", "residuals", "bars", "curves", "panels", "sliders", "input", "explorer"),
)
# statements of a module; the page holds each module in a function
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def page(
    explored: Sequence[Explored],
    *,
    unit: str = "s",
    show: Mapping[str, bool] | None = None,
    view: tuple[float, float] | None = None,
    title: str = "",
    carried: Carried = NOTHING,
) -> str:
    """Return the HTML of a page that shows runs and repeats them at other times."""
    scene = _scene(explored, unit, carried) | {"show": dict(show or {}), "view": view}
    scene["title"] = title or scene["title"]
    return rendered(
        HERE / "page.html",
        title=f"{scene['title']}, {scene['subtitle']}",
        style=_read("page.css"),
        script="\n".join(map(_script, SCRIPTS)),
        # < is escaped, so no text ends the script
        scene=json.dumps(scene, allow_nan=False).replace("<", "\\u003c"),
    )


def rendered(template: Path, **values: Any) -> str:
    """Fill a template of HTML; values are escaped unless the template marks them as safe."""
    from jinja2 import Environment, StrictUndefined  # of the command line's extra

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def _scene(explored: Sequence[Explored], unit: str, carried: Carried) -> dict[str, Any]:
    """Return the payload of a page, with title, subtitle and colours."""
    runs = [entry.run for entry in explored]
    name = explored[0].name or runs[0].schedule
    count = len(runs) + sum(entry.recorded is not None for entry in explored)
    names = name if count == 1 else f"{count} schedules"
    sizes = {(run.workers, run.microbatches) for run in runs}
    workers, microbatches = sizes.pop()
    sizes_text = "" if sizes else f"{workers} workers, {microbatches} microbatches"
    return payload(explored, unit=unit, carried=carried) | {
        "title": names,
        "subtitle": sizes_text or "under one time axis",
        "seconds": palette.SECONDS,
    }


def _script(name: str) -> str:
    """Wrap a module in a function, because local pages cannot load modules."""
    text = _read(f"{name}.js")
    exported = ", ".join(match[1] for match in _EXPORT.findall(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = modules.\2;", text))
    return f"modules.{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
