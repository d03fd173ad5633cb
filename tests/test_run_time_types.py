"""With --jaxtyping-packages the types and shapes in signatures are executed; else they are not."""

import inspect
from operator import attrgetter

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from public_names import public

import pipejax as pj
from pipejax.engine.pricing import NodeCosts
from pipejax.engine.recurrence import critical_path


@pytest.fixture
def asked(request):
    return request.config.getoption("--jaxtyping-packages") is not None


def checks(call):
    try:
        call()
    except jaxtyping.TypeCheckError:
        return True
    except Exception:
        return False
    return False


def test_wrong_types_are_found_where_asked(asked):
    assert checks(lambda: pj.lower("1f1b")) == asked


def test_wrong_shapes_are_found_where_asked(asked):
    program = pj.lower(pj.schedules.build("1f1b", num_workers=2, num_microbatches=2))
    costs = NodeCosts(jnp.zeros((3,)), jnp.zeros((4, 2)))  # of other numbers of nodes
    assert checks(lambda: critical_path(program.preds, costs)) == asked


def test_every_public_function_is_checked_where_asked(asked):
    if asked:
        values = [attrgetter(name)(pj) for name in public()]
        functions = [f for f in values if inspect.isfunction(f)]
        assert [f.__name__ for f in functions if not hasattr(f, "__wrapped__")] == []


@pytest.mark.parametrize("result", [pj.evaluate, pj.compare, pj.explain])
def test_results_of_known_numbers_name_the_function_for_traced_ones(result):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    for transform in (jax.grad, jax.jit, jax.vmap):
        number = jnp.ones(2) if transform is jax.vmap else 1.0
        with pytest.raises(TypeError, match=r"got traced values .*: pj.makespan\(pj.lower\(table"):
            transform(lambda f: result(table, pj.Costs(forward=f, backward=2.0)))(number)
