"""Tables with grammars of their own, and costs: kinds, lanes, slices, graphs of stages."""

import pipejax as pj
from pipejax.schedules import Grammar, OpKind

BRAID = Grammar(
    kinds={
        "Fa": OpKind("attention", "fa", at_start={"activation": 1}),
        "Fd": OpKind("dispatch", "fd", "net"),
        "Fm": OpKind("experts", "fm"),
        "Bm": OpKind("experts grad", "bm"),
        "Bd": OpKind("dispatch grad", "bd", "net"),
        "Ba": OpKind("attention grad", "ba", at_end={"activation": -1}),
    },
    rules=[
        *("Fd <- Fa", "Fm <- Fd", "Fa <- Fm@-1 [message]", "Bd <- Bm", "Ba <- Bd"),
        *("Bm <- Ba@+1 [message]", "Bm@last <- Fm@last"),
    ],
)
VOCABULARY = Grammar(
    kinds={
        "Ca": OpKind("broadcast", "ca", "net", scope="worker", is_collective=True),
        "S": OpKind("vocabulary forward", "s", scope="worker"),
        "Cb": OpKind("reduce logits", "cb", "net", scope="worker", is_collective=True),
        "T": OpKind("vocabulary backward", "t", scope="worker"),
    },
    rules=["Ca <- F@last", "S <- Ca", "Cb <- S", "B@last <- Cb", "T <- Cb"],
)
MIXED = Grammar(
    kinds={
        "D": OpKind("dispatch", "d", "net"),
        "X": OpKind("compress", "x", "host", at_start={"cache": 1}),
        "Z": OpKind("router", "z", at_end={"cache": -1}, look=("#123456",)),
    },
    rules=["D <- F", "B <- D", "X <- F", "Z <- X", "B <- Z"],
    items={"cache": 0.5},
)
# rows as texts; the braid puts the net ops of one microbatch under the compute of another
TABLES = {
    "braid": (
        BRAID,
        [
            "0Fa0 0Fd0 0Fm0 0Fa1 0Fd1 0Fm1 0Bm0 0Bd0 0Ba0 0Bm1 0Bd1 0Ba1",
            "1Fa0 1Fd0 1Fm0 1Fa1 1Bm0 1Fd1 1Bd0 1Fm1 1Ba0 1Bm1 1Bd1 1Ba1",
        ],
        {"others": {"fa": 1.0, "fd": 0.6, "fm": 1.25, "bm": 2.0, "bd": 0.5, "ba": 1.5}},
    ),
    "vocabulary": (
        VOCABULARY,
        [
            "0F0 0F1 Ca0 S0 Cb0 0F2 Ca1 S1 Cb1 0B0 T0 Ca2 S2 Cb2 0B1 T1 0B2 T2",
            "1F0 Ca0 S0 Cb0 1F1 Ca1 S1 Cb1 1B0 T0 1F2 Ca2 S2 Cb2 1B1 T1 1B2 T2",
        ],
        {"forward": 1, "backward": 2, "others": {"ca": 0.2, "cb": 0.2, "s": [0.5, 0.75], "t": 0.5}},
    ),
    "slices": (
        Grammar(slices=2),
        [
            "0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0B0.0 0B1.1 0B1.0",
            "1F0.0 1F0.1 1B0.1 1B0.0 1F1.0 1F1.1 1B1.1 1B1.0",
        ],
        {"forward": 1.0, "backward": 2.0},
    ),
    "forward only": (Grammar(forward_only=True), ["0F0 0F1 0F2", "1F0 1F1 1F2"], {"forward": 1.0}),
    "graph": (
        Grammar(graph=[(0, 2), (1, 2), (2, 3)]),
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"],
        {"forward": [1.0, 1.5, 1.0, 1.0], "backward": 2.0},
    ),
    "sharded": (
        Grammar(lanes={"UNSHARD": "net", "REDUCE_GRAD": "net"}),
        [
            "0UNSHARD 0F0 2UNSHARD 0F1 2F0 2F1 2B0 2B1 2REDUCE_GRAD 2RESHARD 0B0 0B1 0REDUCE_GRAD",
            "1UNSHARD 3UNSHARD 1F0 1F1 3F0 3B0 3F1 3B1 3REDUCE_GRAD 1B0 1B1 3WAIT_REDUCE_GRAD",
        ],
        {"forward": 1.0, "backward": 2.0, "unshard": 0.75, "reduce_grad": 1.5},
    ),
    "mixed": (
        MIXED,
        ["0F0 0D0 0X0 0F1 0D1 0X1 0Z0 0B0 0Z1 0B1", "1F0 1D0 1X0 1Z0 1B0 1F1 1D1 1X1 1Z1 1B1"],
        {"forward": 1.0, "backward": 2.0, "others": {"d": 0.5, "x": 0.5, "z": 0.2}},
    ),
}


def grammar_table(name):
    """A table, and costs that it can be priced with."""
    grammar, rows, costs = TABLES[name]
    cells = [row.split() for row in rows]
    table = pj.ScheduleTable.from_rows(cells, grammar=grammar, name=name)
    return table, pj.Costs(transmit=0.1, **costs)
