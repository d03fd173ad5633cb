"""Closed forms: exact on every registered schedule, proved, and rejected where they are wrong."""

import copy
import json

import jax
import numpy as np
import pytest
from daily import daily
from legal_sizes import at_least, is_legal

import pipejax as pj
from pipejax.analysis.formula.facets import Cone
from pipejax.analysis.formula.parameters import default_parameters, named_parameters
from pipejax.engine.lowering.program import run_on_host
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.links import LINK_MODELS

ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "local-sgd")
SYNCHRONOUS = [name for name in REGISTRY if name not in ASYNCHRONOUS]
LINKS = list(LINK_MODELS)
# name, P, M -> the form, letter for letter: DESIGN section 7
PUBLISHED = {
    ("chimera", 4, 4): "max(6F + 4B + 4c_F + 3c_B, 4F + 6B + 3c_F + 4c_B)",
    ("1f1b", 8, 32): "39F + 39B + 34c_F + 34c_B",
}


def lowered(name, p, m, link="delay", **options):
    table = pj.schedules.build(name, num_workers=p, num_microbatches=m, **options)
    return table, pj.lower(table, link=link, step_end=False)


def points(form, count, seed=0):
    """Random parameters over many orders of magnitude, a third of them 0: borders too."""
    rng = np.random.default_rng(seed)
    theta = 10 ** rng.uniform(-3, 3, (count, len(form.parameters)))
    theta[rng.random(theta.shape) < 1 / 3] = 0.0
    theta[: len(form.borders) + 1 : 2] = rng.integers(
        0, 4, theta[: len(form.borders) + 1 : 2].shape
    )
    return theta


def runs(form, theta):
    """Makespans by the recurrence, one by one."""
    vectors = theta @ (form.costs.weights / form.units).astype(float).T
    return np.array([run_on_host(form.program, vector).finish.max() for vector in vectors])


EVERY = [(name, link) for name in SYNCHRONOUS for link in LINKS]


# of two workers already hundreds of facets
MANY_FACETS = ("dualpipe-v", "interleaved-zb", "v-half", "v-min", "zb-v")


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


@pytest.mark.parametrize(
    ("name", "p", "m", "link"), [("chimera", 4, 6, "delay"), ("zb-h1", 3, 5, "queued")]
)
def test_a_wrong_form_is_rejected(name, p, m, link):
    table, program = lowered(name, p, m, link)
    claimed = json.loads(json.dumps(pj.formula(program).certificate(table)))
    assert accepted(claimed)
    assert not any(map(accepted, mutants(claimed)))


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("1f1b", pj.Links("rendezvous", posting="program")),
        ("1f1b", pj.Links("rendezvous", "direction")),
        ("chimera", pj.Links("queued", shared_links="pairs")),
        ("pipedream", pj.Links()),
    ],
)
def test_other_links_and_tables_are_proved_too(name, links):
    table, program = lowered(name, 4, 4, links)
    assert accepted(json.loads(json.dumps(pj.formula(program).certificate(table))))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zb-h1", {}),
        ("chimera", {"box": {"F": (1, 2), "c_F": (0, 0.5)}}),
        ("chimera", {"box": {"B": (0.3, 0.3), "c_F": (0, 0.5)}}),
        ("hanayo", {"max_facets": 5}),
        ("1f1b", {"parameters": ("F", "B_first", "B_mid", "B_last", "latency", "U")}),
    ],
)
def test_a_saved_form_is_the_same(name, options, tmp_path):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
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
    assert pj.formula(
        program, named_parameters(program, (*names, "c"), table.worker_parts)
    ).facets == (form.facets)
    costs = pj.Costs.per_worker(table, forward=1.0, backward=2.0, transfer=0.25)
    assert form(F=1.0, B=2.0, c=0.25) == pytest.approx(
        float(pj.makespan(program, costs)), rel=1e-14
    )
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
