"""A second checker of certificates: docs/certificates.md in plain Python, nothing of pipejax.

`python tests/second_checker.py FILE` says of a certificate whether it holds.
"""

import hashlib
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import second_checker_bounds as bounds
import second_checker_form as forms
import second_checker_run as runs
from second_checker_table import Failed, Malformed, Table, demand, hold

TOLERANCE = 1e-9
KEYS = {
    "run": {
        "costs": ["links", "seconds", "memory"],
        "claim": [
            *("objective", "limits", "offload", "makespan", "max_span", "busy"),
            *("peak_in_flight", "offloaded", "peak_memory", "lower_bounds"),
        ],
        "proof": ["ops", "transfers", "held_from", "held"],
    },
    "optimum": {
        "costs": ["links", "seconds", "memory"],
        "claim": ["objective", "limits", "offload", "value", "lower_bounds"],
        "proof": ["starts", "prover", "seconds", "source", "checksum"],
    },
    "formula": {
        "costs": ["links", "parameters", "box"],
        "claim": ["facets", "gap"],
        "proof": ["points", "rays", "cells"],
    },
}


def is_number(value, whole=False):
    kinds = int if whole else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < 1e308


def has_keys(section, keys, what):
    demand(isinstance(section, dict) and set(section) == set(keys), f"keys of {what}")
    return section


def check(data):
    """Whether a certificate holds: "holds", "fails" or "malformed", and why."""
    try:
        report = {}
        demand(isinstance(data, dict), "a certificate is an object")
        inner = data.get("certificate")
        if isinstance(inner, dict) and inner.get("kind") == "formula":
            report, data = data, inner
        has_keys(data, ["kind", "version", "table", "costs", "claim", "proof"], "certificate")
        kind = data["kind"]
        demand(isinstance(kind, str) and kind in KEYS and is_number(data["version"]), "kind")
        demand(data["version"] == 2, "version")
        for part, keys in KEYS[kind].items():
            has_keys(data[part], keys, part)
        if kind == "formula":
            forms.check_formula(data, report)
        else:
            check_run(data)
    except Malformed as error:
        return "malformed", str(error)
    except Failed as error:
        return "fails", str(error)
    return "holds", ""


# ------------------------------------------------------------------------------- runs and optima
def check_run(data):
    table = Table(data["table"])
    costs, claim, proof = data["costs"], data["claim"], data["proof"]
    is_optimum = data["kind"] == "optimum"
    check_question(claim, table)
    links = runs.read_links(costs["links"], table)
    seconds = runs.read_seconds(costs["seconds"], table, is_optimum, bool(claim["lower_bounds"]))
    memory = runs.read_memory(costs["memory"], table)
    if is_optimum:
        check_checksum(data)
    run = runs.Run(table, links, seconds)
    derived = derive(run, memory)
    time = TOLERANCE * derived["makespan"]
    sizes = [m for key in ("sizes", "checkpoints") for s in memory[key] for m in as_list(s)]
    of_memory = TOLERANCE * max([*sizes, *derived["peak_memory"].values()])
    reached = derived["max_span" if claim["objective"] == "span" else "makespan"]
    if is_optimum:
        starts = {
            f"{s}{phase}{m}": run.start[cell]
            for (phase, s, m), cell in table.at.items()
            if phase in "FBIWOL"
        }
        agree(claim["value"], reached, time, "value")
        agree(proof["starts"], starts, time, "starts")
    else:
        within = dict.fromkeys(("peak_memory", "held"), of_memory)
        counts = TOLERANCE * max(derived["peak_in_flight"].values()) if table.own.items else 0
        within |= dict.fromkeys(("peak_in_flight", "offloaded"), counts)
        for name, value in derived.items():
            agree({**claim, **proof}[name], value, within.get(name, time), name)
    for worker, limit in enumerate(claim["limits"] or ()):
        peak = derived["peak_memory"][f"worker {worker}"]
        hold(peak <= limit + of_memory, f"limit of worker {worker}")
    known = None
    for bound in claim["lower_bounds"]:
        hold(bound["value"] <= reached + time, "a bound above what is reached")
        if bound["by"] in bounds.DERIVED:
            if known is None:
                known = bounds.derive(table, links, seconds, memory, claim)
            hold(bound["value"] <= known.get(bound["by"], -math.inf) + time, bound["by"])


def check_question(claim, table):
    demand(claim["objective"] in ("makespan", "span"), "objective")
    demand(isinstance(claim["offload"], bool), "offload")
    demand(isinstance(claim["lower_bounds"], list), "lower_bounds")
    for bound in claim["lower_bounds"]:
        has_keys(bound, ["by", "value"], "a bound")
        demand(isinstance(bound["by"], str) and is_number(bound["value"]), "a bound")
    limits = claim["limits"]
    if limits is not None:
        demand(isinstance(limits, list) and len(limits) == len(table.rows), "limits")
        demand(all(map(is_number, limits)), "limits")


def check_checksum(data):
    proof = {key: value for key, value in data["proof"].items() if key != "checksum"}
    text = json.dumps({**data, "proof": proof}, sort_keys=True)
    hold(data["proof"]["checksum"] == hashlib.sha256(text.encode()).hexdigest(), "checksum")


def as_list(value):
    return value if isinstance(value, list) else [value]


def agree(claimed, derived, within, what):
    """Compare JSON, number by number."""
    if isinstance(derived, dict):
        hold(isinstance(claimed, dict) and claimed.keys() == derived.keys(), what)
        for key in derived:
            agree(claimed[key], derived[key], within, f"{what}: {key}")
    elif isinstance(derived, list):
        hold(isinstance(claimed, list) and len(claimed) == len(derived), what)
        for one, other in zip(claimed, derived, strict=True):
            agree(one, other, within, what)
    else:
        is_real = isinstance(claimed, int | float) and not isinstance(claimed, bool)
        hold(is_real and abs(claimed - derived) <= within, what)


def derive(run, memory):
    """Everything that a run claims, in its form."""
    table = run.table
    workers = range(len(table.rows))
    own = [run.events_of(w) for w in workers]
    spans = []
    for events in own:
        ops = [e for e in events if not run.is_rest(e)]
        spans.append(max(run.end[e] for e in ops) - min(run.start[e] for e in ops) if ops else 0.0)
    steps = [held(run, memory, w) for w in workers]
    messages = {run.name(e): e for e in run.messages}
    return {
        "makespan": max(run.end.values()),
        "max_span": max(spans),
        "busy": by_worker(sum(run.lasts[e] for e in events) for events in own),
        "peak_in_flight": by_worker(in_flight(row, table.own) for row in table.rows),
        "offloaded": sum(op[0] == "O" for op in table.at),
        "peak_memory": by_worker(max([0.0, *(h for _, h in s)]) for s in steps),
        "ops": {
            run.name(e): {"start": run.start[e], "end": run.end[e]}
            for e in run.end
            if e not in run.messages
        },
        "transfers": {
            name: {"leaves": run.start[e], "arrives": run.end[e] + run.messages[e].later}
            for name, e in messages.items()
        },
        "held_from": by_worker([moment for moment, _ in s] for s in steps),
        "held": by_worker([h for _, h in s] for s in steps),
    }


def by_worker(values):
    return {f"worker {w}": value for w, value in enumerate(values)}


def in_flight(row, own):
    most = now = 0
    for cell in row:
        kinds = [own.kinds[op[0]] for op in cell if op[0] in own.kinds]
        kinds = [kind for kind in kinds if kind["lane"] != "host"]
        taken, freed = (
            sum(n * own.items.get(x, 1) for kind in kinds for x, n in kind[moment].items())
            for moment in ("at_start", "at_end")
        )
        now += sum(op[0] == "F" for op in cell) + taken
        most = max(most, now)
        now += freed - sum(op[0] in ("B", "W") for op in cell)
    return most


def held(run, memory, worker):
    """Moments at which what a worker holds changes, and what it holds from then on."""
    changes, own = defaultdict(float), run.table.own
    cells = [(op, (worker, k)) for k, c in enumerate(run.table.rows[worker]) for op in c]
    for (phase, place, m), cell in cells:
        if cell not in run.end:
            continue
        s, m = -1 if isinstance(place, str) else place, max(m, 0)
        a, w, checkpoint = (
            runs.of(memory[key][s], m) for key in ("sizes", "weight_share", "checkpoints")
        )
        more = [runs.of(size[s], m) for size in memory.get("at_work", ())]
        again = any((x, s, m) in run.table.at for x in ["R", *own.recomputes()])
        c = checkpoint if again else a
        at_start = {"F": c, "R": a - c, "L": c}
        at_end = {"B": -a, "I": -(a - w * a), "W": -w * a, "O": -c}
        for letter, n in zip("BIW", more, strict=False):
            at_start[letter], at_end[letter] = n, at_end[letter] - n
        if phase in own.kinds:
            sizes = {"activation": a, "for_w": w * a, "checkpoint": checkpoint}
            sizes |= {item: share * a for item, share in own.items.items()}
            for found, moment in ((at_start, "at_start"), (at_end, "at_end")):
                counts = own.kinds[phase][moment]
                found |= {phase: sum(n * sizes[x] for x, n in counts.items())} if counts else {}
        if phase in at_start:
            changes[run.start[cell]] += at_start[phase]
        if phase in at_end:
            changes[run.end[cell]] += at_end[phase]
    found, now = [], 0.0
    for moment in sorted(changes):
        now += changes[moment]
        found.append((moment, now))
    return found


def read(path):
    """JSON of a file, in which no key stands twice."""

    def once(pairs):
        demand(len(dict(pairs)) == len(pairs), "a key stands twice")
        return dict(pairs)

    return json.loads(Path(path).read_text(), object_pairs_hook=once)


if __name__ == "__main__":
    print(*check(read(sys.argv[1])))
