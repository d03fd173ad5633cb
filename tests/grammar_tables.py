"""Tables with grammars of their own, and costs: kinds, lanes, slices, graphs of stages.

`data/grammars.json` has them; the braid puts net ops of one microbatch under compute of another.
"""

import json
from pathlib import Path

import pipejax as pj

TABLES = json.loads((Path(__file__).parent / "data" / "grammars.json").read_text())


def make_kind(look=(), **kind):
    return pj.schedules.OpKind(**kind, look=tuple(look) or None)


def grammar_table(name):
    """A table, and costs that it can be priced with."""
    case = TABLES[name]
    kinds = {letters: make_kind(**kind) for letters, kind in case.get("kinds", {}).items()}
    graph = [tuple(edge) for edge in case["grammar"].get("graph", ())]
    grammar = pj.schedules.Grammar(kinds=kinds, **case["grammar"] | {"graph": graph})
    rows = [row.split() for row in case["rows"]]
    table = pj.ScheduleTable.from_rows(rows, grammar=grammar, name=name)
    return table, pj.Costs(transmit=0.1, **case["costs"])
