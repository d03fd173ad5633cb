"""Batches against one evaluation after the other: values, gradients, limits, memory."""

import functools
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from compilations import compilations
from daily import daily, with_cases
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from legal_sizes import build

import pipejax as pj
from benchmarks import compiled_simd
from pipejax.base.compiled import cpu_options
from pipejax.costs.costs import unchecked_costs
from pipejax.engine.batched import interpreter, makespans, unrolled as unrolled_form
from pipejax.engine.batched.binary_program import backward_program, binary_ops, forward_program
from pipejax.engine.batched.cost_rows import cost_rows
from pipejax.engine.batched.interpreter import batch_sharding
from pipejax.engine.pricing import NodeCosts, price
from pipejax.engine.recurrence import critical_path
from pipejax.schedules.table.links import LINK_MODELS

OPS = ("forward", "backward", "input_grad", "weight_grad", "recompute", "all_reduce", "update")
OPS += ("offload", "load")
FIELDS = (*OPS, "latency", "transmit")
LINKS = st.sampled_from(list(LINK_MODELS))
_value_and_grad = jax.jit(jax.value_and_grad(pj.makespan, argnums=1))
UNROLLED = [("gpipe", "queued"), ("chimera", "rendezvous"), ("hanayo", "blocking")]
UNROLLED += [("1f1b", "blocking"), ("interleaved-1f1b", "rendezvous")]
SIZES = (1, 128, 129, 2049, 20_001)  # less and more than a row, a block


def make_batch(table, size, seed, dtype=np.float64, *, dyadic=False):
    """Random costs per stage and link; dyadic ones tie often and are exact."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.integers(0, 9, shape) / 8 if dyadic else rng.random(shape)).astype(dtype)

    links = (size, 2, table.num_pipes, table.num_stages - 1)
    ops = {name: draw(size, table.num_stages) for name in OPS}
    return pj.Costs(**ops, latency=draw(*links), transmit=draw(*links))


def but(costs, **others):
    return pj.Costs(**{**{f: getattr(costs, f) for f in FIELDS}, **others})


def part(costs, where):
    return jax.tree.map(lambda leaf: leaf[where] if np.ndim(leaf) else leaf, costs)


def one_by_one(program, costs, size):
    """Makespans and gradients of every configuration alone."""
    singles = [part(costs, k) for k in range(size)]
    results = [_value_and_grad(program, single) for single in singles]
    values = np.array([value for value, _ in results])
    slopes = [g for _, g in results]
    return values, {name: np.stack([getattr(slope, name) for slope in slopes]) for name in FIELDS}


@given(data=st.data(), link=LINKS, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=7)  # each of them compiles
def test_interpreted_equals_one_by_one(data, link, seed):
    """Ties are included: the same path is counted."""
    table, _ = data.draw(strategies.tables())
    program = pj.lower(table, link=link)
    padded = strategies.padded(program, num_nodes=512, max_preds=8)
    costs = make_batch(table, 3, seed, dyadic=data.draw(st.booleans()))
    values, counts = pj.makespans_and_grad(program, costs)
    expected, gradients = one_by_one(padded, costs, 3)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    np.testing.assert_allclose(pj.makespans(program, costs), expected, rtol=1e-12)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(counts, name), gradients[name], name)


@pytest.mark.parametrize(
    ("name", "link", "dyadic"),
    daily((*case, dyadic) for case in UNROLLED for dyadic in (True, False)),
)
def test_unrolled_equals_interpreted(name, link, dyadic, monkeypatch):
    table = build(name, 4, 4)
    program = pj.lower(table, link=link)
    costs = make_batch(table, 9, 3, dyadic=dyadic)
    interpreted, unrolled = (pj.makespans(program, costs, unroll=u) for u in (False, True))
    np.testing.assert_allclose(unrolled, interpreted, rtol=1e-12)
    with pytest.raises(ValueError, match="unroll=True is for exact maxima, got temperature=1"):
        pj.makespans(program, costs, unroll=True, temperature=1.0)
    if dyadic:  # with ties: the same path is counted
        expected = pj.makespans_and_grad(program, costs)
        monkeypatch.setattr(unrolled_form, "MAX_VALUES_AND_WORDS", 10**4)
        monkeypatch.setattr(makespans, "MIN_UNROLLED_WORK", 0)
        kernel, built = makespans.unrolled_with_counts, []
        count = lambda *arguments: built.append(1) or kernel(*arguments)  # noqa: E731
        monkeypatch.setattr(makespans, "unrolled_with_counts", count)
        result = pj.makespans_and_grad(program, costs)
        # a program of few ops for its costs has none; accelerators have none either
        assert built or jax.default_backend() != "cpu"
        jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.slow
@pytest.mark.skipif(compiled_simd.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("per_stage", [False, True])
def test_the_benchmark_compares_with_the_same_numbers(per_stage):
    table = build("1f1b", 4, 6)
    program, costs = pj.lower(table, step_end=False), make_batch(table, 3001, 8)
    arrays = costs.forward, costs.backward, costs.transmit[:, 0, 0, 0]
    if not per_stage:
        arrays = arrays[0][:, 0], arrays[1][:, 0], arrays[2]
    result = compiled_simd.blocked(program, *arrays)()
    names = ("forward", "backward", "transmit")
    ours = pj.makespans(program, pj.Costs(**dict(zip(names, arrays, strict=True))))
    np.testing.assert_array_equal(result, ours)


@pytest.mark.parametrize("unroll", [False, True])
def test_uniform_costs_and_scalars(unroll):
    table = build("1f1b", 4, 8)
    program = pj.lower(table)
    delays = np.linspace(0, 0.1, 5)
    costs = pj.Costs.uniform(table, forward=1.0, backward=jnp.full(5, 2.0), transfer=delays)
    expected = 33 + (2 * 3 * 3 - 2) * delays
    np.testing.assert_allclose(pj.makespans(program, costs, unroll=unroll), expected)
    plain = pj.Costs(forward=1.0, backward=2.0, recompute=1.0, transmit=delays)
    values, counts = pj.makespans_and_grad(program, plain)
    np.testing.assert_allclose(values, expected)
    assert counts.forward.tolist() == [11.0] * 5
    assert counts.transmit.tolist()[1:] == [16.0] * 4
    assert counts.recompute.tolist() == [0.0] * 5
    assert pj.makespans(program, pj.Costs(forward=1.0, backward=2.0)).tolist() == [33.0]


@pytest.mark.parametrize("unroll", [False, True])
def test_arrays_may_change_after_the_call(unroll, monkeypatch):
    """A kernel that still runs must not see it, where JAX reads the caller's own memory."""
    monkeypatch.setattr(interpreter, "num_threads", lambda *_: 1)  # threads are waited for anyway
    program = pj.lower(build("1f1b", 8, 32))
    size = 100_000
    memory = np.ones(size + 16, np.float32)
    first = -memory.ctypes.data % 64 // memory.itemsize  # what is aligned, JAX does not copy
    window = memory[first : first + size]
    costs = pj.Costs(forward=window, backward=2.0)
    for _ in range(3):
        result = pj.makespans(program, costs, unroll=unroll)
        window[:] = 1000.0
        assert np.all(np.asarray(result) == 39 * 3.0)
        window[:] = 1.0


def test_float64_is_what_arrays_ask_for_and_what_numbers_have():
    """The default of JAX decides nothing outside of a trace."""
    program, exact = pj.lower(build("1f1b", 4, 16)), 19 * (0.1 + 0.2)
    single = np.float32([0.1, 0.1])
    with jax.enable_x64(False):
        for forward, dtype in {
            "a number": (0.1, np.float64),
            "float64": (np.full(2, 0.1), np.float64),
            "a scalar beside float32": (np.float64(0.1), np.float64),
            "float32": (single, np.float32),
            "on the device": (jnp.asarray(single), np.float32),
            "float16": (single.astype(np.float16), np.float32),
            "bfloat16": (jnp.asarray(single, jnp.bfloat16), np.float32),
        }.values():
            backward = 0.2 if dtype is np.float64 else np.float32(0.2)
            costs = pj.Costs(forward=forward, backward=backward, transmit=0)
            values, counts = pj.makespans_and_grad(program, costs, batch_size=2)
            for result in (pj.makespans(program, costs, batch_size=2), values):
                assert result.dtype == dtype
                rel = 1e-15 if dtype is np.float64 else 0.02
                assert result.tolist() == pytest.approx([exact] * 2, rel=rel)
            assert counts.forward.tolist() == [19.0, 19.0]
            entry = jax.tree.map(lambda leaf: leaf if np.ndim(leaf) == 0 else leaf[0], costs)
            for result in (
                pj.makespan(program, entry),
                pj.finish_times(program, entry),
                pj.analysis.slack(program, entry),
            ):
                assert result.dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@with_cases(
    "transform",
    jax.grad,
    *(
        pytest.param(way, marks=pytest.mark.slow)
        for way in (lambda f: jax.jit(jax.grad(f)), jax.jacfwd)
    ),
)
def test_gradients_of_numpy_arrays_follow_the_default(transform, dtype):
    program = pj.lower(build("1f1b", 4, 16))
    delays = np.full(3, 0.25)

    def total(delays):
        costs = pj.Costs(forward=1.0, backward=np.full(3, 2.0), transmit=delays)
        return pj.makespans(program, costs).sum()

    with jax.enable_x64(dtype is np.float64):
        slope = transform(total)(delays)
        assert slope.dtype == dtype
        assert slope.tolist() == [28.0] * 3


def test_costs_in_a_trace_that_are_no_tracers_are_numbers():
    program = pj.lower(build("1f1b", 4, 16))
    costs = pj.Costs(forward=1.0, backward=2.0)
    with jax.enable_x64(False):
        for result in (
            jax.jit(lambda x: x + pj.makespan(program, costs))(1.0),
            jax.jit(lambda x: x + pj.makespans(program, costs, batch_size=3))(1.0)[2],
            jax.vmap(lambda x: x + pj.makespans_and_grad(program, costs)[0][0])(jnp.ones(2))[1],
        ):
            assert (result, result.dtype) == (58.0, np.float32)


@pytest.mark.parametrize("unroll", [False, True])
def test_a_large_batch_goes_through_in_parts(unroll):
    table = build("gpipe", 2, 2)
    program = pj.lower(table)
    costs = make_batch(table, 1000, 2)
    whole, counts = pj.makespans_and_grad(program, costs)
    parts, others = pj.makespans_and_grad(program, costs, max_bytes=50_000)
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(counts.transmit, others.transmit)
    small = pj.makespans(program, costs, unroll=unroll, max_bytes=30_000)
    np.testing.assert_array_equal(whole, small)
    chunks = [pj.makespans(program, part(costs, slice(k, k + 250))) for k in range(0, 1000, 250)]
    np.testing.assert_array_equal(whole, np.concatenate(chunks))


@pytest.mark.parametrize(("temperature", "size"), daily(itertools.product((None, 0.5), SIZES)))
def test_batches_of_any_size(size, temperature, monkeypatch):
    table = build("1f1b", 3, 4)
    program, costs = pj.lower(table), make_batch(table, size, 4)
    run = functools.partial(pj.makespans_and_grad, program, temperature=temperature)
    values, counts = run(costs)
    rows = np.unique(np.linspace(0, size - 1, 50, dtype=int))
    few, fewer = run(part(costs, rows))
    np.testing.assert_allclose(np.asarray(values)[rows], few, rtol=1e-12)
    for field in FIELDS:
        result = np.asarray(getattr(counts, field))
        assert result.shape == np.shape(getattr(costs, field))
        np.testing.assert_allclose(result[rows], getattr(fewer, field), rtol=1e-9, atol=1e-12)
    copied = "pipejax.engine.batched.makespans.MIN_UNCOPIED_NUMBERS"
    monkeypatch.setattr(copied, 0 if size > 128 else 10**9)
    # threads even for a short program
    monkeypatch.setattr("pipejax.engine.batched.interpreter.MIN_WORK_OF_THREAD", 1)
    again, others = run(costs)
    np.testing.assert_allclose(again, values, rtol=1e-12)
    np.testing.assert_allclose(others.forward, counts.forward, rtol=1e-9, atol=1e-12)


def test_a_program_may_fill_its_bucket():
    """No op is left over, into whose row edges that lead nowhere could be written."""
    table = build("gpipe", 1, 255)
    program, costs = pj.lower(table), pj.Costs(forward=np.ones(2), backward=2.0, update=1.0)
    code = forward_program(ops := binary_ops(program), cost_rows(program, costs)).code
    assert ops.num_ops == len(code)
    values, counts = pj.makespans_and_grad(program, costs)
    assert values.tolist() == [766.0] * 2
    assert counts.forward.tolist() == counts.backward.tolist() == [255.0] * 2
    assert counts.update.tolist() == [1.0] * 2


@pytest.mark.parametrize(("workers", "microbatches"), [(4, 400), (2, 2500)])
def test_gradients_of_long_programs(workers, microbatches):  # counted in stretches, as floats
    table = build("1f1b", workers, microbatches)
    program, costs = pj.lower(table), make_batch(table, 3, 6)
    values, counts = pj.makespans_and_grad(program, costs)
    expected, gradients = one_by_one(program, costs, 3)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(counts, name), gradients[name], name)


def test_an_accelerator_takes_one_wide_tile(monkeypatch):
    table = build("gpipe", 2, 2)
    program, costs = pj.lower(table), make_batch(table, 1003, 4)
    expected = pj.makespans_and_grad(program, costs)
    interpreter._compile.cache_clear()
    # another function for JAX, that no trace of this one serves the other backend
    monkeypatch.setattr(interpreter, "_run", functools.partial(interpreter._run))
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    sizes, in_blocks = [], interpreter._in_blocks

    def note_blocks(solve, *, size, block):
        sizes.append((size, block))
        return in_blocks(solve, size=size, block=block)

    monkeypatch.setattr(interpreter, "_in_blocks", note_blocks)
    values, counts = pj.makespans_and_grad(program, costs)
    interpreter._compile.cache_clear()
    assert sizes == [(1003, 1000)]
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(counts.transmit, expected[1].transmit)


def test_smooth_makespan_is_log_sum_exp_over_predecessors():
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    program = pj.lower(pj.ScheduleTable.from_rows(rows), step_end=False)
    temperature, values = 0.5, {0: 0.0}
    node = price(program, pj.Costs(forward=1.0, backward=2.0, transmit=0.25))
    for v in range(1, program.num_nodes):
        edges = zip(program.preds[v].tolist(), node.lag[v].tolist(), strict=True)
        arrivals = [values[u] + lag for u, lag in edges if u or lag] or [0.0]
        latest = temperature * np.logaddexp.reduce(np.array(arrivals) / temperature)
        values[v] = node.duration[v] + latest
    sinks = set(range(1, program.num_nodes)) - set(program.preds.ravel().tolist())
    expected = temperature * np.logaddexp.reduce([values[v] / temperature for v in sinks])
    costs = pj.Costs(forward=np.ones(1), backward=2.0, transmit=0.25)
    smooth = pj.makespans(program, costs, temperature=temperature)
    assert float(smooth[0]) == pytest.approx(expected, rel=1e-12)


def test_smooth_gradient_is_that_of_the_smooth_makespan():
    table = build("hanayo", 2, 4)
    program, costs, h = pj.lower(table), make_batch(table, 2, 8), 1e-6
    values, slopes = pj.makespans_and_grad(program, costs, temperature=0.2)
    for field, place in itertools.product(("forward", "transmit"), (0, -1)):
        moved = np.array(getattr(costs, field))
        moved[..., place] += h
        higher = pj.makespans(program, but(costs, **{field: moved}), temperature=0.2)
        slope = np.asarray(getattr(slopes, field))[..., place].reshape(2, -1).sum(axis=1)
        np.testing.assert_allclose((higher - values) / h, slope, atol=1e-4)


def test_programs_of_a_size_have_the_shapes_of_one():
    """So their gradients compile once, however many slots, edges and uses of costs they have."""
    shapes = set()
    for name in ("gpipe", "1f1b", "chimera", "hanayo", "zb-h1"):
        for count, message in itertools.product((70, 128), (0.5, np.ones((9, 3)))):
            program = pj.lower(build(name, 4, count))
            costs = pj.Costs(forward=np.ones(9), backward=2.0, transmit=message)
            if np.ndim(message) and name == "hanayo":
                costs = but(costs, transmit=np.ones((9, 7)))
            ops, rows = binary_ops(program), cost_rows(program, costs)
            parts = forward_program(ops, rows), backward_program(ops, rows)
            leaves, structure = jax.tree.flatten(parts)
            shapes.add(f"{structure} {[leaf.shape for leaf in leaves]}")
    assert len(shapes) == 1
    long = build("1f1b", 4, 64)
    assert binary_ops(pj.lower(long)).num_slots < 20  # slots are reused


def test_the_environment_and_other_backends_go_before_options_of_the_compiler(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    options = {"xla_cpu_prefer_vector_width": 512, "xla_backend_optimization_level": 2}
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    assert cpu_options(**options, xla_no_such_option=1) == {"xla_cpu_prefer_vector_width": 512}
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert cpu_options(**options) == {}


@pytest.mark.parametrize("unroll", [False, True])
def test_other_costs_compile_nothing(unroll):
    table = build("1f1b", 2, 4)
    program = pj.lower(table)
    pj.makespans(program, make_batch(table, 50, 1), unroll=unroll)
    again = make_batch(table, 50, 2)
    assert compilations(lambda: pj.makespans(program, again, unroll=unroll)) == 0


@pytest.mark.parametrize("function", [pj.makespans, pj.makespans_and_grad])
@pytest.mark.parametrize("wrong", [-1.0, np.nan])
def test_batches_that_no_constructor_checked_are_refused(function, wrong):
    program = pj.lower(build("gpipe", 4, 2))
    costs = unchecked_costs({"forward": np.array([1.0, wrong])})
    with pytest.raises(ValueError, match="forward must be finite and at least 0"):
        function(program, costs)


@given(case=st.booleans().flatmap(lambda b: strategies.cases(by_microbatch=b)), link=LINKS)
@settings(max_examples=10)
def test_slack_is_what_a_node_may_take_longer(case, link):
    program = strategies.padded(pj.lower(case.table, link=link), num_nodes=512, max_preds=8)
    costs = price(program, case.costs)
    late = np.asarray(pj.analysis.slack(program, case.costs))
    finish = np.asarray(pj.finish_times(program, case.costs))
    assert np.all(late >= 0)
    path = critical_path(program.preds, costs)
    np.testing.assert_allclose(late[np.asarray(path.nodes)], 0, atol=1e-12)
    node = int(np.argmax(late[1:])) + 1
    for more, grows in ((late[node], 0.0), (late[node] + 1, 1.0)):
        duration = np.array(costs.duration)
        duration[node] += more
        longer = critical_path(program.preds, NodeCosts(duration, costs.lag)).finish
        assert float(longer.max()) == pytest.approx(float(finish.max()) + grows)


def test_costs_may_be_scalars_of_jax():
    """Arrays without axes, of the type of the batch: each is the same for all configurations."""
    table = build("1f1b", 2, 3)
    costs = pj.Costs(forward=jnp.asarray(np.float64(1.0)), backward=jnp.asarray(np.float64(2.0)))
    assert pj.makespans(pj.lower(table), costs).tolist() == [12.0]


EMPTY_BATCHES = {
    "stages": {"forward": np.zeros((0, 1)), "backward": np.ones((1, 1))},
    "numbers": {"forward": np.zeros(0), "backward": 1.0},
    "unread": {"forward": 1.0, "backward": 1.0, "offload": np.zeros((0, 1))},
    "float32": {"forward": np.zeros((0, 2), np.float32), "backward": np.float32(1)},
}


@pytest.mark.parametrize("name", EMPTY_BATCHES)
def test_an_empty_batch_has_no_makespans(name):
    program = pj.lower(build("1f1b", 2, 3))
    costs = pj.Costs(**EMPTY_BATCHES[name])
    dtype = np.float32 if name == "float32" else np.float64
    for options in ({}, {"temperature": 0.1}, {"unroll": True}):
        values = pj.makespans(program, costs, **options)
        assert values.shape == (0,)
        assert values.dtype == dtype
    values, counts = pj.makespans_and_grad(program, costs)
    assert values.shape == (0,)
    assert all(leaf.shape[0] == 0 for leaf in jax.tree.leaves(counts))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_transformations_of_an_empty_batch_are_empty(shape):
    table = build("1f1b", 2, 3)
    program = pj.lower(table)

    def times(forward):
        return pj.makespans(program, pj.Costs.uniform(table, forward=forward, backward=1.0))

    for _ in shape[1:]:
        times = jax.vmap(times)
    empty = jnp.zeros(shape)
    for function in (times, jax.jit(times), jax.grad(lambda batch: times(batch).sum())):
        assert function(empty).shape == shape


def test_a_large_batch_of_a_long_program_gives_what_its_parts_give():
    """The large one goes by levels over all cores, its last block overlapping, and no part does."""
    program = pj.lower(build("1f1b", 4, 256))
    rng = np.random.default_rng(1)
    times = {name: rng.random((5003, 4), np.float32) for name in ("forward", "backward")}
    values = pj.makespans(program, pj.Costs(**times))
    for low in (0, 2001, 4600):
        part = {name: time[low : low + 403] for name, time in times.items()}
        np.testing.assert_array_equal(values[low:][:403], pj.makespans(program, pj.Costs(**part)))


# several devices and several processes give what one device gives
TESTS = Path(__file__).parent
ON_SEVERAL = (TESTS / "data" / "program_on_devices.txt").read_text()


def run_process(arguments, **environment):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, **streams)


def output(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def numbers(lines):
    return np.concatenate([np.fromstring(line.strip("[]"), sep=",") for line in lines.splitlines()])


@with_cases("sizes", "(20_001,)", pytest.param("(100, 20_001)", marks=pytest.mark.slow))
def test_sharded_equals_unsharded(sizes, capsys):
    several = "--xla_force_host_platform_device_count=3"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {several}"
    result = output(run_process(["-c", ON_SEVERAL.format(devices=3, sizes=sizes)], XLA_FLAGS=flags))
    exec(ON_SEVERAL.format(devices=1, sizes=sizes), {})
    np.testing.assert_allclose(numbers(result), numbers(capsys.readouterr().out), rtol=1e-12)


@pytest.mark.slow
def test_two_processes_share_a_batch():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(TESTS / "two_processes.py")
    both = [run_process([script, port, number]) for number in "01"]
    lines = [output(process).split() for process in both]
    assert [line[:2] for line in lines] == [["process", "0:"], ["process", "1:"]]


def test_threads_keep_the_precision_of_their_caller():
    """A context of float64 belongs to one thread; the batch is shared by several."""
    code = """
import jax, numpy as np, pipejax as pj
table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=64)
times = np.random.default_rng(0).uniform(1, 2, 20_000)
with jax.enable_x64(True):
    costs = pj.Costs(forward=times, backward=2.0)
    print(np.abs(np.asarray(pj.makespans(pj.lower(table), costs)) / (71 * (times + 2)) - 1).max())
"""
    assert float(output(run_process(["-c", code], XLA_FLAGS=""))) < 1e-14


def test_layouts_that_make_no_sense_are_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    leaf = jax.device_put(np.ones((4, 4)), NamedSharding(mesh, PartitionSpec(None, "x")))
    assert batch_sharding({"forward": leaf}) is None  # one device is no layout
    code = """
import jax, numpy as np, pipejax as pj
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), "x")
put = lambda spec: jax.device_put(np.ones((4, 4)), NamedSharding(mesh, spec))
program = pj.lower(pj.schedules.build("gpipe", num_workers=4, num_microbatches=2))
try:
    pj.makespans(program, pj.Costs(forward=put(P(None, "x")), backward=0.0))
except ValueError as error:
    print(error)
"""
    flags = "--xla_force_host_platform_device_count=2"
    shown = output(run_process(["-c", code], XLA_FLAGS=flags))
    assert "forward lies on several devices as" in shown
