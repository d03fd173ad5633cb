"""Costs: what is filled in, what is refused, and gradients that are path counts."""

import copy
import dataclasses
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daily import read_cases, with_cases
from hypothesis import given, strategies as st
from jax.flatten_util import ravel_pytree
from legal_sizes import build

import pipejax as pj
from pipejax.costs.costs import FIELDS, PHASE_FIELDS, unchecked_costs
from pipejax.engine.pricing import price
from pipejax.schedules import REGISTRY

TABLE = pj.schedules.build("chimera", num_workers=4, num_microbatches=8)
SPLIT = pj.ScheduleTable.from_rows([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
PHASES = ("F", "B", "I", "W", "R", "O", "L")
EVERY = {PHASE_FIELDS[letter]: 1.0 for letter in PHASES}
OFFLOADED = {"ada-offload": {"memory_limit": 2}, "pipe-offload": {"offload_share": 1.0}}
TABLES = {name: build(name, 4, 8, **OFFLOADED.get(name, {})) for name in REGISTRY} | {
    "recomputing": pj.ScheduleTable.from_rows([["0F0", "0R0", "0I0", "0W0"]]),
    "one of each": pj.ScheduleTable.from_rows([["0F0", "0F1", "0B0", "0I1", "0W1"]]),
}
KINDS = {"list": list, "NumPy": np.array, "JAX": jnp.array, "first": lambda pair: pair[0]}
# XLA's arithmetic takes numbers below 1e-307 for 0, and halves of those too
seconds = st.lists(st.just(0.0) | st.floats(1e-300, 1e6), min_size=2, max_size=2)


@given(single=seconds, other=seconds, kind=st.sampled_from(sorted(KINDS)))
def test_what_follows_is_filled_in(single, other, kind):
    kind_fields = KINDS[kind]
    whole, part = np.maximum(single, other), np.minimum(single, other)
    half, both = np.multiply(single, 0.5), np.add(single, other)
    cases = [
        ({"backward": single}, {"input_grad": half, "weight_grad": half}),
        ({"input_grad": single, "weight_grad": other}, {"backward": both}),
        ({"backward": whole, "input_grad": part}, {"weight_grad": whole - part}),
        ({"backward": whole, "weight_grad": part}, {"input_grad": whole - part}),
    ]
    for times, expected in cases:
        arguments = {name: kind_fields(time) for name, time in times.items()}
        costs = pj.Costs(forward=1.0, **arguments)
        for name, time in (times | expected).items():
            np.testing.assert_array_equal(getattr(costs, name), kind_fields(time), err_msg=name)


def test_what_is_not_given_and_does_not_follow_is_unknown():
    alone = pj.Costs(weight_grad=1.0)
    assert (alone.forward, alone.backward, alone.input_grad) == (None, None, None)
    assert (alone.recompute, alone.offload, alone.load, alone.pair) == (None,) * 4
    assert (alone.latency, alone.update, alone.unshard) == (0.0, 0.0, 0.0)
    assert pj.Costs(offload=2.0).load == 2.0
    assert pj.Costs(offload=2.0, load=3.0).load == 3.0
    assert pj.Costs(load=3.0).offload is None


@pytest.mark.parametrize("name", TABLES)
def test_a_phase_without_a_cost_is_named(name):
    table = TABLES[name]
    program = pj.lower(table)
    codes = np.unique([table.phase, table.partners.phase])
    used = {pj.Phase(code).name for code in codes.tolist()}
    assert "F" in used
    for letter in PHASES:
        field = PHASE_FIELDS[letter]
        costs = unchecked_costs({k: v for k, v in EVERY.items() if k != field})
        message = rf"phase {letter} has no cost: give .*{field}"
        for run, what in ((price, program), (pj.evaluate, table), (pj.makespans, program)):
            if letter in used:
                with pytest.raises(ValueError, match=message):
                    run(what, costs)
            elif run is price:
                run(what, costs)


def test_a_phase_without_a_cost_is_named_inside_a_trace_too():
    program = pj.lower(TABLES["recomputing"])
    with pytest.raises(ValueError, match=r"phase R has no cost: give recompute \(R\)"):
        jax.jit(lambda costs: pj.makespan(program, costs))(pj.Costs(forward=1.0, backward=2.0))


def test_a_fused_pair_with_a_cost_needs_none_of_its_ops():
    program = pj.lower(pj.ScheduleTable.from_rows([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]))
    assert pj.Phase.B in program.layout.paired_phases
    with_pairs = dataclasses.replace(program.layout, phases=())
    alone = dataclasses.replace(program, layout=with_pairs)  # as if all ops were in pairs
    assert price(alone, unchecked_costs({"pair": 2.5})).duration.max() == 2.5
    with pytest.raises(ValueError, match="phase F has no cost"):
        price(alone, unchecked_costs({}))
    with pytest.raises(ValueError, match="phase F has no cost"):
        price(program, unchecked_costs({"pair": 2.5}))


@pytest.mark.parametrize("name", REGISTRY)
def test_per_worker_is_what_the_command_line_does(name, call, tmp_path):
    table = TABLES[name]
    times = {"forward": 1.0, "input_grad": 1.25, "weight_grad": 0.5, "offload": 0.75}
    costs = pj.Costs.per_worker(table, **times, transfer=0.125)
    for pipe in range(table.num_pipes):  # all that a microbatch costs on a worker
        for worker in range(table.num_workers):
            is_own = table.placement[pipe] == worker
            shares = np.asarray(table.stage_shares)[is_own]
            for field, value in times.items():
                total = getattr(costs, field)[is_own].sum() * table.grammar.slices
                assert total == pytest.approx(value * shares.mean() if is_own.any() else 0)
    path = tmp_path / "table.json"
    pj.write_table(table, path)
    op_times = "F=1,I=1.25,W=0.5" + ",O=0.75" * table.offloads
    given_times = ["--worker-times", op_times, "--comm", "0.125"]
    code, out, _ = call("evaluate", "--table", path, *given_times, "--json")
    assert (code, json.loads(out)["makespan"]) == (0, pj.evaluate(table, costs).makespan)


class TestTrees:
    """A tree of costs holds anything: only the constructor checks and fills in."""

    def test_leaves_are_put_back_as_they_are(self):
        costs = pj.Costs(forward=1.0, backward=[2.0, 3.0])
        leaves, tree = jax.tree.flatten(costs)
        assert len(leaves) == 4 + 8
        for wrong in (-1.0, None, object(), "text", np.nan):
            back = jax.tree.unflatten(tree, [wrong] * len(leaves))
            assert back.forward is back.weight_grad is back.latency is wrong
            assert back.recompute is None
        axes = jax.tree.map(lambda _: 0, costs)
        assert (axes.forward, axes.backward, axes.recompute) == (0, 0, None)

    def test_paths_name_the_fields(self):
        paths = jax.tree_util.tree_leaves_with_path(pj.Costs(forward=1.0, backward=2.0))
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        assert names[:4] == [".forward", ".backward", ".input_grad", ".weight_grad"]

    def test_transformations_of_functions_that_make_costs(self):
        table = TABLES["zb-h1"]
        program = pj.lower(table)

        def end(make, backward):
            return pj.makespan(program, make(1.0, backward))

        def uniform(forward, backward):
            return pj.Costs.uniform(table, forward=forward, backward=backward)

        for make in (
            pj.Costs,
            uniform,
            lambda f, b: pj.Costs.per_worker(table, forward=f, backward=b),
        ):
            whole = jax.jit(jax.vmap(lambda b, make=make: end(make, b)))(jnp.array([2.0, 4.0]))
            assert whole.tolist() == [27.0, pj.evaluate(table, pj.Costs(1.0, 4.0)).makespan]
            slopes = jax.grad(lambda f, b, make=make: pj.makespan(program, make(f, b)), (0, 1))
            assert np.dot(slopes(1.0, 2.0), [1.0, 2.0]) == 27.0  # Euler
            many = jax.vmap(make)(jnp.ones(3), jnp.full(3, 2.0))
            assert pj.makespans(program, many).tolist() == [27.0] * 3
        mapped = jax.tree.leaves(jax.vmap(uniform)(jnp.ones(3), jnp.ones(3)))
        assert {leaf.shape for leaf in mapped} == {(3,)}


FORBIDDEN = {
    "a boolean": True,
    "a list with a boolean": [1.0, True],
    "booleans": np.array([True, False]),
    "JAX booleans": jnp.array([True, False]),
    "a complex number": 1j,
    "complex numbers": np.array([1.0, 2.0], complex),
    "JAX complex numbers": jnp.array([1j]),
    "text": "1.5",
    "texts": ["1.5", "2"],
    "a boolean among numbers": [np.array([True]), np.array([1.0])],
    "a masked number in a list": [1.0, np.ma.masked],
    "random keys": jax.random.key(0),
    "a masked array": np.ma.MaskedArray([1.0, 2.0], mask=[True, False]),
    "times": np.array([1, 2], "timedelta64[s]"),
    "nothing among numbers": [1.0, None],
    "a ragged list": [[1.0], [1.0, 2.0]],
    "objects": np.array([1.0, 2.0], object),
    "a number beyond floats": 10**400,
    "a function": abs,
}


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("field", ["forward", "load", "transmit"])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_number_is_refused(what, field):
    with pytest.raises(ValueError, match=f"{field} must be a number or an array of them, got "):
        pj.Costs(**{field: FORBIDDEN[what]})
    with pytest.raises(ValueError, match=f"{field} must be a number or an array of them, got "):
        unchecked_costs({field: FORBIDDEN[what]}).check_values()


@pytest.mark.parametrize("wrong", [-1, [1.0, -1.0], np.float32(-1), np.nan, -np.inf, [np.inf]])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.usefixtures("unchecked")
def test_what_no_time_can_be_is_refused(wrong, field):
    value = np.ravel(wrong)[-1]
    unit = "" if field == "pair_factor" else " seconds"
    with pytest.raises(ValueError, match=f"{field} must be finite and .* 0{unit}, got {value}"):
        pj.Costs(**{field: wrong})


@pytest.mark.usefixtures("unchecked")
def test_traced_values_of_a_wrong_type_are_refused():
    for wrong in (jnp.array(True), jnp.array(1j)):
        with pytest.raises(ValueError, match="forward must be a number or an array of them"):
            jax.jit(lambda value: pj.Costs(forward=value))(wrong)


@pytest.mark.usefixtures("unchecked")
def test_types_of_numbers():
    assert type(pj.Costs(forward=1).forward) is float
    assert pj.Costs(forward=np.arange(3)).forward.dtype == np.float64
    assert pj.Costs(forward=[1, 2]).forward.dtype == np.float64
    assert pj.Costs(forward=jnp.arange(3)).forward.dtype == jnp.result_type(float)
    for dtype in (np.float16, np.float32, np.float64, np.longdouble, jnp.bfloat16):
        size = np.dtype(dtype).itemsize
        # smaller cannot add up a step
        expected = {np.dtype(np.float32 if size <= 4 else np.float64)}
        for make in (np.ones, jnp.ones)[: 1 if size > 8 else 2]:
            costs = pj.Costs(forward=make(2, dtype), backward=make(2, dtype))
            assert {leaf.dtype for leaf in jax.tree.leaves(costs) if np.ndim(leaf)} == expected
        batch = pj.Costs.uniform(TABLE, forward=np.ones(2, dtype), backward=1.0)
        assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == expected
    with jax.enable_x64(False):
        assert pj.Costs(forward=jnp.array([2**24 + 1])).forward.tolist() == [2**24 + 1]
    inside = jax.jit(lambda a, b: pj.Costs(forward=[a, b, 1.0]).forward)(1.0, 2.0)
    assert inside.tolist() == [1.0, 2.0, 1.0]


def test_costs_show_what_is_given():
    texts = [f"{name}=float64[2]" for name in ("backward", "input_grad", "weight_grad")]
    text = f"Costs(forward=1, {', '.join(texts)}, latency=1e-06)"
    assert repr(pj.Costs(forward=1, backward=[2.0, 4.0], latency=1e-6)) == text
    assert repr(jax.tree.map(lambda _: None, pj.Costs(forward=1.0))).startswith("Costs(")


@pytest.mark.parametrize(
    "link",
    ["delay", "rendezvous"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("queued", "blocking")],
)
@pytest.mark.parametrize("table", [TABLE, SPLIT], ids=["chimera", "split"])
def test_gradients(link, table):
    rng = np.random.default_rng(1)
    stages, links = (table.num_stages,), (2, table.num_pipes, table.num_stages - 1)
    names = ("forward", "backward", "input_grad", "weight_grad")
    ops = {name: jnp.asarray(1 + rng.random(stages)) for name in names}
    latency, transmit = (jnp.asarray(rng.random(links)) for _ in range(2))
    costs = pj.Costs(**ops, latency=latency, transmit=transmit)
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


def test_gradient_of_all_finish_times_is_the_same():
    program = pj.lower(TABLE, link="queued", step_end=False)  # no A and U that tie with the end
    costs = pj.Costs(forward=jnp.array(1.0), backward=jnp.array(2.0), transmit=jnp.array(0.1))
    last = jax.jit(lambda c: pj.finish_times(program, c).max())
    first, second = (jax.grad(f)(costs) for f in (last, lambda c: pj.makespan(program, c)))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert float(a) == pytest.approx(float(b))
    _, tangent = jax.jvp(last, (costs,), (costs,))
    assert float(tangent) == pytest.approx(float(last(costs)))


def test_where_paths_tie_the_gradient_of_a_finish_time_counts_one():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    program, costs = pj.lower(table, step_end=False), pj.Costs(forward=np.ones(4), backward=1.0)
    end = int(pj.finish_times(program, costs).argmax())
    counts = jax.jit(jax.grad(lambda c: pj.finish_times(program, c)[end]))(costs)
    path = jax.jit(jax.grad(lambda c: pj.makespan(program, c)))(costs)
    assert counts.forward.tolist() == path.forward.tolist()


CSV = """stage,F_ms,B_ms,latency_us,bytes,bandwidth_GB_per_s,latency_back_us
1,10.2,20.9,10,33554432,25,20
0,13.1,24.7,10,33554432,25,20
2,10.2,20.9,10,33554432,25,20
3,14.8,29.6,,,,
"""


@pytest.mark.parametrize("unit", ["milliseconds", "ms"])
def test_a_table_of_stages_is_read_as_the_same_in_json(unit, tmp_path):
    section = {"latency": 0.01, "bytes": 33554432, "bandwidth": 25e9}
    content = {"unit": unit, "F": [13.1, 10.2, 10.2, 14.8], "B": [24.7, 20.9, 20.9, 29.6]}
    back = {"message_back": {"latency": 0.02}}
    (tmp_path / "costs.json").write_text(json.dumps(content | {"message": section} | back))
    (tmp_path / "costs.csv").write_text(CSV)
    there, here = (pj.read_costs(tmp_path / f"costs.{end}", TABLE) for end in ("json", "csv"))
    for name in ("forward", "backward", "input_grad", "latency", "transmit"):
        np.testing.assert_allclose(getattr(here, name), getattr(there, name), rtol=1e-15)


# a makespan may be finite where the sum over all workers, or a ratio, is not
OVERFLOWS = {
    "the makespan is too large for a float64: .* forward = 1e[+]308 s": {"forward": 1e308},
    "bubble_overhead is too large .* backward = 6e[+]306 s": {"forward": 3e306, "backward": 6e306},
    "the bubble_overhead is too large .* transmit = 1 s": {"forward": 5e-324, "transmit": 1.0},
}


@pytest.mark.parametrize("message", OVERFLOWS)
def test_what_overflows_is_named(message):
    costs = pj.Costs(**{"backward": 0.0, **OVERFLOWS[message]})
    for evaluate in (pj.evaluate, pj.compare):
        with pytest.raises(ValueError, match=message):
            evaluate(TABLE, costs)


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 1e-200])
def test_tiny_times_give_ratios(tiny):
    run = pj.evaluate(TABLE, pj.Costs(forward=tiny, backward=tiny))
    whole = pj.evaluate(TABLE, pj.Costs(forward=1.0, backward=1.0))
    for name in ("bubble_ratio", "bubble_overhead", "span_bubble_ratio"):
        assert getattr(run, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    assert run.path_share == whole.path_share


@pytest.mark.slow
def test_batches_that_overflow_are_refused():
    program = pj.lower(TABLE)
    for dtype, largest in ((np.float32, 3e38), (np.float64, 1e308)):
        costs = pj.Costs(forward=np.array([1.0, largest], dtype), backward=dtype(0))
        for solve in (
            pj.makespans,
            pj.makespans_and_grad,
            functools.partial(pj.makespans, unroll=True),
            functools.partial(pj.makespans_and_grad, temperature=1.0),
        ):
            with pytest.raises(ValueError, match=f"makespan is too large for a {np.dtype(dtype)}"):
                solve(program, costs)
    for solve in (pj.makespan, pj.finish_times, pj.analysis.slack):
        with pytest.raises(ValueError, match=r"too large for a float64: .* largest is forward"):
            solve(program, pj.Costs(forward=1e308, backward=0.0))


PARTS, HALVES = (dict.fromkeys(("input_grad", "weight_grad"), time) for time in (1, 1.5))
REPLACED = read_cases("REPLACED of test_costs")


@with_cases("door", lambda x: x, copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)))
@pytest.mark.parametrize(("times", "changes", "expected"), REPLACED)
def test_filled_in_times_of_a_replaced_record_follow_again(times, changes, expected, door):
    costs = door(pj.Costs(**times))
    assert costs == pj.Costs(**times)
    replaced = dataclasses.replace(costs, **changes)
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(replaced, name), value)
    again = dataclasses.replace(replaced, latency=0.5)
    assert (again.latency, again.others) == (0.5, None)
    np.testing.assert_array_equal(again.backward, replaced.backward)


@with_cases(
    "changes stale",
    *read_cases("test_costs_of_a_tree_function_refuse_a_new_time_beside_what_followed_from_old"),
)
def test_costs_of_a_tree_function_refuse_a_new_time_beside_what_followed_from_old(changes, stale):
    costs = pj.Costs(forward=1.0, backward=2.0, offload=1.0)
    with pytest.raises(ValueError, match=f"would keep their old {stale}: give"):
        dataclasses.replace(jax.tree.map(lambda time: 2 * time, costs), **changes)
    with pytest.raises(ValueError, match="would keep their old"):
        jax.jit(lambda costs: dataclasses.replace(costs, **changes))(costs)


def test_costs_of_a_tree_function_follow_where_none_is_given():
    costs = jax.tree.map(lambda time: 2 * time, pj.Costs(forward=1.0, backward=2.0, offload=1.0))
    assert dataclasses.replace(costs, forward=3.0).input_grad == 2.0
    new = dataclasses.replace(costs, backward=8.0, input_grad=None, weight_grad=None)
    assert (new.input_grad, new.weight_grad, new.load) == (4.0, 4.0, 2.0)
    new = dataclasses.replace(costs, backward=8.0, input_grad=3.0, weight_grad=None)
    assert (new.backward, new.weight_grad) == (8.0, 5.0)
    assert dataclasses.replace(costs, offload=5.0, load=None).load == 5.0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, ">f8"])
@with_cases(
    "field others derived expected",
    *read_cases("test_an_array_that_changes_later_changes_no_costs"),
)
def test_an_array_that_changes_later_changes_no_costs(field, others, derived, expected, dtype):
    array = np.array([2, 2, 2], dtype)
    costs = pj.Costs(**{field: array}, **others)
    view = pj.Costs(**{field: array[::-1]}, **others)
    array[:] = 9
    for record in (costs, view, dataclasses.replace(costs, latency=0.5)):
        assert getattr(record, field).tolist() == [2, 2, 2]
        assert np.unique(getattr(record, derived)) == expected
    assert array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        getattr(costs, field)[0] = 1.0
