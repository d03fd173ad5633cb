"""Numbers of many configurations: against the same function of each, and against JAX's slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.base.many_numbers import FUNCTIONS, Many
from pipejax.costs import array_functions as xp

SIZE = 5
SHARED = np.array([[0.5, 2.0, 4.0]])
ONE = np.random.default_rng(0).uniform(0.5, 3.0, (SIZE, 3))
OTHER = np.random.default_rng(1).uniform(0.5, 3.0, (SIZE, 2, 3))


CASES = {
    "sums": lambda x, y, z: 2 - x + (y - 1.5) - z + 1.0,
    "products": lambda x, y, z: 3 * x * y / z / 2 + 1 / x,
    "powers": lambda x, y, z: x**2.5 + y**z + np.arange(3.0) ** (1 + z),
    "zero times": lambda x, y, z: np.zeros(3) * x + y * 0.0 + np.zeros((2, 3)) / z,
    "remainders": lambda x, y, z: x % 0.7 < 0.3,
    "comparisons": lambda x, y, z: ~((x >= 1) & (x <= 2)) & (y > z),
    "equals": lambda x, y, z: xp.equal(xp.floor(x), xp.round(y)) == (x < y),
    "extrema": lambda x, y, z: xp.maximum(x, y) - xp.minimum(z, xp.clip(x, 0.8, 1.2)),
    "choice": lambda x, y, z: xp.where(x > 1, y, z * x) + xp.where(np.arange(3) > 1, x, 0.0),
    "logarithms": lambda x, y, z: xp.log2(x) + xp.log1p(y) * xp.exp(-z),
    "stacked": lambda x, y, z: xp.stack([x, z, np.ones(3)], axis=-1) * y[0, 1],
    "joined": lambda x, y, z: xp.concatenate([y, x[None], z[None]], axis=0).sum(axis=0),
    "split": lambda x, y, z: xp.split(xp.concatenate([x, z, y.ravel()]), [2, 5])[1] * 2,
    "shapes": lambda x, y, z: xp.broadcast_to(x[:, None] * y[1], (4, 3, 3)).reshape(4, 9)[1:, ::2],
    "totals": lambda x, y, z: xp.sum(y) + x.sum() + xp.cumsum(y, axis=1)[:, :-1].sum(axis=-1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_of_many_is_that_of_each_with_the_slopes_of_jax(case):
    function = CASES[case]
    options = [
        Many(ONE, {"x": np.broadcast_to(np.eye(3)[None], (1, 3, 3))}),
        Many(OTHER),
        Many(SHARED, {"z": np.ones((1, 1, 3))}),  # one number moves all entries
    ]
    result = function(*options)
    value = np.broadcast_to(result.value, (SIZE, *result.shape))
    slopes = {"x": 3, "z": 1}
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        for row in range(SIZE):
            x, y, z = ONE[row], OTHER[row], SHARED[0]
            np.testing.assert_array_equal(value[row], function(x, y, z))
            if value.dtype == bool:
                continue
            along = jax.jacfwd(lambda x, m, y=y, z=z: function(x, jnp.array(y), z + m), (0, 1))
            for (name, count), slope in zip(
                slopes.items(), along(jnp.asarray(x), 0.0), strict=True
            ):
                is_own = np.zeros((count, *result.shape))
                if name in result.slopes:
                    part = result.slopes[name]
                    is_own = np.broadcast_to(part, (SIZE, *part.shape[1:]))[row]
                expected = np.moveaxis(np.asarray(slope).reshape(*result.shape, count), -1, 0)
                np.testing.assert_allclose(is_own, expected, rtol=1e-13, atol=1e-15, err_msg=name)


def test_what_all_share_is_computed_once():
    shared, apart = Many(SHARED, {"z": np.ones((1, 1, 3))}), Many(ONE, {"x": np.ones((1, 1, 3))})
    assert (shared * 2 + 1).value.shape == (1, 3)
    assert {*(apart * shared).slopes} == {"x", "z"}
    first, rest = xp.split(xp.concatenate([shared, apart]), [3])
    assert [part.value.shape for part in (first, rest)] == [(1, 3), (SIZE, 3)]
    assert [{*part.slopes} for part in (first, rest)] == [{"z"}, {"x"}]


def test_equal_ones_share_an_extremum_as_in_jax():
    tie = Many(np.ones((1, 1)), {"x": np.ones((1, 1, 1))})
    for name in ("maximum", "minimum"):
        assert FUNCTIONS[name](tie, 1.0).slopes["x"].item() == 0.5
