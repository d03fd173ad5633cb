"""Schedules with more microbatches than they were lowered with, against building them in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.costs import unchecked_costs
from pipejax.engine.steady_state import steady_state

pytestmark = pytest.mark.compiles

FIELDS = ("forward", "backward", "all_reduce", "update", "latency", "transmit")
GROWING = [
    ("1f1b", 4, 16, 1),
    ("gpipe", 4, 16, 1),
    ("eager-1f1b", 4, 16, 1),
    ("interleaved-1f1b", 4, 16, 4),
    ("chimera", 4, 16, 4),
    ("hanayo", 2, 32, 7),
]


def lowered(name, workers, microbatches, link="delay", **options):
    table = pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches)
    return pj.lower(table, link=link, **options)


def random_costs(program, size, seed, *, dyadic=False):
    """Random costs per stage and link; dyadic ones tie often."""
    rng = np.random.default_rng(seed)
    stages, pipes = program.layout.num_stages, program.layout.num_pipes
    shapes = dict.fromkeys(FIELDS[:4], (size, stages))
    shapes |= dict.fromkeys(FIELDS[4:], (size, 2, pipes, stages - 1))
    draw = lambda shape: rng.integers(0, 9, shape) / 8 if dyadic else rng.random(shape)  # noqa: E731
    return pj.Costs(**{name: draw(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(("name", "workers", "microbatches", "step"), GROWING)
@pytest.mark.parametrize("link", ["delay", "queued", "blocking", "rendezvous"])
def test_grown_equals_built(name, workers, microbatches, step, link):
    program = lowered(name, workers, microbatches, link)
    assert steady_state(program).microbatches == step
    for more, dyadic in ((1, True), (5, False)):
        count = microbatches + more * step
        costs = random_costs(program, 3, more, dyadic=dyadic)
        grown = pj.extrapolated_makespans(program, costs, num_microbatches=count)
        built = pj.makespans(lowered(name, workers, count, link), costs)
        np.testing.assert_allclose(grown, built, rtol=1e-13)


@pytest.mark.parametrize("microbatches", [33, 100, 1023, 4096])
def test_1f1b_at_many_microbatches(microbatches):
    program = lowered("1f1b", 8, 32)
    costs = random_costs(program, 2, microbatches)
    grown = pj.extrapolated_makespans(program, costs, num_microbatches=microbatches)
    built = pj.makespans(lowered("1f1b", 8, microbatches), costs)
    np.testing.assert_allclose(grown, built, rtol=1e-13)


@pytest.mark.parametrize(("name", "workers", "microbatches", "step"), GROWING)
@pytest.mark.parametrize("link", ["delay", "rendezvous"])
def test_cycle_time_is_the_growth_of_the_makespan(name, workers, microbatches, step, link):
    program = lowered(name, workers, microbatches, link)
    costs = random_costs(program, 4, 7)
    few, many = (
        np.asarray(
            pj.extrapolated_makespans(program, costs, num_microbatches=microbatches + step * k)
        )
        for k in (2520 * 1000, 2520 * 2000)  # a multiple of the cycle's own period up to 10
    )
    slope = (many - few) / (2520 * 1000 * step)
    np.testing.assert_allclose(pj.cycle_time(program, costs), slope, rtol=1e-9)


def test_cycle_time_without_messages_is_the_slowest_worker():
    program = lowered("1f1b", 4, 16)
    forward, backward = np.array([[1.0, 2.0, 1.5, 1.0]]), np.array([[2.0, 2.0, 3.0, 2.0]])
    costs = pj.Costs(forward=forward, backward=backward)
    assert pj.cycle_time(program, costs).tolist() == [4.5]
    both = lowered("gpipe", 4, 16)  # the slowest forward and the slowest backward
    assert pj.cycle_time(both, costs).tolist() == [5.0]


def test_gradients_sum_to_the_makespan():
    program = lowered("1f1b", 4, 16)
    batch = random_costs(program, 1, 3)
    leaves = {name: jnp.asarray(getattr(batch, name)[0]) for name in FIELDS}

    def total(leaves):
        costs = pj.Costs(**{name: leaf[None] for name, leaf in leaves.items()})
        return pj.extrapolated_makespans(program, costs, num_microbatches=1000)[0]

    value, slopes = jax.value_and_grad(total)(leaves)
    found = sum(float((leaves[name] * slopes[name]).sum()) for name in FIELDS)
    assert found == pytest.approx(float(value), rel=1e-12)
    counts = jax.grad(pj.makespan, argnums=1)(lowered("1f1b", 4, 1000), pj.Costs(**leaves))
    for name in FIELDS:
        np.testing.assert_allclose(slopes[name], getattr(counts, name), err_msg=name)


def test_scalars_and_single_precision():
    program = lowered("1f1b", 8, 32)
    exact = 3.0 * (10**6 + 7)
    costs = pj.Costs(forward=1.0, backward=2.0)
    assert pj.extrapolated_makespans(program, costs, num_microbatches=10**6).tolist() == [exact]
    with jax.enable_x64(False):
        single = pj.Costs(forward=np.ones(3, np.float32), backward=np.full(3, 2, np.float32))
        values = pj.extrapolated_makespans(program, single, num_microbatches=10**6)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, [exact] * 3, rtol=1e-6)


def test_wrong_numbers_of_microbatches_are_refused():
    program, costs = lowered("interleaved-1f1b", 4, 16), pj.Costs(forward=1.0, backward=2.0)
    for count in (12, 18):
        with pytest.raises(ValueError, match=f"num_microbatches={count}: a period is for 4 micro"):
            pj.extrapolated_makespans(program, costs, num_microbatches=count)
    with pytest.raises(ValueError, match="backward must be finite"):
        pj.extrapolated_makespans(program, unchecked_costs({"backward": -1.0}), num_microbatches=20)
    with pytest.raises(ValueError, match="forward must be finite"):
        pj.cycle_time(program, unchecked_costs({"forward": -1.0}))


@pytest.mark.parametrize(("name", "microbatches"), [("1f1b", 2), ("gpipe", 1), ("hanayo", 4)])
def test_a_short_schedule_has_no_period(name, microbatches):
    program = lowered(name, 4, microbatches)
    with pytest.raises(ValueError, match=r"hold no period: .* lower it with more microbatches"):
        pj.cycle_time(program, pj.Costs(forward=1.0))


def test_an_irregular_schedule_has_no_period():
    rng = np.random.default_rng(1)
    phases = ["F", "B"]
    row, done = [], {"F": 0, "B": 0}
    while min(done.values()) < 40:
        phase = phases[int(rng.integers(2))]
        if done[phase] < (40 if phase == "F" else done["F"]):
            row.append(f"0{phase}{done[phase]}")
            done[phase] += 1
    program = pj.lower(pj.ScheduleTable.from_rows([row]))
    with pytest.raises(ValueError, match="hold no period"):
        pj.cycle_time(program, pj.Costs(forward=1.0))
