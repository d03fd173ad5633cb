"""Tables of cases that several tests read as data: tests/data/case_tables.json."""

import json
from pathlib import Path
from typing import Any

TABLES = json.loads((Path(__file__).parent / "data" / "case_tables.json").read_text())


def read_cases(name: str) -> Any:
    """Return the rows of a table of cases; the file says what its columns are."""
    return TABLES[name]["rows"]
