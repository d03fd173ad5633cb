"""What else says how long a run takes, of tables with grammars: closed forms, paths, corners, changes."""

import grammar_cases
import numpy as np
import pytest
import reference
import strategies
from grammar_cases import priced
from hypothesis import assume, given, settings, strategies as st
from reference import SHARDING, IllegalError

import pipejax as pj

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


@settings(max_examples=40)
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
    is_worker = case.grammar.scope(case.grammar.split(text)[0][0]) == "worker"
    return f"{text} (worker {worker})" if is_worker else text


def texts(table):
    return [[table.grammar.text(cell) for cell in row if cell] for row in table.rows()]


BRAID = {x: 1.0 + k / 4 for k, x in enumerate(("fa", "fd", "fm", "fc", "ba", "bd", "bm", "bc"))}
GROWING = {
    "combined-1f1b": (3, BRAID),
    "vocabulary-1f1b": (2, {"x": 0.25, "y": 0.5, "s": 0.5, "t": 0.75}),
    "seq-1f1b": (3, {}),
}


@pytest.mark.parametrize("name", GROWING)
def test_makespans_of_more_microbatches(name):
    workers, others = GROWING[name]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.25, others=others)
    table, longer = (
        pj.schedules.build(name, num_workers=workers, num_microbatches=m) for m in (24, 60)
    )
    per = longer.num_microbatches // 60
    program = pj.lower(table)
    found = pj.analysis.extrapolated_makespans(program, costs, num_microbatches=60 * per)
    assert found.tolist() == [pj.evaluate(longer, costs).makespan]
    cycle = pj.cycle_time(program, costs).item() * per
    more = pj.evaluate(longer, costs).makespan - pj.evaluate(table, costs).makespan
    assert cycle == pytest.approx(more / 36, rel=1e-12)
