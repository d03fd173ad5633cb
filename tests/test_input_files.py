"""Schemas of input files: they are right, and the files that come with pipejax keep them."""

import json
import tomllib

import pytest

from pages.input_files import FILES, SCHEMA, input_file_pages
from pages.repository import ROOT

jsonschema = pytest.importorskip("jsonschema")
DATA = ROOT / "pipejax" / "costs" / "data"
MISTAKES = json.loads((ROOT / "tests" / "data" / "mistakes.json").read_text())["files"]
PAGES = input_file_pages()
FOLDERS = {"system": "hardware", "model": "models", "stack": "stacks"}
CASES = [(name, p) for name, folder in FOLDERS.items() for p in (DATA / folder).glob("*.json")]
CASES += [("sweep", path) for path in sorted((ROOT / "examples").rglob("*.toml"))]
BAD = [
    *("system-unit", "system-zero", "system-eff", "system-name", "system-less"),
    *("model-flag", "model-less", "cost-key"),
]


def validator(name):
    schema = json.loads(PAGES[f"reference/{name}.schema.json"])
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
    page = PAGES["reference/files.md"]
    for kind in FILES.values():
        section = page.partition(f"## {kind.title}\n")[2].partition("\n## ")[0]
        for name in kind.fields:
            assert section.count(f"\n| `{name}` |") == 1, name
