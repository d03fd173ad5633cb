"""Any file: a table and costs that a fuzzer made are refused with words, or run as an event loop says.

Files are legal ones with up to three mutations, or drawn from a grammar of nearly legal ones. What
the library reads, a second reader in this file reads too, so a file that is misread is found out.
`make fuzz EXAMPLES=100000` draws others. A failure prints its files as one line of JSON, which
`python tests/test_fuzz.py FILE` plays again.
"""

import contextlib
import copy
import csv
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import reference
import strategies
from hypothesis import given, note, seed, settings, strategies as st
from jitter_cases import LINKS

import pipejax as pj
from pipejax.cli.app import run
from pipejax.schedules.table.table_files import to_json

EXAMPLES = int(os.environ.get("EXAMPLES", "500"))
CHANGES = st.sampled_from([0, 0, 0, 1, 1, 2, 3])
LETTERS = [*"FBIWRUOLAXf", "WAIT_O", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F"]
LETTERS += ["UNSHARD", "RESHARD", "REDUCE_GRAD", "FB", ""]
COSTS = ["F", "B", "I", "W", "R", "O", "L", "A", "U", "pair"]
INDEX = st.sampled_from([*"0" * 9, *"1123", "00", "-1", "", "999999999", "9" * 25, "٣"])
WILD = st.sampled_from(
    [
        *(True, False, None, -1, 0, 1, 2, 0.5, -0.5, 10**9, 10**30, 1e308),
        *(float("nan"), float("inf"), "", "1", "0F0", "🙂"),
        *([], {}, [[]], [[0]], [0, 1], [1, True], {"F": 1}),
    ]
)
KINDS = {"legal": 0.2, "grammar": 0.5, "costs": 0.2, "command": 0.1}


class Files(NamedTuple):
    """Files of one example."""

    table: str
    suffix: str
    costs: str
    links: dict


# ------------------------------------------------------------------------------------ what is drawn
@st.composite
def cells(draw):
    """Text of one cell, legal or nearly so."""
    letter = st.sampled_from([*"FFFFBBBB", *LETTERS])
    number = lambda: draw(INDEX) + draw(letter) + draw(INDEX)  # noqa: E731
    form = draw(st.sampled_from([*["{}"] * 3, "({};{})OVERLAP_F_B", " {} ", "", "({})", '"{}']))
    return form.format(*(number() for _ in range(form.count("{}"))))


def mutated_rows(draw, rows):
    """Up to three changes of cells."""
    rows = [list(row) for row in rows]
    for _ in range(draw(CHANGES)):
        places = [(w, k) for w, row in enumerate(rows) for k in range(len(row))]
        if not places:
            break
        (w, k), (v, j) = (draw(st.sampled_from(places)) for _ in range(2))
        change = draw(st.sampled_from(["draw", "drop", "twice", "swap", "move", "idle", "row"]))
        if change == "draw":
            rows[w][k] = draw(cells())
        elif change == "drop":
            del rows[w][k]
        elif change == "twice":
            rows[w].insert(k, rows[w][k])
        elif change == "swap":
            rows[w][k], rows[v][j] = rows[v][j], rows[w][k]
        elif change == "move":
            rows[v].insert(j, rows[w].pop(k))
        elif change == "idle":
            rows[w].insert(k, "")
        else:
            rows.insert(w, rows.pop(v))
    return rows


def mutated_text(draw, text):
    """Seldom a change of the text as such."""
    change = draw(st.sampled_from([*[None] * 3, "bom", "crlf", "quote", "comma", "cut", "odd"]))
    place = draw(st.integers(0, len(text)))
    odd = draw(st.sampled_from(["\0", '"', "\n", ",", "é", "\u2028", " ", "[" * 3000, "{", "1"]))
    return {
        "bom": "\ufeff" + text,
        "crlf": text.replace("\n", "\r\n"),
        "quote": "\n".join(f'"{line}"' for line in text.split("\n")),
        "comma": text.replace("\n", ",\n").replace("]", ",]"),
        "cut": text[:place],
        "odd": text[:place] + odd + text[place:],
    }.get(change, text)


def mutated_data(draw, data):
    """Up to three changes of keys and values, wherever they are."""
    for _ in range(draw(CHANGES)):
        at = data
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], list | dict) and draw(st.booleans()):
                at = at[key]
                continue
            change = draw(st.sampled_from(["wild", "wild", "drop", "add"]))
            if change == "drop":
                del at[key]
            elif change == "add" and isinstance(at, dict):
                at[draw(st.sampled_from(["weights", "note", *COSTS]))] = at[key]
            else:
                at[key] = copy.deepcopy(draw(WILD))  # later changes go into it
            break
    return data


@st.composite
def table_files(draw, kind, mutated):
    """Text and suffix of a table's file."""
    if kind == "grammar":
        rows, data = draw(st.lists(st.lists(cells(), max_size=5), max_size=3)), draw(HEADS)
    else:
        transfers = draw(st.booleans())
        table, rows = draw(strategies.tables(transfers, max_workers=3, max_microbatches=2))
        data = json.loads(to_json(table))
        rows = mutated_rows(draw, rows) if mutated == "rows" else rows
    # a CSV does not say which pipe a microbatch goes through
    if len(data["placement"]) < 2 and draw(st.booleans()):
        text, suffix = "\n".join(",".join(row) for row in rows) + "\n", ".csv"
    else:
        data = mutated_data(draw, data) if mutated == "data" else data
        text, suffix = json.dumps(data | {"rows": rows}), ".json"
    return mutated_text(draw, text) if mutated == "text" else text, suffix


@st.composite
def heads(draw):
    """Keys of a JSON table beside its rows."""
    data = {"format": "pipejax-table", "version": 1, "name": "x", "slots": {"F": 1, "B": 1}}
    stages, count = draw(COUNT), draw(COUNT)
    data["placement"] = [[draw(COUNT) - 1 for _ in range(stages)] for _ in range(draw(COUNT))]
    return data | {"pipe_of_microbatch": [0] * count, "stage_shares": [1] * stages}


COUNT = st.sampled_from([0, 1, 1, 1, 2, 3])
HEADS = heads()
SECONDS = st.integers(0, 16).map(lambda k: k / 8)
UNITS = st.sampled_from(["seconds", "milliseconds"])
PHASES = st.sampled_from([["B"], ["I", "W"], *[["B", "R", "O"], ["I", "W", "R", "O", "L"]] * 6])
UPDATES = st.sampled_from([[], [], ["A", "U"]])
DIRECTIONS = st.sampled_from([[], ["message"], *[["message", "message_back"]] * 3])
TIMES = ({}, {"latency": 0.25, "transmit": 1.5}, {"bytes": 3, "bandwidth": 2}, {"transmit": 4})
MESSAGES = st.sampled_from(TIMES)
HOST_LINKS = st.sampled_from([*[[]] * 8, [[0]], [[1, 0]], [[0, 1], [2]]])
MUTATED = {
    "legal": ["", "", "", "rows", "data", "text"],
    "grammar": ["", "data", "text"],
    "costs": ["costs"],
    "command": ["", "", "rows", "data", "text", "costs"],
}


@st.composite
def cost_files(draw, mutated):
    """Text of a file of costs: scalars, as a table of any size may have them."""
    data = {"unit": draw(UNITS)}
    data |= {key: draw(SECONDS) for key in ["F", *draw(PHASES), *draw(UPDATES)]}
    data |= {key: dict(draw(MESSAGES)) for key in draw(DIRECTIONS)}
    if not mutated:
        return json.dumps(data)
    text = mutated_text(draw, json.dumps(mutated_data(draw, data)))
    return text.replace("{", '{"F": 3, ', 1) if draw(st.booleans()) else text  # a key twice


@st.composite
def files(draw, kind):
    mutated = draw(st.sampled_from(MUTATED[kind]))
    table, suffix = draw(table_files(kind, mutated))
    costs = draw(cost_files(mutated == "costs"))
    model, queues = draw(st.sampled_from(LINKS))
    links = {"model": model, "queues": queues}
    if kind != "command":
        links |= {"host_links": draw(HOST_LINKS), **draw(strategies.carried(model, 2))}
    return Files(table, suffix, costs, links)


# ------------------------------------------------------------------------------ the second reader
def their_rows(files):
    text = files.table.removeprefix("\ufeff").strip()
    # a pasted text may have quotes around it
    text = text.strip('"') if text.startswith('"{') else text
    if text.lstrip().startswith("{"):
        return json.loads(text)["rows"]
    rows = [[x.strip() for x in row] for row in csv.reader(io.StringIO(text.replace("\r", "")))]
    while not any(rows[-1]):  # a spreadsheet leaves empty rows, and a warning says so
        rows.pop()
    return rows


def assert_whole(rows):
    """Each stage does each microbatch once, on one worker: what a deadlock would not show."""
    ops = Counter(op for row in rows for text in row for op in reference.split(text))
    numbered = [op for op in ops if op[0] in ("F", "B", "I", "W")]
    for stage in range(1 + max(s for _, s, _ in numbered)):
        for microbatch in range(1 + max(m for _, _, m in numbered)):
            counts = {p: ops[p, stage, microbatch] for p in "FBIW" if ops[p, stage, microbatch]}
            assert counts in ({"F": 1, "B": 1}, {"F": 1, "I": 1, "W": 1}), (stage, microbatch)


def their_costs(text, num_stages, num_pipes):
    data = json.loads(text.removeprefix("\ufeff"))
    scale = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6}[data["unit"]]

    def spread(value, count):
        return value if isinstance(value, list) else [value] * count

    fields = {key: spread(data[key], num_stages) for key in COSTS if key in data}
    if "B" not in fields:
        fields["B"] = [i + w for i, w in zip(fields["I"], fields["W"], strict=True)]
    for key, other in ("IW", "WI"):  # the rest of B, or half of it without either
        rest = fields.get(other) or [b / 2 for b in fields["B"]]
        fields.setdefault(key, [b - x for b, x in zip(fields["B"], rest, strict=True)])
    if "O" in fields:
        fields.setdefault("L", fields["O"])
    pair = dict(enumerate(scale * x for x in fields.pop("pair", [])))
    messages = {"latency": {}, "transmit": {}}
    for direction, key in enumerate(
        ["message", "message_back" if "message_back" in data else "message"]
    ):
        section = {k: spread(v, num_stages - 1) for k, v in data.get(key, {}).items()}
        for place in np.ndindex(num_pipes, num_stages - 1):
            at = {k: v[place[1]] for k, v in section.items()}
            transmit = scale * at.get("transmit", 0)
            transmit = at["bytes"] / at["bandwidth"] if "bytes" in at else transmit
            messages["latency"][direction, *place] = scale * at.get("latency", 0)
            messages["transmit"][direction, *place] = transmit
    ops = {(p, s): scale * x for p, times in fields.items() for s, x in enumerate(times)}
    return reference.Costs(ops, **messages, pair=pair)


# --------------------------------------------------------------------------------------- the checks
def by_library(files, paths):
    """The table, and its makespan; (None, None) where a file is refused."""
    try:
        table = pj.read_table(paths[0])
        costs = pj.read_costs(paths[1], table)
        return table, pj.evaluate(table, costs, link=pj.Links(**files.links)).makespan
    except ValueError as error:  # a ScheduleError is one
        if not str(error).strip():
            raise
        return None, None


def check(files, folder, *, with_command=True):
    """Return whether the files are legal; if so, they have the makespan of the event loop."""
    paths = [folder / f"table{files.suffix}", folder / "costs.json"]
    for path, text in zip(paths, (files.table, files.costs), strict=True):
        path.write_bytes(text.encode())
    table, makespan = by_library(files, paths)
    if with_command:
        assert_same_by_command(files, paths, makespan)
    if table is None:
        return False
    rows = their_rows(files)
    assert_whole(rows)
    pipes = table.pipe_of_microbatch.tolist()
    theirs = their_costs(files.costs, table.num_stages, table.num_pipes)
    links = {"link": files.links["model"], **files.links}
    del links["model"]
    expected = reference.Run(rows, pipes, theirs, **links)
    assert makespan == pytest.approx(expected.makespan, rel=1e-9)
    return True


def assert_same_by_command(files, paths, makespan):
    """The command line says the same, or names the mistake in one line."""
    options = ["--table", paths[0], "--costs", paths[1], "--json", "--link", files.links["model"]]
    if files.links["model"] == "rendezvous":
        options += ["--queues", files.links["queues"]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["evaluate", *map(str, options)])
    if makespan is None:
        assert (code, out.getvalue()) == (2, "")
        assert re.fullmatch("(warning: .+\n)?error: .+\n(hint: .+\n)?", err.getvalue())
    else:
        assert code == 0
        notice = r"(warning: .*empty rows at its end count as no workers.*\n)?"
        assert re.fullmatch(notice, err.getvalue())
        assert json.loads(out.getvalue())["makespan"] == makespan


# `their_rows` has no empty rows at the end either
@pytest.mark.filterwarnings("ignore::pipejax.schedules.table.table_files.ReadingNotice")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("unchecked")
def test_any_file_is_refused_or_read_as_it_is_written(kind, tmp_path):
    seen = Counter()
    count = max(1, round(EXAMPLES * KINDS[kind]))

    @settings(max_examples=count)
    @given(files=files(kind))
    def try_one(files):
        note(json.dumps(files))
        seen[check(files, tmp_path, with_command=kind == "command")] += 1

    try_one()
    if count >= 100 and kind != "grammar":
        # examples of one run are alike: it goes on until both were met often
        for part in range(1, 5):
            if min(seen[True], seen[False]) < count / 10:
                seed(part)(try_one)()
        assert min(seen[True], seen[False]) >= count / 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = Files(*json.loads(Path(sys.argv[1]).read_text()))
        print("legal" if check(result, Path(folder)) else "refused")
