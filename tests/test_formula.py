"""Closed forms: exact on every registered schedule, proved, and rejected where they are wrong."""

import copy
import json
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from daily import daily, read_cases, with_cases
from legal_sizes import at_least, build, is_legal

import pipejax as pj
from pipejax.analysis.formula.facets import Cone
from pipejax.analysis.formula.parameters import default_parameters, named_parameters
from pipejax.analysis.formula.versus import regime_map
from pipejax.cli.app import run
from pipejax.engine.lowering.program import run_on_host
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.links import LINK_MODELS

ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "local-sgd")
SYNCHRONOUS = [name for name in REGISTRY if name not in ASYNCHRONOUS]
LINKS = list(LINK_MODELS)
# name, P, M -> the form, letter for letter: DESIGN section 7
PUBLISHED = {("chimera", 4, 4): "max(6F + 4B + 4c_F + 3c_B, 4F + 6B + 3c_F + 4c_B)"}
PUBLISHED["1f1b", 8, 32] = "39F + 39B + 34c_F + 34c_B"
EVERY = [(name, link) for name in SYNCHRONOUS for link in LINKS]
# of two workers already hundreds of facets
MANY_FACETS = ("dualpipe-v", "interleaved-zb", "v-half", "v-min", "zb-v")
ZB_V = "formula", "-s", "1f1b", "-P", 2, "-M", 4, "--per-worker", "--parameters", "F,B,c"


def lowered(name, p, m, link="delay", **options):
    table = build(name, p, m, **options)
    return table, pj.lower(table, link=link, step_end=False)


def points(form, count, seed=0):
    """Random parameters over many orders of magnitude, a third of them 0: borders too."""
    rng = np.random.default_rng(seed)
    theta = 10 ** rng.uniform(-3, 3, (count, len(form.parameters)))
    theta[rng.random(theta.shape) < 1 / 3] = 0.0
    whole = slice(None, len(form.borders) + 1, 2)
    theta[whole] = rng.integers(0, 4, theta[whole].shape)
    return theta


def runs(form, theta):
    """Makespans by the recurrence, one by one."""
    vectors = theta @ (form.costs.weights / form.units).astype(float).T
    return np.array([run_on_host(form.program, vector).finish.max() for vector in vectors])


@pytest.mark.parametrize(("name", "link"), daily(EVERY))
def test_it_is_the_recurrence_on_every_small_schedule(name, link):
    p = 2 if name in MANY_FACETS else 3 if is_legal(name, 3, 6) else 4
    check_form(name, p, at_least(name, p, 4), link)


# of several seconds each
@pytest.mark.parametrize(("name", "link"), daily(EVERY, total=24))
def test_it_is_the_recurrence_on_every_schedule(name, link):
    check_form(name, 4, 8, link)


def check_form(name, p, m, link):
    table, program = lowered(name, p, m, link)
    form = pj.formula(program)
    theta = points(form, 60)
    length, value = runs(form, theta), form(theta)
    assert (value <= length * (1 + 1e-12)).all()
    assert (length * (1 - form.gap) <= value * (1 + 1e-12)).all()
    assert form.exact == (form.gap == 0)
    assert form.exact or len(form.facets) == 200
    assert form.gap < (0.02 if (name, link) == ("zb-v", "rendezvous") else 0.01)
    verdict = pj.verify(json.loads(json.dumps(form.certificate(table))))
    assert verdict.ok, verdict.problems[:3]


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_forms_letter_for_letter(case):
    assert pj.formula(lowered(*case)[1]).text == PUBLISHED[case]


def mutants(claimed):
    """Certificates with a facet less, or one count more or less."""
    for k, facet in enumerate(claimed["claim"]["facets"]):
        less = copy.deepcopy(claimed)
        proof = less["proof"]
        del less["claim"]["facets"][k], proof["points"][k]
        cells = [cell for cell in proof["cells"] if cell[0] != k]
        proof["cells"] = [[facet - (facet > k), *rays] for facet, *rays in cells]
        yield less
        for j, count in enumerate(facet):
            for step in (-1, 1):
                if count + step >= 0:
                    changed = copy.deepcopy(claimed)
                    changed["claim"]["facets"][k][j] += step
                    yield changed


def accepted(claimed):
    try:
        return pj.verify(claimed).ok
    except ValueError:
        return False


@with_cases("name p m link", ("chimera", 4, 6, "delay"), ("zb-h1", 3, 5, "queued"))
def test_a_wrong_form_is_rejected(name, p, m, link):
    table, program = lowered(name, p, m, link)
    claimed = json.loads(json.dumps(pj.formula(program).certificate(table)))
    assert accepted(claimed)
    assert not any(map(accepted, mutants(claimed)))


@with_cases(
    "name links",
    ("1f1b", pj.Links("rendezvous", posting="program")),
    ("1f1b", pj.Links("rendezvous", "direction")),
    ("chimera", pj.Links("queued", shared_links="pairs")),
    ("pipedream", pj.Links()),
)
def test_other_links_and_tables_are_proved_too(name, links):
    table, program = lowered(name, 4, 4, links)
    assert accepted(json.loads(json.dumps(pj.formula(program).certificate(table))))


@with_cases("name options", *read_cases("test_a_saved_form_is_the_same"))
def test_a_saved_form_is_the_same(name, options, tmp_path):
    table = build(name, 4, 8)
    form = pj.formula(pj.lower(table, step_end="parameters" in options), **options)
    path = tmp_path / "form.json"
    path.write_text(json.dumps(form.as_json() | {"certificate": form.certificate(table)}))
    assert pj.verify(path).ok
    again = pj.files.read_formula(path)
    assert str(again) == str(form)
    assert (again.borders, again.bound_by) == (form.borders, form.bound_by)
    assert again.as_json() == form.as_json()
    assert again.certificate(table) == form.certificate(table)


def test_a_gap_is_certified():
    table, program = lowered("hanayo", 4, 8)
    form = pj.formula(program, max_facets=6)
    assert not form.exact
    assert 0 < form.gap < 0.2
    theta = points(form, 200)
    theta = theta[form(theta) > 0]
    missing = 1 - form(theta) / runs(form, theta)  # as of a search: 1 - bound / value
    assert 0 < missing.max() <= form.gap + 1e-12
    claimed = form.certificate(table)
    assert accepted(claimed)
    part, whole = claimed["claim"]["gap"]
    claimed["claim"]["gap"] = [part * 99, whole * 100]
    assert not accepted(claimed)


def test_a_box_leaves_out_what_is_beyond_it():
    table, program = lowered("chimera", 4, 8)
    whole = pj.formula(program)
    form = pj.formula(program, box={"F": (1, 1.5), "B": (2, 3), "c_F": (0, 0.1), "c_B": (0, 0.1)})
    assert set(form.facets) < set(whole.facets)
    assert accepted(json.loads(json.dumps(form.certificate(table))))
    inside = np.random.default_rng(0).uniform([1, 2, 0, 0], [1.5, 3, 0.1, 0.1], (100, 4))
    np.testing.assert_allclose(form(inside), whole(inside), rtol=1e-14)
    with pytest.raises(ValueError, match=r"F must be from 1 to 1\.5 s, got 2\.0"):
        form(F=2.0, B=2.0, c_F=0.0, c_B=0.0)


@pytest.mark.parametrize("fixed", ["F", "B", "c"])
def test_a_box_may_fix_a_parameter(fixed):
    """Ranges are then in times of it; where weights are halves, as of two stages, too."""
    table, program = lowered("interleaved-zb", 2, 4)
    costs = named_parameters(program, ("F", "B", "c"), table.worker_parts)
    box = {"F": (1, 2), "B": (1, 3), "c": (0.1, 0.5), fixed: (0.3, 0.3)}
    whole, form = pj.formula(program, costs), pj.formula(program, costs, box=box)
    assert set(form.facets) <= set(whole.facets)
    assert accepted(json.loads(json.dumps(form.certificate(table))))
    inside = np.random.default_rng(0).uniform(*zip(*box.values(), strict=True), (100, 3))
    np.testing.assert_allclose(form(inside), whole(inside), rtol=1e-14)
    assert form.active(form.middles).tolist() == [*range(len(form.facets))]
    assert f"{fixed} = 0.3" in form.where
    assert str(form) == f"{form.text} for {form.where}"


def test_the_middle_of_a_regime_does_not_depend_on_parts_of_units():
    """Two stages on a worker halve its times; the same sums are bound by the same."""
    table, program = lowered("interleaved-1f1b", 2, 4)
    costs = named_parameters(program, ("F", "B", "c"), table.worker_parts)
    form = pj.formula(program, costs)
    assert form.units.tolist() == [2, 2, 1]
    np.testing.assert_allclose(form.middles.sum(axis=1), 1.0)
    assert form.where == ""


def test_any_weights():
    """Costs per worker, stages of their own, latency beside transmit time; pairs and offloads."""
    table, program = lowered("interleaved-1f1b", 4, 8, stages_per_worker=3)
    shares = {
        "F": pj.Costs.per_worker(table, forward=1.0, backward=0.0),
        "B": pj.Costs.per_worker(table, forward=0.0, backward=1.0),
        "c": pj.Costs(forward=0.0, backward=0.0, transmit=1.0),
    }
    form = pj.formula(program, shares)
    names = default_parameters(program)[:2]
    named = named_parameters(program, (*names, "c"), table.worker_parts)
    assert pj.formula(program, named).facets == form.facets
    costs = pj.Costs.per_worker(table, forward=1.0, backward=2.0, transfer=0.25)
    makespan = float(pj.makespan(program, costs))
    assert form(F=1.0, B=2.0, c=0.25) == pytest.approx(makespan, rel=1e-14)
    table, program = lowered("1f1b", 4, 8, "queued")
    names = ("F_first", "F_mid", "F_last", "B", "latency", "transmit_F", "transmit_B")
    form = pj.formula(program, names)
    theta = points(form, 60)
    assert form.exact
    np.testing.assert_allclose(form(theta), runs(form, theta), rtol=1e-12)
    assert accepted(form.certificate(table))


def test_a_microbatch_of_its_own():
    """The form says how long one microbatch may be before it decides the step."""
    table, program = lowered("1f1b", 4, 8, "queued")
    longer = np.zeros((4, 8))
    longer[:, 3] = 1.0
    costs = {
        "op": pj.Costs(forward=1.0, backward=2.0),
        "more": pj.Costs(forward=longer, backward=2 * longer),
        "c": pj.Costs(transmit=1.0),
    }
    form = pj.formula(program, costs)
    assert form(op=1.0, more=0.0, c=0.5) == pj.formula(program)(F=1.0, B=2.0, c_F=0.5, c_B=0.5)
    theta = points(form, 60)
    np.testing.assert_allclose(form(theta), runs(form, theta), rtol=1e-12)
    assert accepted(json.loads(json.dumps(form.certificate(table))))


@pytest.mark.parametrize("p", [1, 2])
def test_few_parameters(p):
    table, program = lowered("gpipe", p, 3)
    step = {"step": pj.Costs(forward=1.0, backward=2.0, transmit=0.5)}
    for parameters, facets in ((None, None), (step, [(3 * (p + 2) + (p - 1),)])):
        form = pj.formula(program, parameters)
        assert facets is None or form.facets == facets
        assert accepted(json.loads(json.dumps(form.certificate(table))))


def test_a_backward_takes_what_its_halves_take():
    table, program = lowered("1f1b", 2, 4)
    form = pj.formula(program, ("F", "I", "W"))
    costs = pj.Costs(forward=1.0, input_grad=2.0, weight_grad=3.5)
    assert form(F=1.0, I=2.0, W=3.5) == pj.evaluate(table, costs).makespan == 32.5


def test_jax_takes_it():
    form = pj.formula(lowered("chimera", 4, 4)[1])

    def evaluate_form(backward):
        return form(F=1.0, B=backward, c_F=0.0, c_B=0.0)

    assert evaluate_form(2.0) == jax.jit(evaluate_form)(2.0) == 16.0
    # the first wins
    assert [float(jax.grad(evaluate_form)(b)) for b in (0.5, 1.0, 2.0)] == [4.0, 4.0, 6.0]
    assert jax.vmap(evaluate_form)(np.array([0.5, 1.0, 2.0])).tolist() == [8.0, 10.0, 16.0]
    theta = np.random.default_rng(0).random((500_000, 4)).astype(np.float32)  # compiled for so many
    many = form(theta)
    assert many.dtype == np.float32
    assert many.shape == (500_000,)
    np.testing.assert_allclose(many[:50], form(theta[:50].astype(float)), rtol=1e-6)


def test_numbers_of_any_size_stay_exact():
    """Rays of cones grow; beyond 64 bits whole numbers are Python's."""
    cone = Cone.orthant(3)
    for normal in ([-(10**9), 3, 10**9 + 7], [10**9 + 9, -(10**9), 1], [1, -(10**9 + 21), 10**9]):
        cone = cone.cut(np.array(normal))
    assert cone.rays.dtype == object or np.abs(cone.rays).max() < 2**62
    slack = cone.rays.astype(object) @ cone.inequalities.astype(object).T
    assert (slack >= 0).all()
    assert ((slack == 0) == cone.tight).all()
    assert (cone.tight.sum(axis=1) >= 2).all()


def test_what_takes_no_time_has_a_form_too():
    table, program = lowered("1f1b", 2, 2)
    free = pj.Costs(forward=0.0, backward=0.0)
    unread = pj.Costs(forward=0.0, backward=0.0, recompute=1.0)
    form = pj.formula(program, {"free": free, "unread": unread})
    assert (str(form), form.facets, form.exact) == ("0", [(0, 0)], True)
    assert form(free=2.0, unread=3.0) == 0.0
    assert jax.grad(lambda x: form(free=x, unread=x))(1.0) == 0.0
    assert pj.verify(form.certificate(table)).ok


def test_the_command(answer, tmp_path):
    path, options = tmp_path / "form.json", ("-s", "chimera", "-P", 4, "-M", 4)
    report = answer("formula", *options, "--out", path)
    assert report["text"] == PUBLISHED["chimera", 4, 4]
    assert report["facets"] == [[6, 4, 4, 3], [4, 6, 3, 4]]
    assert answer("verify", path)["problems"] == []


# families of closed forms, and schedules against each other
def make_program(name, p, m, **options):
    return pj.lower(build(name, p, m, **options), step_end=False)


def family(name, p, numbers, later, parameters=("F", "B", "c")):
    def build_number(m):
        return make_program(name, p, m)

    return pj.analysis.formula_family(build_number, numbers, parameters, verify_on=later)


# DESIGN section 7: (M + P - 1) T + [2 (P - 1)(M / P + 1) - 2] c, and 2 (P - 1) c
FORMS = {
    ("1f1b", 2): "(M + 1)F + (M + 1)B + Mc for M >= 2, M mod 2 = 0",
    ("1f1b", 4): "(M + 3)F + (M + 3)B + (3/2 M + 4)c for M >= 4, M mod 4 = 0",
    ("1f1b", 8): "(M + 7)F + (M + 7)B + (7/4 M + 12)c for M >= 8, M mod 8 = 0",
    ("gpipe", 4): "(M + 3)F + (M + 3)B + 6c for M >= 4, M mod 4 = 0",
}


@pytest.mark.parametrize("case", FORMS)
def test_families_of_published_forms(case):
    name, p = case
    assert str(family(name, p, range(p, 7 * p, p), [9 * p])) == FORMS[case]


def test_every_residue_has_its_form():
    result = family("eager-1f1b", 4, range(1, 33), [35, 40])
    assert (result.period, result.first) == (7, 1)
    for m in (2, 35, 53):
        form = pj.formula(make_program("eager-1f1b", 4, m), ("F", "B", "c"))
        assert [*map(tuple, result.facets(m))] == form.facets


def test_zb_h1_has_the_published_facet():
    """DESIGN section 7: M T + (P - 1)(F + I - W) + 4 (P - 1) c is where c is small."""
    result = family("zb-h1", 4, range(4, 40, 4), [52], ("F", "I", "W", "c"))
    for m in (12, 48):
        assert (m + 3, m + 3, m - 3, 12) in result.facets(m)
        costs = pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0, transmit=0.01)
        value = float(pj.makespan(make_program("zb-h1", 4, m), costs))
        assert result(m)(F=1.0, I=1.0, W=1.0, c=0.01) == pytest.approx(value, rel=1e-12)


def test_workers_may_be_the_number():
    how = {"verify_on": [11], "symbol": "P", "degree": 2}

    def program(p):
        return make_program("1f1b", p, 2 * p)

    result = pj.analysis.formula_family(program, range(2, 9), ("F", "B", "c"), **how)
    assert str(result) == "(3P - 1)F + (3P - 1)B + (6P - 8)c for P >= 2"


def test_a_period_that_multiples_of_p_do_not_show_is_found(capsys):
    """Eager 1F1B repeats itself after 2P - 1 microbatches."""
    size = ["--workers", "2", "--microbatches", "4", "--family", "M"]
    assert run(["formula", "--schedule", "eager-1f1b", *size, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["family"]
    assert (result["period"], result["found_on"][:3]) == (3, [1, 2, 3])


def get_forms(names, p, m, parameters=("F", "B", "c"), **options):
    result = []
    for name in names:
        table = build(name, p, m)
        program = pj.lower(table, step_end=False)
        shares = named_parameters(program, parameters, table.worker_parts)
        result.append(pj.formula(program, shares, **options))
    return result


def within(regions, theta):
    """Return whether each point lies in one of some regions."""
    inside = np.zeros(len(theta), bool)
    for region in regions:
        counts = np.array(region.counts, float).reshape(-1, theta.shape[1])
        inside |= (theta @ counts.T >= -1e-9).all(axis=1)
    return inside


@with_cases("names p m box", *read_cases("test_regions_are_where_each_is_faster"))
def test_regions_are_where_each_is_faster(names, p, m, box):
    first, second = get_forms(names, p, m, box=box)
    result = pj.analysis.versus(first, second)
    low, high = (1, 2) if box else (0, 4)
    theta = np.random.default_rng(0).uniform(low, high, (500, 3))
    ours, theirs = first(theta), second(theta)
    sure = abs(ours / theirs - 1) > 1e-6
    assert (within(result.one_at_most, theta) == (ours <= theirs))[sure].all()
    assert (within(result.other_at_most, theta) == (ours >= theirs))[sure].all()
    assert (ours / theirs).max() <= result.one_slower[1] * (1 + 1e-12)
    assert (theirs / ours).max() <= result.other_slower[1] * (1 + 1e-12)
    at, ratio = result.one_slower  # in the box, where the form takes it
    assert first(**at) / second(**at) == pytest.approx(ratio, rel=1e-12)


def test_a_verdict_is_a_proof_or_an_example():
    assert pj.analysis.versus(*get_forms(("1f1b", "1f1b"), 4, 8)).verdict == "equal"
    result = pj.analysis.versus(*get_forms(("gpipe", "1f1b"), 8, 16))
    assert result.verdict == "one is never slower"
    assert result.one_at_most[0].texts == ()
    result = pj.analysis.versus(*get_forms(("chimera", "1f1b"), 8, 32))
    assert result.verdict == "it depends"
    assert [r.texts for r in result.one_at_most] == [("8B + 9c >= 4F", "26F + 13c >= 17B")]


def test_a_map_of_regimes_is_the_fastest_at_each_point():
    names = "1f1b", "chimera", "zb-h1"
    forms = dict(zip(names, get_forms(names, 4, 8), strict=True))
    result = regime_map(forms)
    draw = np.random.default_rng(0)
    for j, k in draw.integers(0, len(result.y_values), (50, 2)).tolist():
        point = {"F": 1.0, "B": result.x_values[k], "c": result.y_values[j]}
        times = {n: form(**point) for n, form in forms.items()}
        fastest = result.names[result.codes[j, k]].split(" = ")
        assert [n for n in names if times[n] <= min(times.values()) * (1 + 1e-9)] == fastest
    assert sum(result.shares.values()) == pytest.approx(1)
    assert list(result.shares.values()) == sorted(result.shares.values(), reverse=True)
    alike = regime_map(dict(zip(("a", "b"), get_forms(("1f1b", "1f1b"), 4, 8), strict=True)))
    assert alike.shares == {"a = b": 1.0}


def test_a_map_has_three_parameters_and_the_first_is_one():
    with pytest.raises(ValueError, match="parameters of a map must be three, as F,B,c, got F, B"):
        regime_map({"1f1b": get_forms(("1f1b",), 4, 8, ("F", "B"))[0]})
    with pytest.raises(ValueError, match="box F must hold 1"):
        regime_map({"1f1b": get_forms(("1f1b",), 4, 8, box={"F": (2, 3)})[0]})
    boxed = regime_map({"1f1b": get_forms(("1f1b",), 4, 8, box={"F": (1, 2), "c": (1, 3)})[0]})
    assert 1 < boxed.y_values.min() < boxed.y_values.max() < 3


def test_the_command_draws_who_is_fastest_of_several(call, answer, tmp_path):
    size = "formula", "-s", "1f1b", "-P", 4, "-M", 8, "--per-worker"
    plot = tmp_path / "map.svg"
    result = answer(*size, "--versus", "chimera,zb-h1", "--figure", plot)
    assert [pair["schedules"][1] for pair in result["versus"]] == ["chimera", "zb-h1"]
    assert result["map"]["parameters"] == ["F", "B", "c"]
    assert set(result["map"]["shares"]) >= {"chimera", "zb-h1"}
    for text in ("B / F", "c / F", "chimera", "zb-h1"):
        assert text in plot.read_text()
    _, out, _ = call(*size[:-1], "--versus", "gpipe,interleaved-1f1b")
    assert "gpipe is never slower" in out
    assert "stages per worker differ: with --per-worker all do the same work" in out


def test_a_family_is_found_on_numbers_that_are_given(answer):
    size = "formula", "-s", "1f1b", "-P", 4, "--family"
    result = answer(*size, "M=8:40:8")["family"]
    assert (result["found_on"], result["verified_on"]) == ([8, 16, 24, 32], [40])
    assert answer(*size, "M=8,16,24,32,64")["family"]["verified_on"] == [64]


def test_an_order_that_was_planned_is_told_with_its_times(call, answer, tmp_path):
    plot = tmp_path / "map.svg"
    box = "--box", "B=1:2,c=0:0.5"
    result = answer(*ZB_V, *box, "--versus", "zb-v,gpipe", "--figure", plot)
    assert result["planned_for"] == {"zb-v": {"F": 1.0, "I": 1.0, "W": 1.0, "c": 0.0}}
    assert "zb-v planned for F=I=W=1, c=0" in plot.read_text()
    _, out, _ = call(*ZB_V, *box, "--versus", "zb-v")
    order = "zb-v: the order was planned for F=I=W=1, c=0 (--slots, --planned-comm); evaluate"
    assert order in out
    assert "1f1b against zb-v as planned for F=I=W=1, c=0: zb-v as planned is never slower" in out
    assert "slower than zb-v as planned, at F=1, B=2" in out
    _, out, _ = call("formula", "-s", "zb-v", *ZB_V[3:], *box, "--slots", "F=1,B=3")
    assert "planned for F=1, I=1.5, W=1.5, c=0" in out
    planned = answer("formula", "-s", "zb-1p", *ZB_V[3:7], "--planned-comm", 0.5)
    assert planned["planned_for"]["zb-1p"]["c"] == 0.5
    line = "formula", "-s", "ada-offload", "-P", 2, "-M", 3, "--planned-offload", "1,2"
    offloads = answer(*line, "--max-facets", 20)
    assert offloads["planned_for"]["ada-offload"]["O"] == [1.0, 2.0]
    assert answer("formula", "-s", "1f1b", "-P", 2, "-M", 2)["planned_for"] == {}


def test_verdicts_and_picture_are_of_one_box(call, answer, tmp_path):
    """Without a range the first parameter is 1, in times of which the others are."""
    plot, versus = tmp_path / "map.svg", ("--versus", "zb-h1")
    result = answer(*ZB_V, *versus, "--box", "B=1:3,c=0:0.5", "--figure", plot)
    assert result["map"]["box"] == {"F": [1, 1], "B": [1, 3], "c": [0, 0.5]} == result["box"]
    at = result["versus"]["one_slower"]["at"]
    assert (at["F"], 1 <= at["B"] <= 3, 0 <= at["c"] <= 0.5) == (1, True, True)
    for box in ("F=1,B=1:3,c=0:0.5", "F=1:1,B=1:3,c=0:0.5"):
        again = answer(*ZB_V, *versus, "--box", box)
        assert again["versus"] == result["versus"]
    message = "F = 1, B from 1 to 3, c from 0 to 0.5"
    path = tmp_path / "form.json"
    _, out, _ = call(*ZB_V, *versus, "--box", "B=1:3,c=0:0.5", "--out", path)
    assert f"exact for {message}" in out
    assert f"is never slower, for {message}" in out
    assert f"exact for {message}" in call("verify", path)[1]
    assert answer("verify", path)["form"] == f"exact for {message}"
    assert answer(*ZB_V, "--box", "F=1ms:2ms,c=0:1ms")["box"]["F"] == [0.001, 0.002]
    assert "for F : B : c = 0 : 0.8 : 0.2\n" in call(*ZB_V, *versus)[1]
    text = call(*ZB_V, "--versus", "gpipe", "--box", "F=1,B=1:2")[1]
    assert "approached at many times F=" in text


def test_a_map_is_drawn_for_a_paper(answer, tmp_path):
    plot, versus = tmp_path / "map.svg", ("--versus", "gpipe,zb-v")
    paper = "--size", "5in", "--font", "monospace", "--font-size", 9, "--labels", "Mine,Theirs,V"
    result = answer(*ZB_V, *versus, "--figure", plot, *paper)
    text = plot.read_text()
    assert 'width="360pt"' in text
    assert "monospace" in text
    assert "V planned for F=I=W=1, c=0" in text
    assert {*result["map"]["shares"]} <= {"Mine", "Theirs", "V", "Mine = Theirs"}


def test_the_command_says_how_far_it_is_and_joins_regions(call, monkeypatch):
    waited = []

    @contextmanager
    def waiting(what):
        waited.append(what)
        yield

    monkeypatch.setattr("pipejax.cli.commands.formula.progress", waiting)
    command = "formula", "-s", "1f1b", "-P", 4, "-M", 8, "--parameters", "F,B,c"
    _, out, _ = call(*command, "--versus", "v-half,gpipe", "--per-worker")
    assert "looking for the closed form of v-half" in waited
    assert waited[-1] == "comparing"
    union = out[out.index("1f1b is as fast or faster where") :].splitlines()
    assert union[1].startswith("  or where")
    _, out, _ = call("formula", "-s", "chimera", *command[3:], "--format", "latex")
    assert r"step time & $\max\left(" in out


def test_a_shorter_period_on_the_last_numbers_is_no_family():
    """Within the fifth round of 1F1B each microbatch adds two messages, as if the period were 1."""

    def program(m):
        return pj.lower(build("1f1b", 6, m))

    result = pj.analysis.formula_family(program, range(6, 30), ("F", "B", "c"))
    assert (result.period, result.first) == (6, 6)
    form = pj.formula(pj.lower(build("1f1b", 6, 32)), ("F", "B", "c"))
    assert result.facets(32) == [tuple(facet) for facet in form.facets]
