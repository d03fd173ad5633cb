"""Worked examples: scripts in cells (docs/examples) become executed notebooks, and pages."""

import base64
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient
from traitlets.config import Config

from pages.repository import ROOT

FOLDER = ROOT / "docs" / "examples"
PICTURES: Mapping[str, str] = {"image/svg+xml": "svg", "image/png": "png"}
OUTPUT = "{.text .output .no-copy}"
SECONDS = 600  # that a cell may take


def notebook_files(path: Path, *, execute: bool) -> dict[str, str | bytes]:
    """Return the files of a script in cells: its page, the notebook to download, its pictures."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    if execute:
        run(notebook)
    name = f"examples/{path.stem}"
    pictures: dict[str, str | bytes] = {}
    parts: list[str] = []
    for number, cell in enumerate(notebook.cells):
        parts.append(cell.source if cell.cell_type == "markdown" else _block("python", cell.source))
        for output in cell.get("outputs", ()):
            shown, picture = _shown(output, f"{path.stem}-{number}")
            parts.append(shown)
            pictures |= {f"examples/{file}": content for file, content in picture.items()}
    title, *rest = parts
    head, _, about = title.partition("\n")
    download = f"[:material-download: notebook]({path.stem}.ipynb){{ .md-button download }}"
    page = "\n\n".join([head, download, about.strip(), *rest])
    return {f"{name}.md": page, f"{name}.ipynb": jupytext.writes(notebook, fmt="ipynb"), **pictures}


def run(notebook: Any) -> None:
    """Execute a notebook in a folder of its own, without opening a port; the first error ends it.

    Raises:
      CellExecutionError: with the cell and its traceback.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            resources={"metadata": {"path": folder}},
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/socket"}}),
        )
        client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


def scripts() -> list[Path]:
    """All worked examples."""
    return sorted(FOLDER.glob("*.py"))


def _shown(output: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return an output as Markdown, and the picture that it is."""
    if output.output_type == "stream":
        return _block(OUTPUT, output.text), {}
    data = output.data
    for kind, suffix in PICTURES.items():
        if kind in data:
            raw = data[kind]
            content = raw.encode() if suffix == "svg" else base64.b64decode(raw)
            return f"![What the cell shows]({name}.{suffix})", {f"{name}.{suffix}": content}
    if "<progress" in data.get("text/html", ""):
        return "", {}  # a bar that has come to its end
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{data["text/html"]}\n</div>', {}
    return _block(OUTPUT, data["text/plain"]), {}


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
