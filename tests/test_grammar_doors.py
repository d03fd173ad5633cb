"""What else says how long a run takes, of tables with grammars: closed forms, paths, corners, changes.

Every answer is held against the event loop.
"""

import json

import grammar_cases
import numpy as np
import pytest
import reference
import strategies
from grammar_cases import priced
from hypothesis import assume, given, settings, strategies as st
from reference_grammar import SHARDING, IllegalError
from test_grammar_runs import braided, kind, table_of

import pipejax as pj
from pipejax.schedules.table.table_files import from_json

MODELS = st.sampled_from(strategies.LINKS)
SEEDS = st.integers(0, 2**32 - 1)
MESSAGES = ("latency", "transmit")


@st.composite
def runs(draw, **of_case):
    """Draw a case that can run, with a link model, its table and its run by the event loop."""
    case, model = draw(grammar_cases.cases(**of_case)), draw(MODELS)
    try:
        run = case.run(model)
    except (IllegalError, reference.DeadlockError):
        assume(False)
    return case, model, case.table(), run


@settings(max_examples=60)
@given(found=runs(), seed=SEEDS)
def test_a_closed_form_is_the_event_loop_everywhere(found, seed):
    case, model, table, _ = found
    rng = np.random.default_rng(seed)
    given = {**case.given, "pair_factor": None}
    none = {name: None if value is None else 0 * value for name, value in given.items()}
    parts = {
        "messages": {**none, **{name: given[name] for name in MESSAGES}},
        "others": {**given, **{name: none[name] for name in MESSAGES}},
    }
    costs = {name: priced(case.data, part).costs for name, part in parts.items()}
    form = pj.formula(pj.evaluate(table, case.costs, link=model).program, costs)
    assert form.exact
    for _ in range(3):
        values = (rng.integers(0, 9, 2) / 4).tolist()
        at = {
            name: None if value is None else value * values[name not in MESSAGES]
            for name, value in given.items()
        }
        assert form.of(*values) == priced(case.data, at).run(model).makespan


@settings(max_examples=40)
@given(found=runs(max_workers=2), seed=SEEDS)
def test_kinds_are_parameters_by_their_letters(found, seed):
    case, model, table, _ = found
    program = pj.lower(table, link=model, step_end=False)
    names = [name for name in default_names(program, case) if name not in ("c_F", "c_B")]
    assume(len(names) < 6)  # more have many facets
    rng = np.random.default_rng(seed)
    form = pj.formula(program)
    assert [name for name in form.parameters if name not in ("c_F", "c_B")] == names
    for _ in range(3):
        values = dict(
            zip(form.parameters, rng.integers(0, 9, len(form.parameters)) / 4, strict=True)
        )
        assert form(**values) == priced(case.data, by_letters(case, values)).run(model).makespan


def default_names(program, case):
    """Letters of what a table holds, each cost once, a backward whole or in its parts."""
    held = {phase.name for phase in (*program.layout.phases, *program.layout.paired_phases)}
    fields, names = {}, []
    split = held & {"I", "W"}
    for letters, (name, _) in grammar_cases.fields_of(case.data).items():
        is_known = letters in held and letters not in ("L", "U", "A", *SHARDING)
        is_known |= bool(split) and letters in ("I", "W")
        if is_known and not (split and letters == "B") and name not in fields:
            fields[name] = letters
            names.append(letters)
    order = ["F", "B", "I", "W", "R", "O"]
    return [x for x in order if x in names] + [x for x in names if x not in order]


def by_letters(case, values):
    """Costs of all stages alike, from parameters by letters and what follows from them."""
    fields = grammar_cases.fields_of(case.data)
    seconds = {fields[letters][0]: value for letters, value in values.items() if letters in fields}
    if "backward" in seconds:
        seconds["input_grad"] = seconds["weight_grad"] = seconds["backward"] / 2
    elif "input_grad" in seconds:
        seconds["backward"] = seconds["input_grad"] + seconds["weight_grad"]
    seconds["load"] = seconds.get("offload", 0.0)
    found = {
        name: None if value is None else np.full(np.shape(value), seconds.get(name, 0.0))
        for name, value in case.given.items()
    }
    for way, letter in enumerate("FB"):
        found["transmit"][way] = values.get(f"c_{letter}", 0.0)
    return {**found, "pair": None, "pair_factor": None}


@settings(max_examples=60)
@given(found=runs(by_microbatch=True))
def test_the_longest_path_is_the_makespan_and_adds_up(found):
    case, model, table, run = found
    evaluation = pj.evaluate(table, case.costs, link=model)
    longest, *others = pj.analysis.longest_paths(evaluation, 3)
    assert longest.length == run.makespan
    assert all(path.length <= longest.length for path in others)
    assert sum(longest.counts.values()) >= len(longest.ops)
    names = {table.grammar.text(cell) for row in table.rows() for cell in row if cell}
    assert {op for op in longest.ops if op[-1] not in "AU"} <= names


@settings(max_examples=40)
@given(found=runs(by_microbatch=True), seed=SEEDS)
def test_corners_are_runs(found, seed):
    case, model, table, run = found
    rng = np.random.default_rng(seed)
    named = {"here": case, "there": grammar_cases.again(case, rng)}
    program = pj.evaluate(table, case.costs, link=model).program
    corners = pj.analysis.corners(program, {name: each.costs for name, each in named.items()})
    assert corners.makespan.tolist() == [run.makespan, named["there"].run(model).makespan]


@settings(max_examples=60)
@given(found=runs(by_microbatch=True), seed=SEEDS)
def test_changes_of_a_run_are_those_of_the_event_loop(found, seed):
    case, model, table, _ = found
    rng = np.random.default_rng(seed)
    run = pj.analysis.IncrementalRun(pj.evaluate(table, case.costs, link=model))
    before, finish = run.makespan, run.finish
    other = grammar_cases.again(case, rng)
    assert run.set_costs(other.costs) == other.run(model).makespan
    assert (run.undo(), run.finish) == (before, finish)
    op = str(rng.choice(list(finish)))
    told = run.makespan_if(op, 9.0)
    assert run.set_duration(op, 9.0) == told
    assert run.undo() == before


@settings(max_examples=60)
@given(case=grammar_cases.cases(), seed=SEEDS)
def test_swaps_of_a_row_or_lane_are_those_of_the_event_loop(case, seed):
    """One after the other; what cannot run is refused, and so is what swaps more than two ops."""
    rng = np.random.default_rng(seed)
    try:
        case.run()
    except (IllegalError, reference.DeadlockError):
        assume(False)
    run = pj.analysis.IncrementalRun(pj.evaluate(case.table(), case.costs))
    for _ in range(6):
        w = rng.integers(len(case.data["rows"]))
        rows = [list(row) for row in case.data["rows"]]
        held = [k for k, text in enumerate(rows[w]) if text]
        lanes = [case.grammar.lane(case.grammar.split(rows[w][k])[0][0]) for k in held]
        pairs = [
            (a, b)
            for n, (a, lane) in enumerate(zip(held, lanes, strict=True))
            for b in [
                k for k, other in zip(held[n + 1 :], lanes[n + 1 :], strict=True) if other == lane
            ][:1]
        ]
        if not pairs:
            continue
        a, b = pairs[rng.integers(len(pairs))]
        names = [name_of(case, rows[w][k], w) for k in (a, b)]
        rows[w][a], rows[w][b] = rows[w][b], rows[w][a]
        other = case._replace(data={**case.data, "rows": rows})
        before = run.makespan
        try:
            found = run.swap(*names)
        except pj.ScheduleError:
            with pytest.raises((IllegalError, reference.DeadlockError)):
                other.run()
            continue
        except ValueError:  # what hangs on the order of rows
            assert run.makespan == before
            return
        assert found == other.run().makespan
        assert texts(run.table) == texts(other.table())
        case = other


def name_of(case, text, worker):
    is_worker = case.grammar.of(case.grammar.split(text)[0][0]) == "worker"
    return f"{text} (worker {worker})" if is_worker else text


def texts(table):
    return [[table.grammar.text(cell) for cell in row if cell] for row in table.rows()]


def vocabulary(workers, microbatches):
    """Passes S and T on every worker with collectives around them, in GPipe's order."""
    kinds = {x: kind("net", "worker", x.lower(), together=True) for x in ("Ca", "Cb")}
    kinds |= {x: kind(of="worker", time=x.lower()) for x in "ST"}
    rules = ["Ca <- F@last", "S <- Ca", "Cb <- S", "B@last <- Cb", "T <- Cb"]
    rows = [
        [
            op
            for m in range(microbatches)
            for op in (f"{w}F{m}", f"Ca{m}", f"S{m}", f"Cb{m}", f"{w}B{m}", f"T{m}")
        ]
        for w in range(workers)
    ]
    return table_of(rows, {"kinds": kinds, "rules": rules})


BRAID = {x: 1.0 + k / 4 for k, x in enumerate(("fa", "fd", "fm", "fc", "ba", "bd", "bm", "bc"))}
GROWING = {
    "braided": (lambda m: braided(3, m), BRAID),
    "vocabulary": (lambda m: vocabulary(2, m), {"ca": 0.25, "cb": 0.5, "s": 0.5, "t": 0.75}),
    "sliced": (lambda m: pj.schedules.build("seq-1f1b", num_workers=3, num_microbatches=m), {}),
}


@pytest.mark.parametrize("name", GROWING)
def test_makespans_of_more_microbatches(name):
    build, others = GROWING[name]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.25, others=others)
    table, longer = build(24), build(60)
    per = longer.num_microbatches // 60
    program = pj.lower(table)
    found = pj.analysis.extrapolated_makespans(program, costs, num_microbatches=60 * per)
    assert found.tolist() == [pj.evaluate(longer, costs).makespan]
    cycle = pj.cycle_time(program, costs).item() * per
    more = pj.evaluate(longer, costs).makespan - pj.evaluate(table, costs).makespan
    assert cycle == pytest.approx(more / 36, rel=1e-12)


@settings(max_examples=100)
@given(found=runs(by_microbatch=True), seed=SEEDS)
def test_certificates_hold(found, seed):
    case, model, table, run = found
    rng, stages = np.random.default_rng(seed), table.num_stages
    evaluation = pj.evaluate(table, case.costs, link=model)
    sizes = rng.integers(0, 9, (stages, table.num_microbatches)) / 2
    memory = pj.analysis.activation_memory(evaluation, sizes=sizes, weight_share=0.25)
    free = pj.evaluate(table, case.costs).makespan
    claimed = pj.certificate(evaluation, memory=memory, lower_bounds={"path": free})
    verdict = pj.verify(json.loads(json.dumps(claimed)))
    assert not verdict.problems
    assert verdict.makespan == run.makespan


@settings(max_examples=40)
@given(found=runs(max_workers=2), seed=SEEDS)
def test_certificates_of_closed_forms_hold(found, seed):
    case, model, table, _ = found
    none = {name: None if value is None else 0 * value for name, value in case.given.items()}
    none |= {"pair_factor": None}
    sent = {**none, **{name: case.given[name] for name in MESSAGES}}
    others = {**case.given, **{name: none[name] for name in (*MESSAGES, "pair_factor")}}
    parts = {"c": priced(case.data, sent).costs, "x": priced(case.data, others).costs}
    form = pj.formula(pj.evaluate(table, case.costs, link=model).program, parts)
    claimed = json.loads(json.dumps(form.certificate(table)))
    assert not pj.verify(claimed).problems
    assert str(pj.files.read_formula(claimed)) == str(form)
    claimed["claim"]["facets"][0][1] += 1
    assert not pj.verify(claimed).ok


def forged(claimed, change):
    """A certificate with one part that is another."""
    claimed = json.loads(json.dumps(claimed))
    change(claimed)
    return pj.verify(claimed)


def _start(claimed):
    ops = claimed["proof"]["ops"]
    ops[next(name for name in ops if name.startswith("1Fm3 "))]["start"] += 0.5


def _rule(claimed):
    claimed["table"]["rules"].remove("Fm <- Fd")


def _lane(claimed):
    (kind,) = (kind for kind in claimed["table"]["kinds"] if kind["letters"] == "Fd")
    kind["lane"] = "compute"


def _other_lane(claimed):
    (kind,) = (kind for kind in claimed["table"]["kinds"] if kind["letters"] == "Bc")
    kind["lane"] = "dma"


def _message(claimed):
    rules = claimed["table"]["rules"]
    rules[rules.index("Fa <- Fc@-1 [message]")] = "Fa <- Fc@-1"


def _all(claimed):
    claimed["table"]["rules"].append("0Fa1 <- 2Fc0")


def _arrival(claimed):
    claimed["proof"]["transfers"]["0Fc2 to 1Fa2 (worker 0 to 1)"]["arrives"] += 0.5


def _lost(claimed):
    del claimed["proof"]["transfers"]["0Fc2 to 1Fa2 (worker 0 to 1)"]


def _time(claimed):
    claimed["costs"]["seconds"]["Bm"][2] += 0.25


def _item(claimed):
    (kind,) = (kind for kind in claimed["table"]["kinds"] if kind["letters"] == "Ba")
    kind["at_end"] = {"activation": 1}


@pytest.mark.parametrize(
    "change", [_start, _rule, _lane, _other_lane, _message, _all, _arrival, _lost, _time, _item]
)
def test_what_is_forged_is_refused(change):
    costs = pj.Costs(transmit=0.25, others=BRAID)
    claimed = pj.certificate(pj.evaluate(braided(3, 8), costs, link="queued"))
    assert forged(claimed, lambda same: None).ok
    assert not forged(claimed, change).ok


def _early(claimed):
    """What all do together begins when the first has reached it."""
    ops = claimed["proof"]["ops"]
    name = next(name for name in ops if name.startswith("Ca1 (worker 1"))
    ops[name]["start"] -= 0.25


def _apart(claimed):
    (kind,) = (kind for kind in claimed["table"]["kinds"] if kind["letters"] == "Cb")
    del kind["together"]


def _of_workers(claimed):
    claimed["costs"]["seconds"]["S"][1] += 0.5


@pytest.mark.parametrize("change", [_early, _apart, _of_workers])
def test_what_is_forged_of_what_all_do_together_is_refused(change):
    costs = pj.Costs(
        forward=1.0, backward=2.0, others={"ca": 0.25, "cb": 0.5, "s": [0.5, 1.0], "t": 0.75}
    )
    claimed = pj.certificate(pj.evaluate(vocabulary(2, 4), costs))
    assert forged(claimed, lambda same: None).ok
    assert not forged(claimed, change).ok


@settings(max_examples=150)
@given(found=runs(), seed=SEEDS)
def test_a_certificate_of_another_table_holds_if_all_of_it_is_the_same(found, seed):
    """A rule is dropped, or what it says is; a kind is on another lane; an op stands elsewhere."""
    case, model, table, _ = found
    rng = np.random.default_rng(seed)
    claimed = pj.certificate(pj.evaluate(table, case.costs, link=model))
    other = spoiled(json.loads(json.dumps(claimed["table"])), rng)
    assume(other != claimed["table"])
    verdict = pj.verify({**claimed, "table": other})
    try:  # it may be illegal, or wait for ever under this link model
        honest = pj.certificate(pj.evaluate(from_json(other), case.costs, link=model))
    except pj.ScheduleError:
        assert not verdict.ok
        return
    same = all(honest[part] == claimed[part] for part in ("claim", "proof"))
    assert verdict.ok == same


def spoiled(data, rng):
    """A table's JSON with one change."""
    rules, kinds = data.get("rules", []), data.get("kinds", [])
    which = rng.integers(4)
    if which == 0 and rules:
        rules.pop(rng.integers(len(rules)))
    elif which == 1 and rules:
        k = rng.integers(len(rules))
        changes = [(" [message]", ""), ("@-1", ""), ("@+1", ""), (" (all)", ""), ("@last", "")]
        old, new = changes[rng.integers(len(changes))]
        rules[k] = rules[k].replace(old, new)
    elif which == 2 and kinds:
        kind = kinds[rng.integers(len(kinds))]
        kind["lane"] = str(rng.choice(["compute", "net", "dma"]))
    else:
        row = data["rows"][rng.integers(len(data["rows"]))]
        a, b = rng.integers(len(row), size=2)
        row[a], row[b] = row[b], row[a]
    return data
