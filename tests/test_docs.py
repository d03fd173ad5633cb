"""The documentation site: it builds without a warning, leads nowhere wrong, shows what can be run."""

import ast
import contextlib
import io
import json
import re
from pathlib import Path

import jupytext
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import pipejax as pj
from pages.commands import check_line, command_lines
from pages.links import faults
from pages.notebooks import notebook_files, scripts

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without what takes time, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, open(DOCS.parent / "mkdocs.yml") as settings:
        patch.chdir(DOCS.parent)
        patch.setenv("DOCS_WHOLE", "false")
        build(load_config(settings, site_dir=str(folder)))
    return folder


def test_the_site_leads_nowhere_wrong_and_fetches_nothing(site):
    assert list(faults(site)) == []


def test_every_public_name_is_in_the_reference_once():
    shown = re.findall(r"^::: pipejax\.(\S+)$", "".join(p.read_text() for p in PAGES), re.M)
    names = {*dir(pj)} - {"schedules", "training"}  # rooms: their names are shown
    rooms = {f"training.{name}" for name in pj.training.__all__}
    inner = {"REGISTRY", "check_size"}  # what other rooms use
    rooms |= {f"schedules.{name}" for name in {*pj.schedules.__all__} - inner}
    assert sorted(shown) == sorted(names | rooms)


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: path.stem)
def test_commands_on_a_page_can_be_run(path):
    for line in command_lines(path.read_text()):
        check_line(line)


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_commands_of_an_example_can_be_run(path):
    for line in command_lines(notebook_files(path, execute=False)[f"examples/{path.stem}.md"]):
        check_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "pipejax evaluate --schedule 1f1b --worker 4",
        "pipejax evalute --schedule 1f1b",
        "pipejax evaluate --schedule 1f1b --schedule gpipe",
        "make papers",
        "python -m sweeps.nothing",
        "unheard-of --option",
    ],
)
def test_a_command_that_could_not_be_run_is_found(line):
    with pytest.raises(Exception, match=r"worker|evalute|twice|papers|nothing|unheard"):
        check_line(line)


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ('<a href="gone.html">', "no such file"),
        ('<a href="#gone">', "no such anchor"),
        ('<a href="http://pipejax.org">', "not https"),
        ('<a href="https://nowhere">', "no address"),
        ('<img src="gone.png">', "no such file"),
        ('<script src="https://cdn.example.org/a.js"></script>', "fetches"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "fetches"),
    ],
)
def test_a_fault_of_a_page_is_found(tmp_path, page, fault):
    (tmp_path / "index.html").write_text(page)
    (found,) = faults(tmp_path)
    assert fault in found


def shown_by(script, folder):
    """What the cells of a script show, as a notebook does, cell by cell."""
    names, shown = {"__name__": "__main__"}, []
    for cell in jupytext.read(script, fmt="py:percent").cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(folder):
            exec(compile(tree, script.name, "exec"), names)
            value = last and eval(compile(ast.Expression(last.value), script.name, "eval"), names)
        shown.append((printed.getvalue() + ("" if value is None else f"{value!r}\n")).splitlines())
    return shown


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.example
@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_examples_show_what_their_text_speaks_of(script, data, tmp_path):
    """The text tells of numbers; here they stand, so that a change of them is seen."""
    expected = json.loads((data / "examples.json").read_text())
    assert shown_by(script, tmp_path) == expected[script.stem]
