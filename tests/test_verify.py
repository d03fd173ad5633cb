"""Certificates: what holds is accepted, and each claim that is changed is named."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import strategies
from certificate_cases import LINKS
from hypothesis import given, settings, strategies as st
from legal_sizes import SLICED

import pipejax as pj
from pipejax.analysis.verify.bounds import derived_bounds
from pipejax.analysis.verify.certificate_file import read_run
from pipejax.analysis.verify.formula_check import _sign
from pipejax.search.schedule.bounds import area_bound, lower_bound, stage_bounds
from pipejax.search.schedule.initial_plans import greedy_plan
from pipejax.search.schedule.plan import objective_of
from pipejax.search.schedule.problem import pose

SMALL = {"num_workers": 4, "num_microbatches": 8}


def certified(table, costs, link="delay", **options):
    """Certificate of a run, through JSON as in a file."""
    claimed = pj.certificate(pj.evaluate(table, costs, link=link), **options)
    return json.loads(json.dumps(claimed))


def random_costs(table, seed, **options):
    """Costs of any floats, whose sums round."""
    rng = np.random.default_rng(seed)
    costs = strategies.price(table, [], rng, **options).costs
    drawn = {
        field.name: rng.random(np.shape(value))
        for field in dataclasses.fields(costs)
        if np.ndim(value := getattr(costs, field.name)) and field.name != "backward"
    }
    return dataclasses.replace(costs, **drawn)


def accept_schedule(name, which):
    table = pj.schedules.build(name, **SMALL)
    for number, links in list(enumerate(LINKS))[which]:
        if links.posting == "program" and name in SLICED:
            continue  # needs SEND and RECV cells
        costs = random_costs(table, number, pairs=number % 2 == 0, step_end=number % 3 > 0)
        verdict = pj.verify(certified(table, costs, links))
        assert (verdict.ok, verdict.problems) == (True, ())
        assert verdict.makespan == pj.evaluate(table, costs, link=links).makespan


@pytest.mark.parametrize("name", sorted(pj.schedules.REGISTRY))
def test_every_schedule_is_accepted(name):
    accept_schedule(name, slice(len(name) % 3, None, 3))  # another third for another


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(pj.schedules.REGISTRY))
def test_every_schedule_is_accepted_under_all_links(name):
    accept_schedule(name, slice(None))


def test_a_fused_pair_sends_its_activation_first():
    rows = [
        ["0F0", "0F1", "2F0", "2B0", "2F1", "0B0", "2B1", "0B1"],
        ["1F0", "3F0", "3B0", "(1F1;1B0)OVERLAP_F_B", "3F1", "3B1", "1B1"],
    ]
    table = pj.ScheduleTable.from_rows(rows)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.5)
    claimed = certified(table, costs, "queued")
    assert pj.verify(claimed).ok
    sent = claimed["proof"]["transfers"]
    first, second = sent["1SEND_F1 (worker 1 to 0)"], sent["1SEND_B0 (worker 1 to 0)"]
    assert first["arrives"] == second["leaves"]


def test_buffered_messages_and_transfers_of_one_pair_do_not_wait_for_each_other():
    """2SEND_B0 is buffered; 1SEND_B0 meets its receiver in the queue of the pair."""
    rows = [
        ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"],
        ["0F0", "0SEND_F0", "2RECV_F0", "2F0", "2B0", "2SEND_B0", "0RECV_B0", "0B0"],
    ]
    table = pj.ScheduleTable.from_rows(rows)
    transmit = np.array([[[1.0, 2.0]], [[1.5, 0.0625]]])
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=transmit)
    for queues in ("worker", "pair", "direction"):
        links = pj.Links("rendezvous", queues=queues, eager_below=0.125)
        verdict = pj.verify(certified(table, costs, links))
        assert (verdict.problems, verdict.makespan) == ((), 13.5625)


@settings(max_examples=30)
@given(data=st.data())
def test_bounds_are_those_of_the_search(data):
    name = data.draw(st.sampled_from(["1f1b", "chimera", "interleaved-1f1b", "hanayo"]))
    table = pj.schedules.build(name, num_workers=2, num_microbatches=4)
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
    of_one = np.array(
        [max(sizes[pipe == worker].sum() for pipe in table.placement) for worker in range(2)]
    )
    limits = of_one * data.draw(st.sampled_from([1, 1.5, 2, 100]))
    problem = pose(table, costs, limits, sizes, share, link=links, **asked)
    theirs = lower_bound(problem)
    plan = greedy_plan(problem, problem.limits)
    assert plan is None or theirs.value <= objective_of(problem, plan)
    run = pj.evaluate(table, costs, link=links)
    memory = pj.analysis.activation_memory(run, sizes=sizes, weight_share=share)
    claimed = pj.certificate(run, memory=memory, limits=limits, **asked)
    found = derived_bounds(read_run(claimed))
    assert found["stage"] <= found.get("memory chain", math.inf)
    assert area_bound(problem) * problem.unit <= found["memory area"] * (1 + 1e-9)
    best = max(found[kind] for kind in found if kind != "path")
    assert theirs.value * problem.unit <= best * (1 + 1e-9)
    near = 2 * problem.unit  # the search counts whole units
    assert faster or best == pytest.approx(theirs.value * problem.unit, abs=near)


def test_signs_of_determinants_are_exact():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 4, 5) * 40:
        matrix = rng.integers(-2, 3, (size, size))
        assert _sign(matrix.tolist()) == round(np.sign(round(np.linalg.det(matrix))))


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_a_long_pipe_are_those_of_the_search(seed):
    """Gradients of a stage wait for each other where the way back takes longer than a forward."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=9)
    rng = np.random.default_rng(seed)
    times = {
        name: rng.integers(1, most, 4) * 1.0
        for name, most in (("forward", 4), ("input_grad", 12), ("weight_grad", 3))
    }
    costs = pj.Costs(**times, backward=times["input_grad"] + times["weight_grad"])
    limits = rng.choice([1.0, 2.0, 3.0, 4.0], 4)
    share = rng.choice([0.0, 0.5, 1.0])
    problem = pose(table, costs, limits, 1.0, share)
    run = pj.evaluate(table, costs)
    memory = pj.analysis.activation_memory(run, sizes=np.ones(4), weight_share=share)
    claimed = pj.certificate(run, memory=memory, limits=limits)
    derived = derived_bounds(read_run(claimed))["memory chain"]
    assert derived == pytest.approx(max(stage_bounds(problem)) * problem.unit)


def test_memory_area_of_times_that_are_no_multiples_is_not_rounded_up():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
    equal = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
    # the loads are no whole multiples of anything; nothing is gained by such slow offloads
    costs = pj.Costs.uniform(table, **equal, offload=20.0, load=3**0.5)
    problem = pose(table, costs, 3.0, offload=True)
    run = pj.evaluate(table, costs)
    claimed = pj.certificate(run, limits=[3.0] * 4, offload=True)
    derived = derived_bounds(read_run(claimed))["memory area"]
    assert derived == pytest.approx((16 * 8 + 15 + 6) / 3 + 1, rel=1e-8)  # x 1000 no whole units
    assert derived - problem.unit <= area_bound(problem) * problem.unit <= derived


@pytest.fixture(scope="module")
def claimed():
    """The certificate of a run with all that one can claim."""
    table = pj.schedules.build("zb-h1", num_workers=3, num_microbatches=4)
    costs = pj.Costs(
        forward=1.0, input_grad=1.5, weight_grad=0.5, latency=0.25, transmit=1.0, all_reduce=2.0
    )
    bounds = {"worker": 12.0, "stage": 12.0, "memory chain": 12.0, "solver": 12.0, "path": 12.0}
    return certified(table, costs, "queued", limits=[3.0, 2.5, 2.0], lower_bounds=bounds)


def test_it_says_which_bounds_it_could_check(claimed):
    verdict = pj.verify(claimed)
    assert verdict.problems == ()
    assert {bound.by for bound in verdict.bounds if not bound.checked} == {"solver"}


F10 = "1F0 (worker 1, slot 1)"


def claims(change):
    """A mutation of what is claimed."""
    return lambda certificate: change(certificate["claim"])


def proof(change):
    """A mutation of what proves it."""
    return lambda certificate: change(certificate["proof"])


def rename(section, old, new):
    """Claim one op or transfer in another place."""
    section[new] = section.pop(old)


def swap(rows):
    """Exchange two forwards of the first row."""
    row = rows[0]
    first, second = row.index("0F1"), row.index("0F2")
    row[first], row[second] = row[second], row[first]


def raise_bound(by):
    def change(claims):
        next(bound for bound in claims["lower_bounds"] if bound["by"] == by)["value"] = 1e3

    return claims(change)


MUTATIONS = {
    "a start": (
        proof(lambda c: c["ops"][F10].update(start=1.0)),
        rf"ops: {F10}: start: claimed 1.0, derived 2.25, behind 0SEND_F0 \(worker 0 to 1\)",
    ),
    "an end": (
        proof(lambda c: c["ops"][F10].update(end=9.0)),
        rf"ops: {F10}: end: claimed 9.0, derived 3.25",
    ),
    "no number": (
        proof(lambda c: c["ops"][F10].update(end=None)),
        rf"ops: {F10}: end: claimed nothing",
    ),
    "not a number": (
        proof(lambda c: c["ops"][F10].update(end=float("nan"))),
        rf"ops: {F10}: end: claimed nan",
    ),
    "worker of an op": (
        proof(lambda c: rename(c["ops"], F10, "1F0 (worker 0, slot 1)")),
        rf"ops: {F10}: claimed nothing, derived \{{.*ops: 1F0 \(worker 0, slot 1\): claimed \{{.*\}}, derived nothing",
    ),
    "a missing op": (proof(lambda c: c["ops"].pop(F10)), rf"ops: {F10}: claimed nothing"),
    "the makespan": (
        claims(lambda c: c.update(makespan=c["makespan"] * (1 + 1e-6))),
        "makespan: claimed",
    ),
    "busy": (
        claims(lambda c: c["busy"].update({"worker 2": 11.0})),
        "busy: worker 2: claimed 11.0, derived 12.0",
    ),
    "a span": (claims(lambda c: c.update(max_span=1.0)), "max_span: claimed 1.0"),
    "a peak": (
        claims(lambda c: c["peak_in_flight"].update({"worker 0": 2})),
        "peak_in_flight: worker 0: claimed 2, derived 3",
    ),
    "an activation too many": (
        proof(lambda c: c["held"]["worker 0"].__setitem__(0, 2.0)),
        r"held: worker 0\[0\]: claimed 2.0, derived 1.0",
    ),
    "a moment": (
        proof(lambda c: c["held_from"]["worker 0"].pop()),
        "held_from: worker 0: claimed",
    ),
    "peak memory": (
        claims(lambda c: c["peak_memory"].update({"worker 1": 0.0})),
        "peak_memory: worker 1: claimed 0.0",
    ),
    "offloads": (claims(lambda c: c.update(offloaded=1)), "offloaded: claimed 1, derived 0"),
    "messages that overlap": (
        proof(lambda c: c["transfers"]["0SEND_F1 (worker 0 to 1)"].update(leaves=1.5)),
        r"transfers: 0SEND_F1 \(worker 0 to 1\): leaves: claimed 1.5, derived 2.0, behind",
    ),
    "arrival": (
        proof(lambda c: c["transfers"]["0SEND_F1 (worker 0 to 1)"].update(arrives=0.0)),
        r"0SEND_F1 \(worker 0 to 1\): arrives: claimed 0.0",
    ),
    "a bound of paths": (raise_bound("stage"), "lower bound by stage: claimed 1000.0, derived"),
    "a bound of memory": (
        raise_bound("memory chain"),
        "lower bound by memory chain: claimed 1000.0, derived",
    ),
    "a bound of work": (raise_bound("worker"), "lower bound by worker: claimed 1000.0, derived"),
    "a bound of the run": (raise_bound("path"), "lower bound by path: claimed 1000.0, derived"),
    "a bound on trust": (
        raise_bound("solver"),
        "lower bound by solver: claimed 1000.0, derived .*, which was reached",
    ),
    "a cost": (
        lambda c: c["costs"]["seconds"]["F"].__setitem__(0, 1.25),
        r"ops: 0F0 \(worker 0, slot 0\): end: claimed 1.0, derived 1.25",
    ),
    "a message cost": (
        lambda c: c["costs"]["seconds"]["latency"][0][0].__setitem__(0, 0.5),
        r"0SEND_F0 .*arrives: claimed 2.25, derived 2.5",
    ),
    "the link model": (
        lambda c: c["costs"]["links"].update(model="blocking"),
        "ops: .*start: claimed",
    ),
    "a limit": (
        lambda c: c["claim"]["limits"].__setitem__(0, 2.9),
        "limit: worker 0: claimed 2.9, derived 3.0",
    ),
    "a size": (
        lambda c: c["costs"]["memory"]["sizes"].__setitem__(0, 2.0),
        r"peak_memory: worker 0: claimed 3.0, derived 6.0",
    ),
    "an order": (lambda c: swap(c["table"]["rows"]), r"ops: 0F1 .*claimed \{.*, derived nothing"),
    "a row": (
        lambda c: c["table"]["rows"][1].remove("1F0"),
        "table: claimed legal, derived missing op 1F0",
    ),
    "a deadlock": (
        lambda c: c["table"]["rows"][0].reverse(),
        "table: claimed legal, derived deadlock",
    ),
}


@pytest.fixture
def changed(claimed, request):
    """The certificate after one change, and what must be said about it."""
    mutate, message = request.param
    certificate = copy.deepcopy(claimed)
    mutate(certificate)
    return certificate, message


def after_each(changes):
    """Run a test after each change of a table."""
    return pytest.mark.parametrize("changed", changes.values(), ids=changes, indirect=True)


@after_each(MUTATIONS)
def test_what_is_changed_is_named(changed):
    certificate, message = changed
    verdict = pj.verify(certificate)
    assert not verdict.ok
    assert re.search(
        message.replace("(worker 1, slot 1)", r"\(worker 1, slot 1\)"),
        " ".join(map(str, verdict.problems)),
    )


FORMS = {
    "another version": (lambda c: c.update(version=3), "is not a certificate: expected .* and 3"),
    "another kind": (lambda c: c.update(kind="proof"), "expected .*, got 'proof' and 2"),
    "no kind": (lambda c: c.update(kind=[]), "is not a certificate"),
    "a truth for a version": (lambda c: c.update(version=True), "is not a certificate"),
    "a missing key": (lambda c: c["proof"].pop("held"), "proof must have the keys .*held"),
    "an unknown key": (lambda c: c.update(more=1), "must have the keys .*'more'"),
    "a missing cost": (lambda c: c["costs"]["seconds"].pop("W"), "seconds must have the keys .*W"),
    "a negative cost": (
        lambda c: c["costs"]["seconds"]["F"].__setitem__(0, -1),
        "seconds: F must be a number of at least 0, got -1",
    ),
    "too few costs": (lambda c: c["costs"]["seconds"]["F"].pop(), "seconds: F must be 3 numbers"),
    "an unknown link": (
        lambda c: c["costs"]["links"].update(model="wire"),
        "unknown link model 'wire'",
    ),
    "no table": (lambda c: c.update(table=[]), "table must have the keys"),
    "half a table": (lambda c: c["table"].pop("rows"), "missing key 'rows' in the table"),
    "no objective": (lambda c: c["claim"].update(objective="speed"), "objective must be one of"),
    "a bound of no number": (
        lambda c: c["claim"]["lower_bounds"][0].update(value="1"),
        "a lower bound must be a number",
    ),
    "no bounds": (
        lambda c: c["claim"].update(lower_bounds=None),
        "a lower bound must have the keys",
    ),
}


@pytest.mark.parametrize("kind", ["run", "formula"])
def test_a_certificate_of_the_first_version_is_read(kind):
    path = Path(__file__).parent / "data" / "certificates_1" / f"{kind}.json"
    assert pj.verify(path).problems == ()
    data = json.loads(path.read_text())
    changed = copy.deepcopy(data)
    changed["links"]["model"] = "blocking"
    assert not pj.verify(changed).ok
    for change in ({"version": 2}, {"version": True}, {"more": 1}, {"links": []}):
        with pytest.raises(ValueError, match=r"certificate|must have the keys"):
            pj.verify(data | change)
    if kind == "run":
        with pytest.raises(ValueError, match="claims must have the keys"):
            pj.verify(data | {"claims": []})


@after_each(FORMS)
def test_what_is_no_certificate_is_refused(changed):
    certificate, message = changed
    with pytest.raises(ValueError, match=message):
        pj.verify(certificate)


def test_a_deadlock_of_transfers_is_named():
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    table = pj.ScheduleTable.from_rows(rows)
    claimed = certified(table, pj.Costs(forward=1.0, backward=1.0), "queued")
    claimed["costs"]["links"]["model"] = "rendezvous"
    (problem,) = pj.verify(claimed).problems
    cycle = r"deadlock: .*0SEND_F1 \(worker 0 to 1\) waits for 1SEND_B0 \(worker 1 to 0\)"
    assert re.search(cycle, str(problem))
    with pytest.raises(pj.ScheduleError, match="deadlock"):
        pj.lower(table, link="rendezvous")


ONE = ("--schedule", "1f1b", "--workers", 3, "--microbatches", 4)
TIMES = ("--stage-times", "F=1,B=2", "--comm", 0.5)
SPLIT = ("--stage-times", "F=1,I=1,W=1")


@pytest.fixture
def written(answer, tmp_path):
    """A certificate that `evaluate` wrote."""
    path = tmp_path / "claims.json"
    said = answer("evaluate", *ONE, *TIMES, "--link", "queued", "--certificate", path)
    assert said["certificate"] == str(path)
    return path


def test_the_command_accepts_what_evaluate_wrote(written, answer, call):
    said = answer("verify", written)
    run = answer("evaluate", *ONE, *TIMES, "--link", "queued")
    wanted = {"makespan": run["makespan"], "unit": "seconds", "ok": True}
    assert said == wanted | {"problems": [], "bounds": []}
    code, out, _ = call("verify", written)
    assert (code, "hold" in out, "22 s" in out) == (0, True, True)
    assert "certificate" not in run


def test_the_command_names_what_does_not_hold(written, call):
    changed = json.loads(written.read_text())
    changed["costs"]["seconds"]["F"][0] = 1.25
    written.write_text(json.dumps(changed))
    code, out, err = call("verify", written, "--json")
    said = json.loads(out)
    assert (code, err, said["ok"]) == (1, "", False)
    assert said["problems"][0].startswith("makespan: claimed 22")
    code, out, _ = call("verify", written)
    assert code == 1
    assert f"and {len(said['problems']) - 10} more" in out


def test_the_command_takes_a_table_with_costs(answer, mistake, tmp_path):
    path = tmp_path / "table.csv"
    answer("export", *ONE, "--format", "torch-csv", "--out", path)
    said = answer("verify", path, *TIMES, "--link", "rendezvous", "--activation-sizes", "2")
    run = answer("evaluate", "--table", path, *TIMES, "--link", "rendezvous")
    assert (said["ok"], said["makespan"]) == (True, run["makespan"])
    assert "times are missing" in mistake("verify", path)


def test_the_command_names_mistakes(written, mistake, tmp_path):
    assert "No such file" in mistake("verify", tmp_path / "none.json")
    assert "not a certificate" in mistake("verify", _saved(tmp_path, {"makespan": 1.0}))
    assert "not a table" in mistake("verify", written, *TIMES)
    assert "times are missing" in mistake("verify", written, "--link", "queued")
    again = mistake("evaluate", *ONE, *TIMES, "--certificate", written)
    assert "--certificate" in again
    assert "exists" in again


def _saved(folder, data):
    path = folder / "saved.json"
    path.write_text(json.dumps(data))
    return path


def test_optimize_certifies_its_plan(answer, tmp_path):
    path = tmp_path / "plan.json"
    limits = ("--memory-limit", 2, "--no-store", "--time-limit", 5)
    best = answer("optimize", *ONE, *SPLIT, *limits, "--certificate", path)
    said = answer("verify", path)
    assert (said["ok"], said["makespan"]) == (True, best["makespan"])
    (bound,) = said["bounds"]
    assert (bound["value"], bound["by"]) == (best["lower_bound"], best["bound_by"])


def test_a_solved_problem_is_in_units(answer, call, tmp_path):
    """The store counts in whole units, of half a second here."""
    best = answer(
        *("optimize", *ONE, "--stage-times", "F=0.5,B=1", "--memory-limit", 2),
        *("--time-limit", 5, "--store", tmp_path / "store"),
    )
    (path,) = (tmp_path / "store").glob("*.json")
    said = answer("verify", path)
    assert (said["unit"], said["makespan"]) == ("units", 2 * best["makespan"])
    _, out, _ = call("verify", path)
    assert f"makespan       {said['makespan']:g} units" in out
    assert f"lower bound    {said['makespan']:g} units by solver" in out


def test_a_result_that_does_not_hold_is_an_internal_error(call, monkeypatch):
    wrong = pj.verify.__globals__["Verdict"](None, (("plan",),))
    monkeypatch.setitem(vars(pj), "verify", lambda claimed: wrong)
    code, out, err = call("optimize", *ONE, *SPLIT, "--memory-limit", 2, "--no-store")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: internal error: 1 claims of the result do not hold")


def test_order_certifies_its_order(answer, tmp_path):
    path = tmp_path / "order.json"
    found = answer("tune", "messages", *ONE, *TIMES, "--iterations", 2, "--certificate", path)
    said = answer("verify", path)
    assert (said["ok"], said["makespan"]) == (True, found["value"])
    assert {bound["by"]: bound["checked"] for bound in said["bounds"]} == {
        "path": True,
        "queue": False,
    }


JUNK = [
    None,
    True,
    0,
    -1,
    1e308,
    float("nan"),
    10**400,
    "x",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    "pairs",
]


def places(data, path=()):
    """Every place in JSON, as the keys that lead there."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(data[key], (*path, key))


@pytest.mark.parametrize("seed", range(2))
def test_junk_anywhere_is_refused_with_words_or_found_out(claimed, seed):
    rng = np.random.default_rng(seed)
    by_part = {}
    for path in places(claimed):
        by_part.setdefault(path[:2], []).append(path)
    for paths in by_part.values():
        changed = copy.deepcopy(claimed)
        *way, last = paths[rng.integers(len(paths))]
        inner = changed
        for key in way:
            inner = inner[key]
        inner[last] = JUNK[rng.integers(len(JUNK))]
        try:
            verdict = pj.verify(changed)
        except ValueError:
            continue
        assert verdict.ok == (verdict.problems == ())
        assert all(map(str, verdict.problems))
