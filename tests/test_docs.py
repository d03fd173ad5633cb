"""The documentation site: it builds without a warning, leads nowhere wrong, shows what can be run."""

import ast
import contextlib
import dataclasses
import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import jupytext
import pytest
from daily import read_cases, with_cases
from mkdocs.commands.build import build
from mkdocs.config import load_config
from public_names import NAMES, public

import pipejax as pj
from pages import gallery
from pages.commands import check_line, check_mention, command_lines, mentions
from pages.input_files import FILES, SCHEMA, input_file_pages
from pages.links import faults
from pages.notebooks import notebook_files, scripts
from pages.repository import ROOT
from pipejax.analysis.runs.timeline import bars
from pipejax.base.data_files import UNITS
from pipejax.base.file_fields import NEEDED
from pipejax.costs.costs import MESSAGE_FIELDS, PHASE_FIELDS
from pipejax.costs.measured import measured_rows
from pipejax.costs.model.model import _KEYS as MODEL_KEYS, Model
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS
from pipejax.costs.system.system import SECTIONS
from pipejax.sweep.declaration import AXES, FILE

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


def test_every_public_name_is_in_the_reference(site):
    headings = {
        name
        for page in (site / "api").glob("*.html")
        for name in re.findall(r'<h2 id="pipejax\.([\w.]+)"', page.read_text())
    }
    without = {name for name in public() if name.split(".")[-1].isupper()}  # constants
    without |= set(NAMES) | {name for name in public() if "typing." in name}
    assert headings == {*public()} - without


@pytest.mark.parametrize("name", pj.schedules.REGISTRY)
def test_the_command_below_a_picture_runs_what_it_shows(name, answer):
    shown = gallery.run_schedule(name)
    (line,) = command_lines(f"```sh\n{gallery.command(shown)}\n```")
    check_line(line)
    result = answer(*shlex.split(line)[1:])
    assert result["makespan"] == pytest.approx(shown.run.makespan, rel=1e-12)
    ops = {op["op"]: op["start"] for op in result["ops"]}
    assert ops == {bar.label: pytest.approx(bar.start, rel=1e-12) for bar in bars(shown.run)}


def keys_on(page, first):
    """Tables whose first column has a name: key -> the cell that says what it is if left out."""
    result = {}
    for table in re.findall(r"(?:^\|.*\|\n)+", (DOCS / page).read_text(), re.M):
        head, _, *rows = [[cell.strip() for cell in row.split(" |")] for row in table.splitlines()]
        if head[0].removeprefix("| ") == first:
            for row in rows:
                result |= dict.fromkeys(re.findall(r"`([^`]+)`", row[0]), row[-2].strip("| "))
    return result


@with_cases(
    "page first record",
    ("models.md", "key", Model),
    ("models.md", "key of `mla`", pj.costing.LatentAttention),
    ("models.md", "key of `moe`", pj.costing.MixtureOfExperts),
)
def test_the_page_on_models_has_every_key_and_default(page, first, record):
    names = {field.name: field.default for field in dataclasses.fields(record)}
    fields = {MODEL_KEYS.get(name, name): default for name, default in names.items()}
    shown = keys_on(page, first)
    assert set(shown) == set(fields)
    for key, default in fields.items():
        assert (shown[key] == "needed") == (default is dataclasses.MISSING), key
        if default is not dataclasses.MISSING and default is not None:
            assert shown[key] == f"`{json.dumps(default)}`", key


MORE_COSTS = ("unit", "pair", "pair_factor", "message", "message_back", "stragglers")
MORE_COSTS += ("workers_per_node", "recorded")
KEYS = [  # page, first column of a table, its keys
    *(("systems.md", f"key of `{section}`", keys) for section, keys in SECTIONS.items()),
    ("systems.md", "column", measured_rows.TIMED_COLUMNS),
    ("measured_rows.md", "column", measured_rows.COLUMNS),
    ("own_costs.md", "key", (*PHASE_FIELDS, *MORE_COSTS)),
    ("own_costs.md", "key of a message", (*MESSAGE_FIELDS, "bytes", "bandwidth")),
]


@pytest.mark.parametrize(
    ("page", "first", "keys"), KEYS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_page_has_every_key(page, first, keys):
    assert set(keys_on(page, first)) == set(keys)


def test_the_page_on_systems_has_every_unit():
    table = (DOCS / "systems.md").read_text().partition("| dimension |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(UNITS)


def test_the_page_on_sweeps_has_every_key_and_default():
    shown = keys_on("sweeps.md", "key")
    assert {*FILE} - {*WORKLOAD_FIELDS} <= {*shown} <= {*FILE}  # the page of files has those fields
    for key in shown.keys() & AXES.keys():
        field = AXES[key]
        expected = "needed" if field.default is NEEDED else f"`{json.dumps(field.default)}`"
        assert shown[key] == expected or key.startswith(("microbatch", "launcher")), key


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: path.stem)
def test_commands_on_a_page_can_be_run(path):
    for line in command_lines(path.read_text()):
        check_line(line)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_and_options_that_a_page_mentions_exist(path):
    for text in mentions(path.read_text()):
        check_mention(text)


@with_cases("text", "pipejax evalute --json", "pipejax evaluate --lnk", "--lnk x", "make papers")
def test_a_mention_of_what_does_not_exist_is_found(text):
    with pytest.raises(ValueError, match=r"evalute|--lnk|papers"):
        check_mention(text)


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_commands_of_an_example_can_be_run(path):
    for line in command_lines(notebook_files(path, execute=False)[f"examples/{path.stem}.md"]):
        check_line(line)


@with_cases(
    "line",
    *("pipejax evaluate --schedule 1f1b --worker 4", "pipejax evalute --schedule 1f1b"),
    *("pipejax evaluate --schedule 1f1b --schedule gpipe", "make papers"),
    *("python -m sweeps.nothing", "unheard-of --option"),
)
def test_a_command_that_could_not_be_run_is_found(line):
    with pytest.raises(Exception, match=r"worker|evalute|twice|papers|nothing|unheard"):
        check_line(line)


@with_cases("page fault", *read_cases("faults of pages"))
def test_a_fault_of_a_page_is_found(tmp_path, page, fault):
    (tmp_path / "index.html").write_text(page)
    (result,) = faults(tmp_path)
    assert fault in result


def shown_by(script, folder):
    """Return the output of each cell of a script, as a notebook shows it."""
    names, shown = {"__name__": "__main__"}, []
    cells = jupytext.read(script, fmt="py:percent").cells
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        tree = ast.parse(cell.source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(folder):
            exec(compile(tree, script.name, "exec"), names)
            value = last and eval(compile(ast.Expression(last.value), script.name, "eval"), names)
        text = printed.getvalue() + ("" if value is None else f"{value!r}\n")
        shown.append(re.sub(r"size \d+x\d+ ", "", text).splitlines())  # a picture tells no number
    return shown


@pytest.mark.slow
@pytest.mark.example
@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_examples_show_the_numbers_of_their_text(script, data, tmp_path):
    """The text tells of numbers; here they stand, so that a change of them is seen."""
    expected = json.loads((data / "examples.json").read_text())
    assert shown_by(script, tmp_path) == expected[script.stem]


# schemas of input files: they are right, and the files that come with pipejax keep them
jsonschema = pytest.importorskip("jsonschema")
DATA = ROOT / "pipejax" / "costs" / "data"
MISTAKES = json.loads((ROOT / "tests" / "data" / "mistakes.json").read_text())["files"]
INPUT_PAGES = input_file_pages()
FOLDERS = {"system": "hardware", "model": "models", "stack": "stacks"}
CASES = [(name, p) for name, folder in FOLDERS.items() for p in (DATA / folder).glob("*.json")]
CASES += [("sweep", path) for path in sorted((ROOT / "examples").rglob("*.toml"))]
BAD = [
    *("system-unit", "system-zero", "system-eff", "system-name", "system-less"),
    *("model-flag", "model-less", "cost-key"),
]


def validator(name):
    schema = json.loads(INPUT_PAGES[f"reference/{name}.schema.json"])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", FILES)
def test_a_schema_is_one(name):
    assert validator(name).schema["$schema"] == SCHEMA


@pytest.mark.parametrize(("name", "path"), CASES, ids=lambda part: getattr(part, "stem", part))
def test_files_that_come_with_pipejax_keep_the_schema(name, path):
    text = path.read_text()
    validator(name).validate(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))


@pytest.mark.parametrize("name", BAD)
def test_a_schema_refuses_what_the_reader_refuses(name):
    kind = name.partition("-")[0].replace("cost", "costs")
    assert not validator(kind).is_valid(json.loads(MISTAKES[f"{name}.json"]))


def test_the_page_has_every_field_once():
    page = INPUT_PAGES["reference/files.md"]
    for kind in FILES.values():
        section = page.partition(f"## {kind.title}\n")[2].partition("\n## ")[0]
        for name in kind.fields:
            assert section.count(f"\n| `{name}` |") == 1, name
