"""Views of results: a short `repr`, and a table in notebooks, whatever their size."""

import copy
import dataclasses
import inspect
import pickle
import typing
from operator import attrgetter
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from justhtml import JustHTML
from public_names import PARTS, get_classes, public

import pipejax as pj
from pipejax.base.display import MAX_REPR, ResultDict, ResultList, with_short_repr
from pipejax.costs.measured.measured_rows import COLUMNS, MeasuredRows

HOSTILE = "<script>alert('&\"')</script>\x00\u2028" * 100


def public_types():
    """Classes that users name or get: those of the public functions and methods, and their fields."""
    parts = ("plots.", "schedules.")
    names = [name for name in public() if name not in PARTS and not name.startswith(parts)]
    doors = [attrgetter(name)(pj) for name in names]
    result, waiting = {}, [d for d in doors if callable(d)]
    while waiting:
        door = waiting.pop()
        if not inspect.isclass(door):
            waiting += get_classes(inspect.signature(door).return_annotation)
        elif door not in result and (dataclasses.is_dataclass(door) or issubclass(door, tuple)):
            result[door] = door.__name__
            waiting += [m for n, m in vars(door).items() if n[0] != "_" and inspect.isfunction(m)]
            for hint in typing.get_type_hints(door).values():
                waiting += get_classes(hint)
    return sorted(result, key=lambda record: record.__name__)


class Filler:
    """Values for fields, by what is written where they are declared; texts are hostile."""

    def __init__(self):
        table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
        costs = pj.Costs(forward=1.0, backward=2.0)
        run = pj.evaluate(table, costs)
        self.records = {"ScheduleTable": table, "Costs": costs, "Program": run.program}
        self.records |= {"Evaluation": run, "Links": run.links, "Phase": pj.Phase.F}
        grid = {"schedules": "1f1b", "workers": 4, "models": "gpt-22b", "systems": "h100"}
        grid |= {"microbatch_size": [*range(1, 200)], "minibatch": 10**6}
        chimera = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
        form = pj.formula(pj.lower(chimera))
        self.records |= {"Sweep": pj.read_sweep(grid), "Formula": form, "Envelope": form.envelope}
        self.records |= {"LinearCosts": form.costs, "Cone": form.envelope.cone}
        columns = dict.fromkeys((*COLUMNS, "model", "variance", "row", "file"), np.ones((64, 1024)))
        self.records["MeasuredRows"] = MeasuredRows((pj.load_model("gpt-22b"),), columns)
        self.first = {
            "Mapping[str, float": {f"{HOSTILE}{k}": k / 3 for k in range(100)},
            "Mapping[str, Any]": {f"{k}": HOSTILE for k in range(100)},
            "Mapping": {f"{k}": np.ones(100) for k in range(100)},
            "Array": np.ones((64, 1024)),
            "ndarray": np.ones((64, 1024)),
            "tuple[str": (HOSTILE,) * 100,
            "tuple": tuple(range(1000)),
            "Sequence": tuple(range(1000)),
            "list": [HOSTILE] * 1000,
            "str": HOSTILE,
            "bool": True,
            "int": 10**12,
            "float": 1 / 3,
        }

    def value(self, annotation):
        ours = list(get_classes(annotation))
        text = getattr(annotation, "__name__", "") + str(annotation)
        if ours and not text.startswith(("tuple", "list")):
            return self.example(ours[0])
        result = (value for part, value in self.first.items() if part in text)
        return next(result, np.ones((64, 1024)))

    def example(self, record):
        """An instance with large values in all of its fields; no constructor checks them."""
        if record.__name__ not in self.records:
            hints = typing.get_type_hints(record)
            values = {name: self.value(hint) for name, hint in hints.items() if name[0] != "_"}
            is_tuple = issubclass(record, tuple)
            built = record(*values.values()) if is_tuple else object.__new__(record)
            for name, value in () if issubclass(record, tuple) else values.items():
                object.__setattr__(built, name, value)
            self.records[record.__name__] = built
        return self.records[record.__name__]


@pytest.fixture(scope="module")
def filler():
    return Filler()


@pytest.mark.parametrize("record", public_types(), ids=lambda entry: entry.__name__)
def test_a_result_of_any_size_is_short_and_valid(record, filler):
    built = filler.example(record)
    assert len(repr(built)) <= MAX_REPR
    assert repr(built).startswith(f"{record.__name__}(")
    if hasattr(built, "_repr_html_"):
        check(built._repr_html_())


def check(text):
    """Assert that a table is valid HTML and XML, stands alone, and shows texts as texts."""
    JustHTML(text, strict=True, fragment=True)
    if text.startswith("<div>"):  # the table of something that is drawn below it
        ElementTree.fromstring(text)
        text = text.removeprefix("<div>").partition("<svg")[0]
    for part in ElementTree.fromstring(text).iter():
        assert part.tag in ("table", "caption", "tbody", "tr", "th", "td", "b", "br", "span")
        assert set(part.attrib) <= {"style", "title"}
        assert "color" not in part.get("style", "")  # of the page, light or dark
    assert len(text) < 60_000


@pytest.fixture(scope="module")
def large():
    """A table of 64 workers and 1024 microbatches."""
    return pj.schedules.build("1f1b", num_workers=64, num_microbatches=1024)


def test_large_tables_and_batches_of_costs(large):
    assert "64 workers" in repr(large)
    assert len(repr(large)) < 100
    check(large._repr_html_())
    batch = pj.Costs(forward=np.ones((10**4, 64)), backward=np.full((10**4, 64), 2.0))
    assert repr(batch).startswith("Costs(forward=float64[10000, 64], backward=float64[10000, 64]")
    assert "float64[10000, 64], 2 to 2" in batch._repr_html_()
    check(batch._repr_html_())


def test_lists_and_dictionaries_of_results_are_short_too(filler):
    run = filler.records["Evaluation"]
    paths = pj.analysis.longest_paths(run, 5)
    assert repr(paths).startswith("[LongPath(length=9, shorter_by=0, counts={'F': 3, 'B': 3, ")
    assert repr(paths).endswith(", ... 5 in all]")
    assert paths == list(paths)
    assert paths._repr_html_().count("<tr>") == 6
    op_times = ResultDict({f"{w}F{m}": 1.0 for w in range(2) for m in range(99)})
    rows = ResultList([{"row": 1, "file": HOSTILE}] * 100)
    numbers = ResultList([1.5, [2.0, 3.0]] * 10**5)
    others = ResultList(), op_times, pj.schedules.REGISTRY
    records = paths, pj.certificate(run), rows, numbers, *others
    for shown in records:
        assert len(repr(shown)) <= MAX_REPR
        check(shown._repr_html_())
    assert repr(ResultList([1, 2])) == "[1, 2]"
    error = pj.ScheduleError("deadlock: " + "0F0 -> " * 1000, "a grid" * 1000, (0, 1))
    assert repr(error).startswith("ScheduleError(reason='deadlock: 0F0 -> ")
    assert len(repr(error)) <= MAX_REPR


def test_what_comes_first_is_what_matters(filler):
    run = filler.records["Evaluation"]
    assert repr(run).startswith(
        "Evaluation(schedule='gpipe', workers=2, stages=2, microbatches=2, "
        "links=Links(model='delay'), makespan=9, bubble_ratio=0.333333, bound_by='B'"
    )
    assert repr(pj.Links("rendezvous", "pair")) == "Links(model='rendezvous', queues='pair')"
    assert repr(pj.load_system("h100")).startswith("System(name='h100', peak_flops=")
    assert repr(pj.load_model("gpt3-175b")).startswith("Model(name='gpt3-175b', layers=96")


def test_a_table_shows_what_a_record_says_what_it_means_and_what_else_there_is():
    @with_short_repr("largest name")
    @dataclasses.dataclass
    class Record:
        """A record.

        Attributes:
          name: what it is
            called.
          rest: more.
        """

        name: str
        rest: float

        @property
        def largest(self):
            """The largest number."""
            return {f"n{k}": k for k in range(20)}

    text = Record(HOSTILE, 1.0)._repr_html_()
    check(text)
    for part in ('title="what it is called."', 'title="The largest number."', ">rest<", "n19: 19"):
        assert part in text
    assert "n0: 0" not in text
    assert "... 20 in all" in text
    assert repr(Record("a", 1.0)) == "Record(largest=dict of 20, name='a')"


# Public objects: a brief repr, and equal after pickle and deepcopy


def objects():
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
    costs = pj.Costs.uniform(table, forward=1.0, input_grad=1.0, weight_grad=1.0, transfer=0.5)
    run = pj.evaluate(table, costs, link="rendezvous")
    yield from (table, costs, run, run.program)
    yield from (pj.analysis.activation_memory(run), pj.links.transfer_waits(run))
    yield pj.staleness(pj.schedules.build("pipedream", num_workers=4, num_microbatches=40))
    yield from (pj.load_model("gpt3-175b"), pj.load_system("h100"))
    yield pj.Workload(pj.load_model("gpt3-175b"), minibatch=8)
    yield pj.jitter(
        table, costs, pj.analysis.Jitter(op=pj.analysis.Distribution("lognormal", 0.1)), samples=64
    )


@pytest.fixture(scope="module")
def held():
    return list(objects())


def same(a, b):
    leaves = zip(jax.tree.leaves(get_vars(a)), jax.tree.leaves(get_vars(b)), strict=True)
    for first, second in leaves:
        if isinstance(first, np.ndarray | jax.Array | float | int | str):
            np.testing.assert_array_equal(first, second)


def get_vars(record):
    fields = record._asdict() if hasattr(record, "_asdict") else vars(record)
    return {name: value for name, value in fields.items() if name[0] != "_"}  # less what is derived


def test_pickle_and_deepcopy(held):
    for thing in held:
        for other in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)):
            assert type(other) is type(thing)
            assert repr(other) == repr(thing)
            same(thing, other)


def test_records_with_arrays_are_compared_and_hashed(held):
    for thing in held:
        if not isinstance(thing, tuple):  # tuples compare their arrays
            assert thing == copy.copy(thing) or type(thing) is not pj.Costs
            assert {thing, thing} == {thing}


def test_costs_are_equal_if_all_their_times_are():
    costs = pj.Costs(forward=np.ones(4), backward=2.0, others={"X": 3.0})
    same_costs = pj.Costs(others={"X": 3}, backward=np.float32(2), forward=[1, 1, 1, 1])
    assert costs == same_costs
    assert len({costs, same_costs, copy.deepcopy(costs)}) == 1
    for other in ({"X": 4.0}, {"Y": 3.0}, {}):
        assert costs != pj.Costs(forward=np.ones(4), backward=2.0, others=other)
    assert costs != pj.Costs(forward=1.0, backward=2.0, others={"X": 3.0})
