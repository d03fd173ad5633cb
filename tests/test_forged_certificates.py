"""Every leaf of every kind of certificate is changed: what is then false is refused.

A change that is accepted leaves a true certificate. Of a run or an optimum the engine says so: what
it derives of the changed inputs is what is claimed. Of a closed form runs at random points do. What
says nothing that could be false is in `FREE`, and docs/certificates.md names it.
"""

import copy
import functools
import re

import numpy as np
import pytest
from certificate_cases import optimum_of, written
from daily import daily

import pipejax as pj
from pipejax.analysis.verify.certificate_file import checksum_of
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.schedules.table.table_files import from_json

FREE = {  # texts, and what was spent
    "run": r"table\.name",
    "optimum": r"table\.name|proof\.(prover(\..*)?|seconds|source)",
    "formula": r"table\.name|costs\.parameters\.\d+\.name",
}
ROWS = [  # cells of all kinds
    [
        *("0UNSHARD", "0F0", "0SEND_F0", "0O0", "0WAIT_O0", "0F1", "0SEND_F1", "0WAIT_SEND_F0"),
        *("0L0", "0RECV_B0", "0R0", "0I0", "0RECV_B1", "", "0W0", "0B1"),
        *("0REDUCE_GRAD", "0WAIT_REDUCE_GRAD", "0RESHARD"),
    ],
    [
        *("1RECV_F0", "1F0", "1RECV_F1", "(1F1;1B0)OVERLAP_F_B", "1SEND_B0", "1B1"),
        *("1SEND_B1", "1WAIT_SEND_B0", "1WAIT_SEND_B1"),
    ],
]
WORDS = [
    *("delay", "queued", "blocking", "rendezvous", "worker", "pair", "direction", "early"),
    *("program", "pairs", "span", "makespan", "solver", "stage", "formula", "run", "optimum"),
]


# bounds of `run_with_bounds` that hold and can be no higher; that of the solver is on trust
TIGHT = {"path": 12.75, "worker": 12.75, "stage": 11.75, "memory chain": 12.75}
TIGHT |= {"memory area": 12.75, "solver": 11.0}


def run_with_bounds():
    """A run whose bounds are as high as they can be."""
    table = pj.schedules.build("zb-h1", num_workers=2, num_microbatches=2)
    times = {"forward": 1.0, "input_grad": 1.5, "weight_grad": 0.5, "all_reduce": 2.0}
    costs = pj.Costs(**times, update=0.25, latency=0.25, transmit=1.0)
    run = pj.evaluate(table, costs, link="queued")
    memory = pj.analysis.activation_memory(run)
    return pj.certificate(run, memory=memory, limits=memory.peak, lower_bounds=TIGHT)


def run_of_all_cells():
    """A run with all kinds of cells, times by microbatch, and a model for each direction."""
    table = pj.ScheduleTable.from_rows(ROWS)
    sharding = {"unshard": 0.25, "reshard": 0.5, "reduce_grad": 0.75, "wait_reduce_grad": 1.25}
    costs = pj.Costs(
        forward=np.array([[1.0, 2.0], [1.5, 0.5]]),
        backward=2.0,
        input_grad=1.0,
        weight_grad=1.25,
        recompute=0.5,
        offload=0.75,
        load=0.25,
        all_reduce=1.5,
        update=0.125,
        pair_factor=0.5,
        latency=0.25,
        transmit=np.array([[[0.5]], [[0.125]]]),
        **sharding,
    )
    links = pj.Links(
        "rendezvous",
        queues="direction",
        host_links=((0, 1),),
        posting="program",
        shared_links=(((0, 1), (1, 0)),),
        pair_links={(0, 1): "rendezvous", (1, 0): "blocking"},
        eager_below=0.25,
    )
    run = pj.evaluate(table, costs, link=links)
    memory = pj.analysis.activation_memory(
        run, sizes=[[1.0, 2.0], [1.5, 0.5]], weight_share=[0.25, 0.5], checkpoints=0.125
    )
    return pj.certificate(run, memory=memory)


def optimum():
    """An optimum with limits that are reached."""
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    times = {"forward": 2.0, "input_grad": 3.0, "weight_grad": 1.0, "transfer": 1.0}
    costs = pj.Costs.uniform(table, **times)
    return optimum_of(table, costs, 2.0)


def formula(name="chimera", links="rendezvous", **options):
    """A closed form."""
    table = pj.schedules.build(name, num_workers=2, num_microbatches=2)
    return pj.formula(pj.lower(table, link=links, step_end=False), **options).certificate(table)


CERTIFICATES = {
    "run with bounds": run_with_bounds,
    "run of all cells": run_of_all_cells,
    "optimum": optimum,
    "closed form": formula,
    "closed form in a box": functools.partial(
        formula, "1f1b", "queued", parameters=("F", "B", "c"), box={"F": (1, 2), "c": (0, 0.5)}
    ),
    "closed form with a parameter that is fixed": functools.partial(
        formula, "chimera", "queued", parameters=("F", "B", "c"), box={"F": (2, 2), "B": (1, 3)}
    ),
}


# ------------------------------------------------------------------------------------ what is changed
def places(data, path=()):
    """Each place in JSON, as the keys that lead there, with what stands there."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*path, key), data[key]
        yield from places(data[key], (*path, key))


def others(value):
    """Other values for a leaf: plausible ones first, then those of another type."""
    wild = [None, "x", [], {}, True, [value], -1, float("nan")]
    if isinstance(value, bool):
        found = [not value, int(value), *wild]
    elif isinstance(value, int | float):
        found = [value + 1, value * 1.5 + 0.125, 0, bool(value), *wild]
    elif value in WORDS:
        found = [*WORDS, value.upper(), *wild]
    else:
        found = [f"{value}x", "", *wild]
    return [other for other in found if other != value or type(other) is not type(value)]


def with_change(data, path, change):
    """A copy of JSON, changed at one place."""
    changed = copy.deepcopy(data)
    *way, last = path
    inner = changed
    for key in way:
        inner = inner[key]
    change(inner, last)
    return changed


def forged(data, most=None):
    """Every key or entry left out, a key more everywhere, every leaf and all that holds some changed.

    A leaf has its first other value and some of the rest: at most so many, in turn.
    """
    yield (), {**data, "more": 1}
    for number, (path, value) in enumerate(places(data)):
        yield path, with_change(data, path, lambda inner, last: inner.pop(last))
        if isinstance(value, dict):
            yield (*path, "more"), with_change(data, path, lambda inner, k: inner[k].update(more=1))
        if isinstance(value, dict | list) and value:
            for other in ([], "x") if isinstance(value, dict) else ({}, 1):
                yield path, with_change(data, path, functools.partial(put, other))
            continue
        first, *rest = others(value)
        start = number % len(rest)
        for other in [first, *rest[start:], *rest[:start]][:most]:
            yield path, with_change(data, path, functools.partial(put, other))


def put(value, inner, key):
    """Set one entry."""
    inner[key] = value


def signed(changed):
    """The same with a checksum that agrees: whoever forges an optimum can make one too."""
    if isinstance(changed.get("proof"), dict) and "checksum" in changed["proof"]:
        changed["proof"]["checksum"] = checksum_of(changed)
    return changed


# ------------------------------------------------------------------------------------ what is true
def evaluation(claimed):
    """The engine's run of what a certificate says of table, costs and links."""
    seconds = claimed["costs"]["seconds"]
    costs = pj.Costs(**{PHASE_FIELDS.get(k, k): np.array(v, float) for k, v in seconds.items()})
    links = pj.Links(**claimed["costs"]["links"])
    return pj.evaluate(from_json(claimed["table"]), costs, link=links)


def is_near(one, two):
    """Whether JSON is alike but for rounding."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(is_near(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(is_near, one, two))
    return one == two if isinstance(one, str | None) else one == pytest.approx(two, abs=1e-9)


def is_true_run(changed):
    """Whether the engine derives the run that is claimed."""
    run, claim = evaluation(changed), changed["claim"]
    memory = pj.analysis.activation_memory(run, **changed["costs"]["memory"])
    own = written(pj.certificate(run, memory=memory))
    peaks, limits = memory.peak, claim["limits"]
    limits_hold = limits is None or all(p <= m + 1e-9 for p, m in zip(peaks, limits, strict=True))
    asked = ("objective", "limits", "offload", "lower_bounds")
    said = {key: value for key, value in claim.items() if key not in asked}
    derived = {key: value for key, value in own["claim"].items() if key not in asked}
    return limits_hold and is_near(said, derived) and is_near(changed["proof"], own["proof"])


def is_true_optimum(changed):
    """Whether the engine derives the starts and the value that are claimed."""
    run, claim = evaluation(changed), changed["claim"]
    memory = pj.analysis.activation_memory(run, **changed["costs"]["memory"])
    starts = {
        str(op): run.start[w, k]
        for w, row in enumerate(run.table.rows())
        for k, cell in enumerate(row)
        for op in cell
        if op.phase.name in "FBIWOL"
    }
    value = run.max_span if claim["objective"] == "span" else run.makespan
    keeps = (memory.peak <= np.array(claim["limits"]) + 1e-9).all()
    return keeps and value == claim["value"] and is_near(changed["proof"]["starts"], starts)


def is_true_form(changed):
    """Whether runs at random points are as long as the form says."""
    costs, claim = changed["costs"], changed["claim"]
    parameters, rng = costs["parameters"], np.random.default_rng(0)
    gap = claim["gap"][0] / claim["gap"][1]
    table, links = from_json(changed["table"]), pj.Links(**costs["links"])
    stages, pipes = table.num_stages, table.num_pipes
    for _ in range(8):
        theta = rng.integers(0, 4, len(parameters)) / 2 + rng.random() * 1e-3
        for k, each in enumerate(parameters):
            low, high = costs["box"].get(each["name"], (0, None))
            theta[k] = rng.uniform(low or 0, high) if high is not None else (low or 0) + theta[k]
        shares = [
            (t / each["unit"], each["weights"]) for t, each in zip(theta, parameters, strict=True)
        ]
        times = {letter: np.zeros(stages) for letter in (*PHASE_FIELDS, "pair")}
        times |= dict.fromkeys(("latency", "transmit"), np.zeros((2, pipes, stages - 1)))
        if not any("pair" in weights for _, weights in shares):
            del times["pair"]
        for share, weights in shares:
            for key, value in weights.items():
                times[key] = times[key] + share * np.array(value, float)
        given = {PHASE_FIELDS.get(key, key): value for key, value in times.items()}
        makespan = pj.evaluate(table, pj.Costs(**given), link=links).makespan
        units = [each["unit"] for each in parameters]
        value = max(np.dot(facet, theta / units) for facet in claim["facets"])
        if not value * (1 - 1e-9) <= makespan * (1 - gap) <= value * (1 + 1e-9):
            return False
    return True


TRUE = {"run": is_true_run, "optimum": is_true_optimum, "formula": is_true_form}


def is_still_true(changed, kind):
    """What TRUE says; inputs that the engine refuses have no certificate."""
    try:
        return TRUE[kind](changed)
    except (ValueError, TypeError, KeyError):
        return False


def verdict_of(changed):
    try:
        return pj.verify(changed)
    except ValueError:  # malformed
        return None


def is_accepted(changed):
    """Whether the checker finds nothing wrong."""
    verdict = verdict_of(changed)
    return verdict is not None and verdict.ok


def is_lower_bound(path, changed, verdict):
    """Whether a bound of the run is claimed that is true, or that is said to be on trust."""
    if not path.startswith("claim.lower_bounds."):
        return False
    said = changed["claim"]["lower_bounds"]
    held = [not checked.checked or checked.value <= TIGHT[checked.by] for checked in verdict.bounds]
    return all(held) and len(held) == len(said)


def assert_none_is_believed(data, most=None):
    """Every change is refused, or leaves a true certificate; return how many there were."""
    kind, count = data["kind"], 0
    assert pj.verify(data).problems == ()
    for path, changed in forged(data, most):
        count += 1
        verdict, place = verdict_of(signed(changed)), ".".join(map(str, path))
        if verdict is None or not verdict.ok or re.fullmatch(FREE[kind], place):
            continue
        true = is_lower_bound(place, changed, verdict)
        if not place.startswith("claim.lower_bounds"):
            true = is_still_true(changed, kind)
        assert true, (place, changed["claim"])
    return count


@pytest.mark.parametrize("name", daily(CERTIFICATES, always=0))
def test_no_change_makes_a_false_certificate_that_is_accepted(name):
    assert assert_none_is_believed(written(CERTIFICATES[name]()), most=2) > 250


@pytest.mark.slow
@pytest.mark.parametrize("name", CERTIFICATES)
def test_no_change_of_any_kind_does(name):
    assert assert_none_is_believed(written(CERTIFICATES[name]())) > 1000


def test_an_optimum_that_was_damaged_is_refused_whatever_was_changed():
    data = written(optimum())
    for path, changed in forged(data, most=1):
        assert not is_accepted(changed), path


def test_a_closed_form_has_no_messages_that_are_buffered():
    """Which ones are depends on the parameters, so the form would hold for some of them alone."""
    claimed = written(formula())
    claimed["costs"]["links"]["eager_below"] = 0.5
    with pytest.raises(ValueError, match=r"eager_below must be 0 in a closed form, got 0\.5"):
        pj.verify(claimed)


@pytest.mark.parametrize(
    ("by", "claim"),
    [
        ("path", {"objective": "span"}),
        ("memory chain", {"limits": None}),
        ("memory chain", {"offload": True}),
        ("memory area", {"limits": None}),
        ("memory area", {"offload": True}),
    ],
)
def test_a_bound_that_cannot_be_derived_is_not_believed(by, claim):
    """It is one of those that are checked, so it is not taken on trust."""
    claimed = written(run_with_bounds())
    claimed["claim"] |= {"lower_bounds": [{"by": by, "value": 1.0}], **claim}
    (problem,) = pj.verify(claimed).problems
    assert (problem.claim, problem.derived) == (f"lower bound by {by}", None)


@pytest.mark.parametrize("make", [run_with_bounds, optimum, formula])
def test_there_are_no_microbatches_beside_those_of_the_rows(make):
    claimed = written(make())
    claimed["table"]["pipe_of_microbatch"].append(0)
    (problem,) = pj.verify(signed(claimed)).problems
    assert problem.derived == "pipe_of_microbatch names 3 microbatches, the rows hold 2"


@pytest.mark.parametrize("make", [run_with_bounds, formula])
def test_posting_by_program_needs_cells(make):
    claimed = written(make())
    claimed["costs"]["links"] |= {"model": "rendezvous", "posting": "program"}
    with pytest.raises(ValueError, match="posting by program needs a table with SEND and RECV"):
        pj.verify(claimed)
