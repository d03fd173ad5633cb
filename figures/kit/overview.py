"""The page of all papers: their commands and minutes, their claims, datasets and figures."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SWEEPS = Path(__file__).parents[2] / "sweeps"


class Source(NamedTuple):
    """Source of figures.

    Attributes:
      command: writes the store; a path comes behind it.
      scripts: draw from it.
      to_folder: whether that path is the store's folder, not the store itself.
    """

    command: str
    scripts: tuple[ModuleType, ...]
    to_folder: bool = False

    @property
    def paper(self) -> str:
        """Folder in sweeps/ of the file that the command runs."""
        (path,) = (word for word in self.command.split() if word.startswith("sweeps"))
        return path.replace("/", ".").split(".")[1]


TARGETS: Mapping[str, tuple[str, str]] = {  # what makes all of a paper, and how long it takes
    "tabular": ("make paper", "3 minutes"),
    "pipedream": ("make pipedream", "9 minutes"),
    "optpipe": ("make optpipe", "10 minutes"),
    "published": ("make fidelity", "10 minutes"),
    "design": ("make sweeps", "some minutes"),
    "findings": ("make findings", "4 minutes"),
}


def overview(stores: Mapping[str, Source]) -> str:
    """Write the page.

    Args:
      stores: where the figures come from, by the name of their dataset.

    Returns:
      The page in Markdown.
    """
    parts = [
        "# Papers, claims and figures\n",
        "A sweep writes a dataset, a figure draws one; claims are judged by datasets. Each paper\n"
        "has a folder here and in `figures/`; `kit/` holds what they share.\n",
        "This page is written by `python -m figures --overview sweeps/README.md`.\n",
    ]
    for paper, (target, minutes) in TARGETS.items():
        head = _first_line(importlib.import_module(f"sweeps.{paper}"))
        parts += [f"## {paper}\n", f"{head} `{target}` makes all of it in {minutes}.\n"]
        if (SWEEPS / paper / "claims.py").exists():
            command = f"python -m sweeps.{paper}.claims --data results"
            parts += [f"Claims with their verdicts: `{command}`.\n"]
        rows = [_row(name, source) for name, source in stores.items() if source.paper == paper]
        parts += ["\n".join(["| dataset | command | figures |", "|---|---|---|", *rows]) + "\n"]
    return "\n".join(parts)


def _row(name: str, source: Source) -> str:
    path = "results" if source.to_folder else f"results/{name}"
    figures = (
        f"[{script.__name__.rpartition('.')[2]}](../{script.__name__.replace('.', '/')}.py): "
        f"{_first_line(script)}"
        for script in source.scripts
    )
    return f"| {name} | `{source.command} {path}` | {'<br>'.join(figures)} |"


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").splitlines()[0]
