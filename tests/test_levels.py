"""Values level by level: equal to the recurrence, and to the interpreter, to the last bit."""

import numpy as np

import pipejax as pj


def test_a_large_batch_of_a_long_program_gives_what_its_parts_give():
    """The large one goes by levels over all cores, its last block overlapping, and no part does."""
    program = pj.lower(pj.schedules.build("1f1b", num_workers=4, num_microbatches=256))
    rng = np.random.default_rng(1)
    times = {name: rng.random((5003, 4), np.float32) for name in ("forward", "backward")}
    values = pj.makespans(program, pj.Costs(**times))
    for low in (0, 2001, 4600):
        part = {name: time[low : low + 403] for name, time in times.items()}
        np.testing.assert_array_equal(
            values[low : low + 403], pj.makespans(program, pj.Costs(**part))
        )
