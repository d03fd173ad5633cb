"""The reference of the library: a page for each namespace, with the names that its stub lists."""

import inspect
from collections.abc import Iterable
from types import ModuleType

import pipejax as pj

GUIDES = {
    "analysis": "formula.md",
    "costing": "own_costs.md",
    "links": "link_models.md",
    "plots": "pictures.md",
    "schedules": "own_schedules.md",
    "search": "optimize.md",
    "traces": "traces.md",
    "training": "asynchronous.md",
}
WRITTEN_BY_HAND = "typing"  # its names belong to another package


def api_pages() -> dict[str, str]:
    """Return the Markdown of each page by its path."""
    namespaces = [name for name in dir(pj) if inspect.ismodule(getattr(pj, name))]
    pages = {
        f"api/{name}.md": _page(f"pj.{name}", getattr(pj, name), GUIDES.get(name))
        for name in namespaces
    }
    del pages[f"api/{WRITTEN_BY_HAND}.md"]
    pages["api/pipejax.md"] = _page("pipejax", pj, links=namespaces)
    return pages


def _page(title: str, room: ModuleType, guide: str | None = None, links: Iterable[str] = ()) -> str:
    """Return a page of the names of a room: `links` have pages of their own."""
    parts = [f"# {title}", (room.__doc__ or "").partition("\n\n")[0]]
    parts += [f"[Guide](../{guide})"] if guide else []
    parts += [f"- [`pj.{name}`]({name}.md)" for name in links]
    # mkdocstrings shows what has a docstring: constants have none
    names = [name for name in room.__all__ if not name.isupper() and name not in links]
    parts += [f"::: {room.__name__}.{name}" for name in names]
    return "\n\n".join(parts) + "\n"
