"""The public names: a list that changes on purpose, each documented with an example."""

import inspect
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from public_names import NAMES, PARTS, get_classes, public

import pipejax as pj
from pipejax.engine.pricing import NodeCosts
from pipejax.engine.recurrence import critical_path

RESULT = {"write_table": "Raises:", "schedules.register": "Raises:"}


def test_names():
    for names in NAMES.values():
        assert names == sorted(names, key=lambda name: (not name[0].isupper(), name))
    assert 40 <= len(NAMES[""]) - len(NAMES) + 1 <= 46


def test_a_name_stands_in_one_place():
    rooms = ("schedules", "traces")  # verbs that say whose they are by the namespace alone
    names = [name for room, names in NAMES.items() if room not in rooms for name in names]
    assert sorted(names) == sorted(set(names))


def test_no_name_hides_a_module():
    """As `pj.search.messages` would if there were a file search/messages.py."""
    for room, names in NAMES.items():
        folder = Path(pj.__file__).parent / room
        inside = {path.stem for path in folder.glob("*")} if folder.is_dir() else set()
        values = {name: attrgetter(f"{room}.{name}".lstrip("."))(pj) for name in names}
        modules = {name for name, value in values.items() if inspect.ismodule(value)}
        assert inside & set(names) == modules & inside


def test_functions_document_arguments_results_and_show_an_example():
    for name in public():
        function = attrgetter(name)(pj)
        if not inspect.isfunction(function) or name in PARTS or name.startswith("plots."):
            continue
        text = inspect.getdoc(function) or ""
        parameters = inspect.signature(function).parameters
        for section in ("Args:" if parameters else "", RESULT.get(name, "Returns:"), ">>>"):
            assert section in text, (name, section)
        for parameter in parameters:
            assert f"{parameter}:" in text, (name, parameter)


def test_what_functions_return_is_public():
    values = {name: attrgetter(name)(pj) for name in public()}
    classes = {value for value in values.values() if inspect.isclass(value)}
    for name in values.keys() - PARTS:
        if inspect.isfunction(values[name]):
            returned = set(get_classes(inspect.signature(values[name]).return_annotation))
            assert returned <= classes, (name, returned - classes)


def test_only_the_public_names_are_shown():
    assert dir(pj) == sorted(pj.__all__)
    for wrong in ("evalute", "_pytest"):
        with pytest.raises(AttributeError, match=f"no attribute '{wrong}'"):
            getattr(pj, wrong)
    with pytest.raises(AttributeError, match="has no attribute 'Cost'"):
        _ = pj.costing.Cost


def test_everything_public_is_documented():
    for name in public():
        value = attrgetter(name)(pj)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_importing_changes_nothing():
    assert jax.config.jax_enable_x64  # set by the tests, not by the library
    assert not hasattr(pj, "config")
    assert pj.__version__ == metadata.version("pipejax")


SEARCHES = pj.optimize, pj.search.deals, pj.search.layers, pj.search.messages
SEARCHES += pj.search.microbatches, pj.search.places


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_end_after_the_same_time(search):
    takes = inspect.signature(search).parameters
    assert takes["time_limit"].default == 60.0
    assert "seed" not in takes or takes["seed"].default == 0


# With --jaxtyping-packages the types and shapes in signatures are executed; else they are not


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
