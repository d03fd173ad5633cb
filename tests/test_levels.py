"""Values level by level: equal to the recurrence, and to the interpreter, to the last bit."""

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax.engine.batched.binary_program import Task, binary_ops, forward_program
from pipejax.engine.batched.cost_rows import batch_leaves, cost_rows
from pipejax.engine.batched.interpreter import interpreted_makespans, level_program

CASES = (
    ("1f1b", 3, "delay", "float32"),
    ("interleaved-1f1b", 4, "queued", "float64"),
    ("chimera", 4, "rendezvous", "float32"),
    ("zb-v", 4, "delay", "float32"),
    ("zb-h1", 3, "rendezvous", "float64"),
    ("interleaved-zb", 4, "queued", "float32"),
)


def _case(name, workers, link, size, dtype):
    """A program by levels, the same as the interpreter takes it, and a batch with ties and zeros."""
    table = pj.schedules.build(name, num_workers=workers, num_microbatches=2 * workers)
    program = pj.lower(table, link=link)
    rng = np.random.default_rng(0)
    # whole quarters, zeros among them, make ties; the last configurations are of any number
    shapes = {"forward": table.num_stages, "backward": table.num_stages, "update": 1}
    times = {
        field: np.concatenate([rng.integers(0, 4, (20, width)) / 4, rng.random((size - 20, width))])
        for field, width in shapes.items()
    }
    times |= {"latency": times["forward"][:, 0] / 2, "transmit": times["backward"][:, 0]}
    costs = pj.Costs(**{field: time.astype(dtype) for field, time in times.items()})
    ops, rows = binary_ops(program), cost_rows(program, costs)
    leaves, _ = batch_leaves(costs, program.layout)
    interpreted = Task(forward_program(ops, rows), None)
    return program, costs, level_program(ops, rows), interpreted, rows.pieces(leaves)


@pytest.mark.parametrize(("name", "workers", "link", "dtype"), CASES)
def test_values_by_level_are_those_of_the_interpreter(name, workers, link, dtype):
    with jax.enable_x64(dtype == "float64"):
        _, _, by_level, interpreted, pieces = _case(name, workers, link, 300, dtype)
        values, counts = interpreted_makespans(by_level, pieces)
        np.testing.assert_array_equal(values, interpreted_makespans(interpreted, pieces)[0])
    assert counts is None


def test_values_by_level_are_those_of_the_recurrence():
    with jax.enable_x64(True):
        program, costs, by_level, _, pieces = _case("zb-v", 4, "queued", 40, "float64")
        values, _ = interpreted_makespans(by_level, pieces)
    for k in range(0, 40, 3):
        single = pj.Costs(**{f: leaf[k] for f, leaf in vars(costs).items() if np.ndim(leaf)})
        assert values[k] == pj.makespan(program, single)


def test_a_large_batch_of_a_long_program_gives_what_its_parts_give():
    """The large one goes by levels over all cores, its last block overlapping, and no part does."""
    program = pj.lower(pj.schedules.build("1f1b", num_workers=4, num_microbatches=256))
    rng = np.random.default_rng(1)
    times = {name: rng.random((5003, 4), np.float32) for name in ("forward", "backward")}
    values = pj.makespans(program, pj.Costs(**times))
    for low in (0, 2001, 4600):
        part = {name: time[low : low + 403] for name, time in times.items()}
        np.testing.assert_array_equal(values[low:][:403], pj.makespans(program, pj.Costs(**part)))
