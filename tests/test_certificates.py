"""Certificates: true ones hold, and every change of one is refused or still true."""

import copy
import functools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from certificate_cases import KINDS, derived_bounds, make_optimum, written
from daily import read_cases, with_cases
from explorer_cases import CROSSED
from hypothesis import given, settings, strategies as st
from legal_sizes import build
from test_grammar_runs import BRAID

import pipejax as pj
from pipejax.checker.verify import Verdict, certificate_checksum
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.schedules.table.table_files import from_json
from pipejax.search.schedule.bounds import area_bound, lower_bound, stage_bounds
from pipejax.search.schedule.initial_plans import greedy_plan
from pipejax.search.schedule.plan import plan_objective
from pipejax.search.schedule.problem import build_problem

EXAMPLES = int(os.environ.get("EXAMPLES", "200"))
SHARES = {"run": 0.5, "optimum": 0.1}
SHARES |= {"formula of a grammar": 0.1}
STORED = sorted((Path(__file__).parent / "data" / "certificates").glob("*.json"))
QUESTION = ("objective", "limits", "offload", "lower_bounds")


# ------------------------------------------------------------------------------------------ true ones
@pytest.mark.parametrize("kind", KINDS)
def test_true_certificates_hold(kind):
    @settings(max_examples=max(1, round(EXAMPLES * SHARES[kind])))
    @given(claimed=KINDS[kind])
    def accept(claimed):
        assert claimed["kind"] == kind.split()[0]
        assert pj.verify(claimed).problems == ()

    accept()


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_certificates_hold(path):
    assert pj.verify(path).problems == ()


# ------------------------------------------------------------------------------------------ bounds
@settings(max_examples=30)
@given(data=st.data())
def test_bounds_are_those_of_the_search(data):
    name = data.draw(st.sampled_from(["1f1b", "chimera", "interleaved-1f1b", "hanayo"]))
    table = build(name, 2, 4)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    stages, whole = table.num_stages, lambda *shape: rng.integers(1, 9, shape) * 1.0
    times = {name: whole(stages) for name in ("forward", "input_grad", "weight_grad")}
    extra = {name: whole(stages) * rng.integers(0, 2) for name in ("all_reduce", "update")}
    faster = data.draw(st.booleans())  # a backward that is whole
    backward = times["input_grad"] + times["weight_grad"] * (0.5 if faster else 1)
    message = {"transmit": whole(2, table.num_pipes, stages - 1)}
    host = {"offload": whole(stages) / 4, "load": whole(stages) / 2}
    costs = pj.Costs(**times, **extra, **message, **host, backward=backward)
    sizes = np.full(stages, 2.0) if data.draw(st.booleans()) else whole(stages)
    asked = {"objective": data.draw(st.sampled_from(["makespan", "span"]))}
    asked["offload"] = data.draw(st.booleans())
    links = pj.Links("delay", host_links=data.draw(st.sampled_from([(), ((0, 1),)])))
    share = data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    held = [[sizes[pipe == worker].sum() for pipe in table.placement] for worker in range(2)]
    expected = np.max(held, axis=1)
    limits = expected * data.draw(st.sampled_from([1, 1.5, 2, 100]))
    problem = build_problem(table, costs, limits, sizes, share, link=links, **asked)
    theirs = lower_bound(problem)
    plan = greedy_plan(problem, problem.limits)
    assert plan is None or theirs.value <= plan_objective(problem, plan)
    run = pj.evaluate(table, costs, link=links)
    memory = pj.analysis.activation_memory(run, sizes=sizes, weight_share=share)
    result = derived_bounds(pj.certificate(run, memory=memory, limits=limits, **asked))
    assert result["stage"] <= result.get("memory chain", np.inf)
    assert area_bound(problem) * problem.unit <= result["memory area"] * (1 + 1e-9)
    best = max(result[kind] for kind in result if kind != "path")
    assert theirs.value * problem.unit <= best * (1 + 1e-9)
    near = 2 * problem.unit  # the search counts whole units
    assert faster or best == pytest.approx(theirs.value * problem.unit, abs=near)


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_a_long_pipe_are_those_of_the_search(seed):
    """Gradients of a stage wait for each other where the way back takes longer than a forward."""
    table = build("1f1b", 4, 9)
    rng = np.random.default_rng(seed)
    largest = {"forward": 4, "input_grad": 12, "weight_grad": 3}
    times = {name: rng.integers(1, end, 4) * 1.0 for name, end in largest.items()}
    costs = pj.Costs(**times, backward=times["input_grad"] + times["weight_grad"])
    limits = rng.choice([1.0, 2.0, 3.0, 4.0], 4)
    share = rng.choice([0.0, 0.5, 1.0])
    problem = build_problem(table, costs, limits, 1.0, share)
    run = pj.evaluate(table, costs)
    memory = pj.analysis.activation_memory(run, sizes=np.ones(4), weight_share=share)
    derived = derived_bounds(pj.certificate(run, memory=memory, limits=limits))["memory chain"]
    assert derived == pytest.approx(max(stage_bounds(problem)) * problem.unit)


def test_memory_area_of_times_that_are_no_multiples_is_not_rounded_up():
    table = build("1f1b", 4, 16)
    equal = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
    # the loads are no whole multiples of anything; nothing is gained by such slow offloads
    costs = pj.Costs.uniform(table, **equal, offload=20.0, load=3**0.5)
    problem = build_problem(table, costs, 3.0, offload=True)
    claimed = pj.certificate(pj.evaluate(table, costs), limits=[3.0] * 4, offload=True)
    derived = derived_bounds(claimed)["memory area"]
    assert derived == pytest.approx((16 * 8 + 15 + 6) / 3 + 1, rel=1e-8)  # x 1000 no whole units
    assert derived - problem.unit <= area_bound(problem) * problem.unit <= derived


# ------------------------------------------------------------------------------ one of every kind
ROWS = (  # cells of all kinds
    "0UNSHARD,0F0,0SEND_F0,0O0,0WAIT_O0,0F1,0SEND_F1,0WAIT_SEND_F0,0L0,0RECV_B0,0R0,0I0,"
    "0RECV_B1,,0W0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD",
    "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1",
)
# bounds of `run_with_bounds` that hold and can be no higher; that of the solver is on trust
TIGHT = {"path": 12.75, "worker": 12.75, "stage": 11.75, "memory chain": 12.75}
TIGHT |= {"memory area": 12.75, "solver": 11.0}


def run_with_bounds():
    """A run whose bounds are as high as they can be."""
    table = build("zb-h1", 2, 2)
    times = {"forward": 1.0, "input_grad": 1.5, "weight_grad": 0.5, "all_reduce": 2.0}
    costs = pj.Costs(**times, update=0.25, latency=0.25, transmit=1.0)
    run = pj.evaluate(table, costs, link="queued")
    memory = pj.analysis.activation_memory(run)
    return pj.certificate(run, memory=memory, limits=memory.peak, lower_bounds=TIGHT)


def run_of_all_cells():
    """A run with all kinds of cells, times by microbatch, and a model for each direction."""
    sharding = {"unshard": 0.25, "reshard": 0.5, "reduce_grad": 0.75, "wait_reduce_grad": 1.25}
    gradients = {"backward": 2.0, "input_grad": 1.0, "weight_grad": 1.25, "recompute": 0.5}
    step_end = {"all_reduce": 1.5, "update": 0.125}
    moved = {"transmit": [[[0.5]], [[0.125]]], "offload": 0.75, "load": 0.25, "latency": 0.25}
    others = {"forward": [[1.0, 2.0], [1.5, 0.5]], "pair_factor": 0.5}
    costs = pj.Costs(**others, **gradients, **step_end, **sharding, **moved)
    more = {"queues": "direction", "posting": "program", "eager_below": 0.25}
    more |= {"host_links": ((0, 1),), "shared_links": (((0, 1), (1, 0)),)}
    pairs = {(0, 1): "rendezvous", (1, 0): "blocking"}
    links = pj.Links("rendezvous", **more, pair_links=pairs)
    table = pj.ScheduleTable.from_rows([row.split(",") for row in ROWS])
    run = pj.evaluate(table, costs, link=links)
    sizes = {"sizes": [[1.0, 2.0], [1.5, 0.5]], "weight_share": [0.25, 0.5]}
    memory = pj.analysis.activation_memory(run, **sizes, checkpoints=0.125)
    return pj.certificate(run, memory=memory)


def run_of_a_grammar():
    """A run with kinds of workers, some of which all do together."""
    table = build("vocabulary-1f1b", 2, 2)
    times = {"x": 0.25, "y": 0.5, "s": [0.5, 1.0], "t": 0.75}
    return pj.certificate(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, others=times)))


def run_of_lanes():
    """A run with ops on a lane beside compute, and messages by rules."""
    table = build("combined-1f1b", 2, 2)
    costs = pj.Costs(transmit=0.25, others=BRAID)
    return pj.certificate(pj.evaluate(table, costs, link="queued"))


def run_of_schedule(name):
    """A run of a schedule with a graph of stages, slices, or no backwards."""
    workers, count = (2, 1) if name == "chunked-prefill" else (3, 2)
    table = build(name, workers, count)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.25)
    return pj.certificate(pj.evaluate(table, costs, link="queued"))


def optimum():
    """An optimum with limits that are reached."""
    table = build("1f1b", 2, 2)
    times = {"forward": 2.0, "input_grad": 3.0, "weight_grad": 1.0, "transfer": 1.0}
    return make_optimum(table, pj.Costs.uniform(table, **times), 2.0)


def formula(name="chimera", links="rendezvous", **options):
    table = build(name, 2, 2)
    return pj.formula(pj.lower(table, link=links, step_end=False), **options).certificate(table)


BOX = {"parameters": ("F", "B", "c"), "box": {"F": (1, 2), "c": (0, 0.5)}}
FIXED = {"parameters": ("F", "B", "c"), "box": {"F": (2, 2), "B": (1, 3)}}
CERTIFICATES = {
    "run with bounds": run_with_bounds,
    "run of all cells": run_of_all_cells,
    "run of a grammar": run_of_a_grammar,
    "run of lanes": run_of_lanes,
    "run of a graph": functools.partial(run_of_schedule, "encoders-1f1b"),
    "run of slices": functools.partial(run_of_schedule, "seq-1f1b"),
    "run without backwards": functools.partial(run_of_schedule, "chunked-prefill"),
    "optimum": optimum,
    "closed form": formula,
    "closed form in a box": functools.partial(formula, "1f1b", "queued", **BOX),
    "closed form with a fixed parameter": functools.partial(formula, "chimera", "queued", **FIXED),
}
# ------------------------------------------------------------------------------- every field changed
FREE = {  # texts, and what was spent: these say nothing that could be false
    "run": r"table\.name|table\.kinds\.\d+\.(name|time|look.*)",
    "optimum": r"table\.name|proof\.(prover(\..*)?|seconds|source)",
    "formula": r"table\.name|costs\.parameters\.\d+\.name",
}
WORDS = [
    *("delay", "queued", "blocking", "rendezvous", "worker", "pair", "direction", "early"),
    *("program", "pairs", "span", "makespan", "solver", "stage", "formula", "run", "optimum"),
]


def places(data, path=()):
    """Each place in JSON, as the keys that lead there, with the value there."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*path, key), data[key]
        yield from places(data[key], (*path, key))


def other_values(value):
    """Other values for a leaf: plausible ones first, then those of another type."""
    wild = [None, "x", [], {}, True, [value], -1, float("nan")]
    if isinstance(value, bool):
        values = [not value, int(value), *wild]
    elif isinstance(value, int | float):
        values = [value + 1, value * 1.5 + 0.125, 0, bool(value), *wild]
    elif value in WORDS:
        values = [*WORDS, value.upper(), *wild]
    else:
        values = [f"{value}x", "", *wild]
    return [other for other in values if other != value or type(other) is not type(value)]


def changes(data, limit=None):
    """Every key or entry left out, a key more everywhere, every leaf and all that holds some changed."""
    yield (), {**data, "more": 1}
    for number, (path, value) in enumerate(places(data)):
        yield path, edited(data, path, lambda inner, key: inner.pop(key))
        if isinstance(value, dict):
            yield (*path, "more"), edited(data, path, lambda inner, key: inner[key].update(more=1))
        if isinstance(value, dict | list) and value:
            others = ([], "x") if isinstance(value, dict) else ({}, 1)
        else:
            first, *rest = other_values(value)
            start = number % len(rest)
            others = [first, *rest[start:], *rest[:start]][:limit]
        for other in others:
            yield path, edited(data, path, functools.partial(put, other))


def put(value, inner, key):
    inner[key] = value


def edited(data, path, change):
    copied = copy.deepcopy(data)
    *way, last = path
    change(functools.reduce(lambda inner, key: inner[key], way, copied), last)
    return copied


def signed(changed):
    """The same with a checksum that agrees: whoever forges an optimum can make one too."""
    if isinstance(changed.get("proof"), dict) and "checksum" in changed["proof"]:
        changed["proof"]["checksum"] = certificate_checksum(changed)
    return changed


def evaluation(claimed):
    """The engine's run of what a certificate says of table, costs and links."""
    seconds = claimed["costs"]["seconds"]
    fields = {x["letters"]: x["time"] for x in claimed["table"].get("kinds", ())}
    others = {fields[k]: np.array(seconds[k], float) for k in seconds if k in fields}
    usual = {PHASE_FIELDS.get(k, k): np.array(v, float) for k, v in seconds.items()}
    costs = pj.Costs(**{k: v for k, v in usual.items() if k not in fields}, others=others)
    links = pj.Links(**claimed["costs"]["links"])
    return pj.evaluate(from_json(claimed["table"]), costs, link=links)


def is_near(first, second):
    """Return whether JSON is alike but for rounding."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_near(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(is_near, first, second))
    return first == (second if isinstance(first, str | None) else pytest.approx(second, abs=1e-9))


def is_true_run(changed):
    """Return whether the engine derives the run, or the starts and the value, that are claimed."""
    run, claim = evaluation(changed), changed["claim"]
    memory = pj.analysis.activation_memory(run, **changed["costs"]["memory"])
    limits = claim["limits"] or memory.peak
    if not all(peak <= limit + 1e-9 for peak, limit in zip(memory.peak, limits, strict=True)):
        return False
    if changed["kind"] == "run":
        derived = written(pj.certificate(run, memory=memory))
        same = {key: claim[key] for key in derived["claim"] if key not in QUESTION}
        derived_claim = {key: derived["claim"][key] for key in same}
        return is_near(same, derived_claim) and is_near(changed["proof"], derived["proof"])
    starts = {
        str(op): run.start[w, k]
        for w, row in enumerate(run.table.rows())
        for k, cell in enumerate(row)
        for op in cell
        if op.phase.name in "FBIWOL"
    }
    value = run.max_span if claim["objective"] == "span" else run.makespan
    return value == claim["value"] and is_near(changed["proof"]["starts"], starts)


def is_true_form(changed):
    """Return whether runs at random points are as long as the form says."""
    costs, claim = changed["costs"], changed["claim"]
    parameters, rng = costs["parameters"], np.random.default_rng(0)
    gap = claim["gap"][0] / claim["gap"][1]
    table, links = from_json(changed["table"]), pj.Links(**costs["links"])
    stages, pipes = table.num_stages, table.num_pipes
    shapes = dict.fromkeys((*PHASE_FIELDS, "pair"), (stages,))
    shapes |= dict.fromkeys(("latency", "transmit"), (2, pipes, stages - 1))
    if not any("pair" in parameter["weights"] for parameter in parameters):
        del shapes["pair"]
    units = [parameter["unit"] for parameter in parameters]
    for _ in range(8):
        theta = rng.integers(0, 4, len(parameters)) / 2 + rng.random() * 1e-3
        for k, parameter in enumerate(parameters):
            low, high = costs["box"].get(parameter["name"], (0, None))
            theta[k] = rng.uniform(low or 0, high) if high is not None else (low or 0) + theta[k]
        times = {key: np.zeros(shape) for key, shape in shapes.items()}
        for share, parameter in zip(theta / units, parameters, strict=True):
            for key, value in parameter["weights"].items():
                times[key] = times[key] + share * np.array(value, float)
        named = {PHASE_FIELDS.get(key, key): value for key, value in times.items()}
        makespan = pj.evaluate(table, pj.Costs(**named), link=links).makespan
        value = max(np.dot(facet, theta / units) for facet in claim["facets"])
        if not value * (1 - 1e-9) <= makespan * (1 - gap) <= value * (1 + 1e-9):
            return False
    return True


def is_still_true(place, changed, verdict):
    """Return whether the engine derives what is claimed; inputs that it refuses have no certificate."""
    if place.startswith("claim.lower_bounds"):
        held = [b.value <= TIGHT[b.by] for b in verdict.bounds if b.checked]
        return all(held) and len(verdict.bounds) == len(changed["claim"]["lower_bounds"])
    try:
        return (is_true_form if changed["kind"] == "formula" else is_true_run)(changed)
    except (ValueError, TypeError, KeyError):
        return False


def get_verdict(changed):
    try:
        return pj.verify(changed)
    except ValueError:  # malformed
        return None


def assert_no_change_is_believed(data, limit=None):
    """Every change is refused, or leaves a true certificate; return how many there were."""
    count = 0
    assert pj.verify(data).problems == ()
    for path, changed in changes(data, limit):
        count += 1
        verdict, place = get_verdict(signed(changed)), ".".join(map(str, path))
        if verdict is not None and verdict.ok and not re.fullmatch(FREE[data["kind"]], place):
            assert is_still_true(place, changed, verdict), (place, changed["claim"])
    return count


@pytest.mark.parametrize("name", CERTIFICATES)
def test_every_changed_field_is_refused_or_true(name):
    assert assert_no_change_is_believed(written(CERTIFICATES[name]()), limit=1) > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", CERTIFICATES)
def test_every_other_value_of_every_field_is_refused_or_true(name):
    assert assert_no_change_is_believed(written(CERTIFICATES[name]())) > 1000


def test_an_optimum_that_was_damaged_is_refused_whatever_was_changed():
    for path, changed in changes(written(optimum()), limit=1):
        verdict = get_verdict(changed)
        assert verdict is None or not verdict.ok, path


@with_cases("by claim", *read_cases("test_a_bound_that_cannot_be_derived_is_not_believed"))
def test_a_bound_that_cannot_be_derived_is_not_believed(by, claim):
    """It is one of those that are checked, so it is not taken on trust."""
    claimed = written(run_with_bounds())
    claimed["claim"] |= {"lower_bounds": [{"by": by, "value": 1.0}], **claim}
    (problem,) = pj.verify(claimed).problems
    assert (problem.claim, problem.derived) == (f"lower bound by {by}", None)


# ------------------------------------------------------------------------------------- what is said
@pytest.fixture(scope="module")
def claimed():
    """The certificate of a run with all that one can claim."""
    table = build("zb-h1", 3, 4)
    times = {"forward": 1.0, "input_grad": 1.5, "weight_grad": 0.5, "all_reduce": 2.0}
    costs = pj.Costs(**times, latency=0.25, transmit=1.0)
    bounds = dict.fromkeys(("worker", "stage", "memory chain", "solver", "path"), 12.0)
    run = pj.evaluate(table, costs, link="queued")
    return written(pj.certificate(run, limits=[3.0, 2.5, 2.0], lower_bounds=bounds))


# path, what is said, and the value there; without a value the key is left out
CHANGED = json.loads((Path(__file__).parent / "data" / "false_claims.json").read_text())


def changed_at(data, path, *value):
    change = functools.partial(put, *value) if value else lambda inner, key: inner.pop(key)
    return edited(data, path, change)


@pytest.mark.parametrize("row", CHANGED["false"], ids=lambda row: ".".join(map(str, row[0])))
def test_what_is_false_is_named(claimed, row):
    path, says, *value = row
    assert says in " ".join(map(str, pj.verify(changed_at(claimed, path, *value)).problems))


@pytest.mark.parametrize("row", CHANGED["malformed"], ids=lambda row: ".".join(map(str, row[0])))
def test_what_is_no_certificate_is_refused(claimed, row):
    path, says, *value = row
    with pytest.raises(ValueError, match=says):
        pj.verify(changed_at(claimed, path, *value))


def test_edges_of_a_graph_join_stages_of_the_table():
    """No time depends on the edge if one worker has all stages."""
    grammar = pj.schedules.Grammar(graph=[(0, 1)])
    table = pj.ScheduleTable.from_rows([["0F0", "1F0", "1B0", "0B0"]], grammar=grammar)
    claimed = written(pj.certificate(pj.evaluate(table, pj.Costs(forward=1.0, backward=1.0))))
    claimed["table"]["graph"] = [[0, 2]]
    (problem,) = pj.verify(claimed).problems
    assert problem.derived == "graph: stage 2 does not exist"


def test_a_deadlock_is_named():
    rows = [row.split(",") for row in CROSSED]
    run = pj.evaluate(pj.ScheduleTable.from_rows(rows), pj.Costs(forward=1.0, backward=1.0))
    claimed = written(pj.certificate(run))
    claimed["costs"]["links"]["model"] = "rendezvous"
    (problem,) = pj.verify(claimed).problems
    cycle = r"deadlock: .*0SEND_F1 \(worker 0 to 1\) waits for 1SEND_B0 \(worker 1 to 0\)"
    assert re.search(cycle, str(problem))


def test_a_closed_form_has_no_messages_that_are_buffered():
    """Buffered messages depend on the parameters: the form would hold for some of them only."""
    claimed = written(formula())
    claimed["costs"]["links"]["eager_below"] = 0.5
    with pytest.raises(ValueError, match=r"eager_below must be 0 in a closed form, got 0\.5"):
        pj.verify(claimed)


def test_a_report_agrees_with_its_certificate():
    table = build("chimera", 2, 2)
    form = pj.formula(pj.lower(table, step_end=False))
    report = written(form.as_json() | {"certificate": form.certificate(table)})
    assert pj.verify(report).ok
    for key in ("parameters", "facets", "exact", "gap"):
        (problem,) = pj.verify(report | {key: [report[key]]}).problems
        assert problem.claim == f"report: {key}"


# ---------------------------------------------------------------------------------- the command
ONE = ("--schedule", "1f1b", "--workers", 3, "--microbatches", 4)
TIMES = ("--stage-times", "F=1,B=2", "--comm", 0.5)
SPLIT = ("--stage-times", "F=1,I=1,W=1")


@pytest.fixture
def file(answer, tmp_path):
    """A certificate that `evaluate` wrote."""
    path = tmp_path / "claims.json"
    message = answer("evaluate", *ONE, *TIMES, "--link", "queued", "--certificate", path)
    assert message["certificate"] == str(path)
    return path


def test_the_command_accepts_what_evaluate_wrote(file, answer, call):
    message = answer("verify", file)
    run = answer("evaluate", *ONE, *TIMES, "--link", "queued")
    expected = {"makespan": run["makespan"], "unit": "seconds", "ok": True}
    assert message == expected | {"problems": [], "bounds": []}
    code, out, _ = call("verify", file)
    assert (code, "hold" in out, "22 s" in out) == (0, True, True)
    assert run["certificate"] is None


def test_the_command_names_what_does_not_hold(file, call):
    changed = json.loads(file.read_text())
    changed["costs"]["seconds"]["F"][0] = 1.25
    file.write_text(json.dumps(changed))
    code, out, err = call("verify", file, "--json")
    message = json.loads(out)
    assert (code, err, message["ok"]) == (1, "", False)
    assert message["problems"][0].startswith("makespan: claimed 22")
    code, out, _ = call("verify", file)
    assert code == 1
    assert f"and {len(message['problems']) - 10} more" in out


def test_the_command_takes_a_table_with_costs(answer, tmp_path):
    path = tmp_path / "table.csv"
    answer("export", *ONE, "--format", "torch-csv", "--out", path)
    message = answer("verify", path, *TIMES, "--link", "rendezvous", "--activation-sizes", "2")
    run = answer("evaluate", "--table", path, *TIMES, "--link", "rendezvous")
    assert (message["ok"], message["makespan"]) == (True, run["makespan"])


def test_the_command_names_mistakes(file, mistake):
    assert "not a table" in mistake("verify", file, *TIMES)
    assert "times are missing" in mistake("verify", file, "--link", "queued")
    again = mistake("evaluate", *ONE, *TIMES, "--certificate", file)
    assert "--certificate" in again
    assert "exists" in again


def test_optimize_certifies_its_plan(answer, tmp_path):
    path = tmp_path / "plan.json"
    limits = ("--memory-limit", 2, "--no-store", "--time-limit", 5)
    best = answer("optimize", *ONE, *SPLIT, *limits, "--certificate", path)
    message = answer("verify", path)
    assert (message["ok"], message["makespan"]) == (True, best["makespan"])
    (bound,) = message["bounds"]
    assert (bound["value"], bound["by"]) == (best["lower_bound"], best["bound_by"])


def test_a_solved_problem_is_in_units(answer, call, tmp_path):
    """The store counts in whole units, of half a second here."""
    line = "optimize", *ONE, "--stage-times", "F=0.5,B=1", "--memory-limit", 2, "--time-limit", 5
    best = answer(*line, "--store", tmp_path / "store")
    (path,) = (tmp_path / "store").glob("*.json")
    message = answer("verify", path)
    assert (message["unit"], message["makespan"]) == ("units", 2 * best["makespan"])
    _, out, _ = call("verify", path)
    assert f"all claims hold: step time {message['makespan']:g} units" in out
    assert f"lower bound {message['makespan']:g} units by solver" in out


def test_a_result_that_does_not_hold_is_an_internal_error(call, monkeypatch):
    wrong = Verdict(None, (("plan",),))
    monkeypatch.setitem(vars(pj), "verify", lambda claimed: wrong)
    code, out, err = call("optimize", *ONE, *SPLIT, "--memory-limit", 2, "--no-store")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: internal error: 1 claims of the result do not hold")


def test_order_certifies_its_order(answer, tmp_path):
    path = tmp_path / "order.json"
    result = answer("tune", "messages", *ONE, *TIMES, "--iterations", 2, "--certificate", path)
    message = answer("verify", path)
    assert (message["ok"], message["makespan"]) == (True, result["value"])
    checked = {bound["by"]: bound["checked"] for bound in message["bounds"]}
    assert checked == {"path": True, "queue": False}
