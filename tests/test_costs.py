"""Costs: what is filled in, what is refused, and gradients that are path counts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import pipejax as pj
from pipejax.cli.options.numbers import parse_times
from pipejax.engine.pricing import NodeCosts

TABLE = pj.schedules.build("chimera", num_workers=4, num_microbatches=8)
SPLIT = pj.ScheduleTable.from_rows([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])


def test_backward_is_filled_in_both_ways():
    whole = pj.Costs.uniform(TABLE, forward=1.0, backward=3.0)
    assert (whole.input_grad, whole.weight_grad) == (1.5, 1.5)
    assert pj.Costs.uniform(TABLE, forward=1.0, input_grad=1.5, weight_grad=0.7).backward == 2.2
    assert pj.Costs.uniform(TABLE, forward=1.0, backward=3.0, weight_grad=1.0).input_grad == 2.0
    given = pj.Costs.uniform(TABLE, forward=1.0, backward=5.0, input_grad=1.0, weight_grad=1.0)
    assert given.backward == 5.0


WRONG = {
    "negative": ({"forward": -1.0, "backward": 1.0}, "forward must be finite and at least 0"),
    "nan": ({"forward": float("nan"), "backward": 1.0}, "forward must be .* got nan"),
    "infinite": (
        {"forward": 1.0, "backward": np.array([1.0, np.inf])},
        "backward must be .* got inf",
    ),
    "text": ({"forward": "fast", "backward": 1.0}, "forward must be a number"),
    "no backward": ({"forward": 1.0}, "phase B has no cost"),
    "half of it": ({"forward": 1.0, "weight_grad": 1.0}, "phase B has no cost"),
    "more W than B": (
        {"forward": 1.0, "backward": 1.0, "weight_grad": 2.0},
        r"I = B - W \(input_grad\) must be",
    ),
    "unknown": ({"forward": 1.0, "backward": 1.0, "sideways": 1.0}, "unknown cost 'sideways'"),
    "both transfers": (
        {"forward": 1.0, "backward": 1.0, "transfer": 1.0, "transmit": 1.0},
        "give one",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.usefixtures("unchecked")
def test_wrong_costs_are_refused(what):
    arguments, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        pj.Costs.uniform(TABLE, **arguments)


@pytest.mark.parametrize("name", ["forward", "latency"])
def test_wrong_number_of_entries_is_refused(name):
    wrong = {"forward": np.ones(4), "backward": 1.0} | {name: np.ones(7)}
    with pytest.raises(ValueError, match=rf"{name} has shape \(7,\), the table has [43]"):
        pj.evaluate(TABLE, pj.Costs(**wrong))


def test_batches():
    many = pj.Costs.uniform(TABLE, forward=np.array([1.0, 2.0, 3.0]), backward=2.0, transfer=0.5)
    assert {leaf.shape for leaf in jax.tree.leaves(many)} == {(3, 1), (3, 1, 1, 1)}
    program = pj.lower(TABLE)
    ends = jax.vmap(pj.makespan, in_axes=(None, 0))(program, many)
    for k, forward in enumerate((1.0, 2.0, 3.0)):
        one = pj.Costs.uniform(TABLE, forward=forward, backward=2.0, transfer=0.5)
        assert float(ends[k]) == float(pj.makespan(program, one))


def test_cost_values_never_recompile():
    program = pj.lower(TABLE)
    run = jax.jit(pj.makespan)
    for k in range(4):
        run(program, pj.Costs.uniform(TABLE, forward=1.0 + k, backward=2.0, transfer=0.1 * k))
    assert run._cache_size() == 1


@pytest.mark.parametrize("link", ["delay", "queued", "blocking", "rendezvous"])
@pytest.mark.parametrize("table", [TABLE, SPLIT], ids=["chimera", "split"])
def test_gradients(link, table):
    rng = np.random.default_rng(1)
    stages, links = (table.num_stages,), (2, table.num_pipes, table.num_stages - 1)
    costs = pj.Costs(
        **{
            name: jnp.asarray(1 + rng.random(stages))
            for name in ("forward", "backward", "input_grad", "weight_grad")
        },
        latency=jnp.asarray(rng.random(links)),
        transmit=jnp.asarray(rng.random(links)),
    )
    program = pj.lower(table, link=link)
    value, counts = jax.value_and_grad(pj.makespan, argnums=1)(program, costs)
    flat, back = ravel_pytree(costs)
    slopes, _ = ravel_pytree(counts)
    assert float(flat @ slopes) == pytest.approx(float(value), rel=1e-12)  # Euler
    assert np.array_equal(slopes, np.round(slopes))  # exact path counts
    h = 1e-6  # off ties, for costs are random
    for k in np.flatnonzero(flat):  # below 0 there is no cost
        up, down = (pj.makespan(program, back(flat.at[k].add(s * h))) for s in (1, -1))
        assert float(up - down) / (2 * h) == pytest.approx(float(slopes[k]), abs=1e-4)
    direction = back(jnp.asarray(rng.random(flat.shape)))
    _, forward_mode = jax.jvp(lambda c: pj.makespan(program, c), (costs,), (direction,))
    assert float(forward_mode) == pytest.approx(float(slopes @ ravel_pytree(direction)[0]))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), np.array([1.0, 1, 1, -1])])
def test_makespan_refuses_wrong_costs(wrong):
    with pytest.raises(ValueError, match="forward must be finite and at least 0 seconds"):
        pj.makespan(pj.lower(TABLE), pj.Costs(forward=wrong, backward=1.0))


@pytest.mark.usefixtures("unchecked")
def test_lists_are_arrays():
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=3)
    costs = pj.Costs(forward=[1.0, 2.0], backward=(2.0, 2.0))
    assert float(pj.makespan(pj.lower(table), costs)) == pj.evaluate(table, costs).makespan == 15.0
    with pytest.raises(ValueError, match="forward must be a number or an array"):
        pj.Costs(forward=["a"])


def test_makespan_counts_all_reduce_and_update():
    costs = pj.Costs(forward=1.0, backward=2.0, all_reduce=10.0, update=100.0)
    table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
    total = float(pj.makespan(pj.lower(table), costs))
    assert total == pj.evaluate(table, costs).makespan == 33 + 110
    assert float(pj.makespan(pj.lower(table, step_end=False), costs)) == 33


def test_gradient_of_all_finish_times_is_the_same():
    program = pj.lower(TABLE, link="queued", step_end=False)  # no A and U that tie with the end
    costs = pj.Costs(forward=jnp.array(1.0), backward=jnp.array(2.0), transmit=jnp.array(0.1))
    last = lambda c: pj.finish_times(program, pj.price(program, c)).max()  # noqa: E731
    one, other = (jax.grad(f)(costs) for f in (last, lambda c: pj.makespan(program, c)))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert float(a) == pytest.approx(float(b))
    _, tangent = jax.jvp(last, (costs,), (costs,))
    assert float(tangent) == pytest.approx(float(last(costs)))


def test_first_predecessor_wins_ties():
    # two equal paths into the last node: the gradient is 1 for the first, 0 for the second
    program = pj.lower(pj.schedules.build("gpipe", num_workers=1, num_microbatches=1))
    costs = NodeCosts(jnp.array([0.0, 1.0, 1.0, 1.0]), jnp.zeros((4, 2)))
    preds = jnp.array([[0, 0], [0, 0], [0, 0], [2, 1]])
    path = pj.critical_path(preds, costs)
    assert path.nodes.tolist() == [True, False, True, True]
    del program


def test_per_worker_divides_over_stages():
    interleaved = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=2)
    hanayo = pj.schedules.build("hanayo", num_workers=2, num_microbatches=2, waves=2)
    times = {"forward": 1.0, "backward": 2.0}
    assert pj.Costs.per_worker(interleaved, **times).forward.tolist() == [0.5] * 4
    assert pj.Costs.per_worker(hanayo, **times).backward.tolist() == [0.5] * 8
    assert pj.Costs.per_worker(TABLE, **times).forward.tolist() == [1.0] * 4
    asymmetric = pj.schedules.build("chimera-asymmetric", num_workers=2, num_microbatches=2)
    np.testing.assert_allclose(pj.Costs.per_worker(asymmetric, **times).forward, [2 / 3, 4 / 3])
    totals = [
        pj.evaluate(t, pj.Costs.per_worker(t, **times)).busy.sum() / t.num_microbatches
        for t in (interleaved, hanayo, asymmetric)
    ]
    np.testing.assert_allclose(totals, 6.0)  # all schedules do the same work


GOOD = {"unit": "seconds", "F": 1.0, "B": [2.0, 2.5, 3.0, 2.0]}
BAD = {
    "no unit": ({"F": 1, "B": 2}, '"unit" must be one of seconds'),
    "unit list": (GOOD | {"unit": ["seconds"]}, '"unit" must be one of seconds'),
    "other unit": (GOOD | {"unit": "days"}, "\"unit\" must be .* got 'days'"),
    "unknown key": (GOOD | {"G": 1}, "unknown key 'G': known are unit, F, B"),
    "unknown message key": (GOOD | {"message": {"speed": 1}}, "message: unknown key 'speed'"),
    "no forward": ({"unit": "seconds", "B": 2}, '"F" is missing'),
    "no backward": ({"unit": "seconds", "F": 2}, "phase B has no cost"),
    "too few": (GOOD | {"B": [1, 2]}, "B has 2 entries, the table has 4 stages"),
    "too many messages": (
        GOOD | {"message": {"latency": [1, 2, 3, 4]}},
        "4 entries, .* 3 stage bound",
    ),
    "negative": (GOOD | {"F": -1}, "F must be finite numbers of at least 0, got -1"),
    "text": (GOOD | {"F": "1"}, "F must be finite numbers .* got '1'"),
    "boolean": (GOOD | {"F": True}, "F must be finite numbers .* got True"),
    "null": (GOOD | {"F": None}, "F must be finite numbers .* got None"),
    "bytes alone": (
        GOOD | {"message": {"bytes": 1}},
        'give "transmit", or "bytes" and "bandwidth"',
    ),
    "no bandwidth": (GOOD | {"message": {"bytes": 1, "bandwidth": 0}}, "bandwidth must be above 0"),
    "message number": (GOOD | {"message": 3}, "message must be an object"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_cost_files_are_refused(what, tmp_path):
    content, message = BAD[what]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        pj.read_costs(path, TABLE)


def test_nan_in_a_cost_file_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"unit": "seconds", "F": NaN, "B": 1}')
    with pytest.raises(ValueError, match="F must be finite"):
        pj.read_costs(path, TABLE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"unit": "seconds", "F": 1' + "0" * 400 + ', "B": 1}', "F must be finite"),
        ('{"unit": "seconds", "F": 1, "B": 2, "F": 3}', "key 'F' stands twice"),
        ("[" * 100000, "nested too deeply|not JSON"),
    ],
)
def test_strange_json_is_refused(text, message, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        pj.read_costs(path, TABLE)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), np.array([1.0, np.inf, 1.0, 1.0])])
def test_evaluate_refuses_wrong_values(wrong):
    with pytest.raises(ValueError, match="update must be finite and at least 0"):
        pj.evaluate(TABLE, pj.Costs(forward=1.0, backward=1.0, update=wrong))


def test_overflow_is_refused():
    with pytest.raises(ValueError, match="makespan is too large"), np.errstate(over="ignore"):
        pj.evaluate(TABLE, pj.Costs(forward=1e308, backward=1e308))


def test_cost_file_in_full(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(
        json.dumps(
            {
                "unit": "milliseconds",
                "F": 1,
                "I": [1, 2, 3, 4],
                "W": 0.5,
                "pair": 3,
                "message": {"latency": 1, "bytes": 1e6, "bandwidth": [1e9, 1e8, 1e9]},
                "message_back": {"latency": 2, "transmit": 5},
            }
        )
    )
    costs = pj.read_costs(path, TABLE)
    np.testing.assert_allclose(costs.backward, [1.5e-3, 2.5e-3, 3.5e-3, 4.5e-3])
    np.testing.assert_allclose(costs.transmit[0, 0], [1e-3, 1e-2, 1e-3])
    np.testing.assert_allclose(costs.latency[1, 0], 2e-3)
    np.testing.assert_allclose(costs.transmit[1, 0], 5e-3)
    assert costs.pair.tolist() == [3e-3] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F=1,X=2", "'X=2' is not LETTER=SECONDS"),
        ("F=1,F=2", "F is given twice"),
        ("B=2", "F is missing"),
        ("F=-1,B=1", "F must be a finite number of at least 0, got '-1'"),
        ("F=one", "got 'one'"),
        ("F=nan,B=1", "got 'nan'"),
        ("F=inf,B=1", "got 'inf'"),
        ("", "is not LETTER=SECONDS"),
        ("F", "got ''"),
    ],
)
def test_bad_times_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_times(text, "--stage-times")
