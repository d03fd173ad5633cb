"""Measured runs of which some numbers are missing are read right, or refused; never in silence."""

import itertools
import json

import numpy as np
import pytest
import trace_truth as truth
from daily import read_cases, with_cases

import pipejax as pj

CASES = [
    (*case, form, change)
    for case in truth.SCHEDULES
    for form, change in itertools.product(truth.FORMS, truth.CHANGES)
    if truth.applies(case[0], form, change)
]
# what no file says can be several things: these are asked for, and so are missing ranks and names
ASKED = {"unknown phase", "missing rank", "no step, no microbatch"}
NOISE = (0.0, 0.01, 0.03)
STATED = "zb-h2"  # its warm-up hides that its last worker is missing: its number is stated


def read_case(folder, number):
    name, workers, count, form, change = CASES[number]
    table = pj.schedules.build(name, num_workers=workers, num_microbatches=count)
    replicas, noise = 2 if change == "two replicas" else 1, NOISE[number % len(NOISE)]
    slices, planted = truth.recorded(table, number, change, replicas=replicas, noise=noise)
    truth.write(folder, form, slices, table, change, number)
    return *truth.outcome(folder, slices, table, change), planted


def check(folder, number):
    if CASES[number][3] == "parquet":
        pytest.importorskip("pyarrow")
    name, *_, change = CASES[number]
    result, why, *_ = read_case(folder, number)
    if result == "refused":
        is_free = change in ASKED or "no microbatch" in change or "no chunk" in change
        assert is_free, why
        assert "\n" not in why
    elif (name, change) != (STATED, "missing rank"):
        assert result == "right", (CASES[number], why)
    return result


# and every schedule of several stages a worker as lists, told and untold
LISTS = [
    number
    for number, (name, *_, form, change) in enumerate(CASES)
    if (name, form) in itertools.product(("interleaved-1f1b", "zb-v", "v-half"), ("lists",))
    if change in ("nothing", "no chunk, no microbatch")
]


@pytest.mark.parametrize(
    "number", {*range(0, len(CASES), 19), *LISTS}, ids=lambda k: " ".join(map(str, CASES[k]))
)
def test_what_a_file_lacks_is_read_right_or_asked_for(number, tmp_path):
    check(tmp_path, number)


@pytest.mark.slow
def test_of_all_runs_none_is_wrong_in_silence(tmp_path):
    results = []
    for number in range(len(CASES)):
        folder = tmp_path / str(number)
        folder.mkdir()
        results.append((CASES[number][-1], check(folder, number)))
    for change in set(truth.CHANGES) - ASKED:
        answer = [result for case, result in results if case == change]
        assert answer.count("refused") <= (0.3 if "no chunk, no" in change else 0.05) * len(answer)


def paused_step(cell):
    """DualPipe of F = 20, B = 40 ms whose worker 0 pauses 0.5 s behind a cell; by the event loop."""
    table = pj.schedules.build("dualpipe", num_workers=4, num_microbatches=8)
    draw = np.random.default_rng(0)
    ops = truth._loop(table, draw, 0.02, 0.0, 0.0, (0, cell, 0.5))
    return pj.traces.Trace.from_columns(
        {
            "phase": np.array([("F", "B", "I", "W", "gc").index(op.phase) for op in ops]),
            **{
                key: np.array([getattr(op, key) for op in ops])
                for key in ("step", "replica", "worker", "stage", "microbatch", "start", "end")
            },
        },
        ("F", "B", "I", "W", "gc"),
    )


@pytest.mark.parametrize("cell", [0, 2, 5, 8, 11])
def test_a_pause_stands_behind_its_cell_though_pairs_are_two_ops(cell):
    """A pair is one cell and two ops: counted as ops, the pause came later in the row."""
    result = pj.traces.attribute(pj.traces.replay(pj.traces.find_pipelines(paused_step(cell))))
    assert result.replayed[0] == pytest.approx(result.recorded[0], rel=1e-4)


def test_the_spread_is_of_one_kind_of_op(tmp_path):
    for name in ("1f1b", "dualpipe", "dualpipe-v"):
        table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
        slices, _ = truth.recorded(table, 3, "nothing", noise=0.01)
        folder = tmp_path / name
        folder.mkdir()
        truth.write(folder, "csv", slices, table, "nothing", 3)
        result = pj.traces.analyse(pj.traces.read(folder), schedules=["1f1b"])
        assert result.op_spread == pytest.approx(0.01, rel=0.15)
        rows = {(row.name, row.stage): row.median for row in result.op_times if row.kind == "op"}
        assert rows["F", 1] == pytest.approx(0.01, rel=0.05)
        if name != "1f1b":
            assert rows["pair", 1] == pytest.approx(0.03, rel=0.05)
            assert {row for row in rows if row[0] == "B"} <= {("B", stage) for stage in range(8)}


@pytest.mark.parametrize("name", ["weight update", "param_grad", "second_half"])
@pytest.mark.parametrize("stages", [[], ["stage"]])
def test_a_weight_gradient_of_another_name_is_asked_for(stages, name, tmp_path):
    # as 1f1b, without its W, the run would lose a third of its work; it is no collective
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
    slices, _ = truth.recorded(table, 1, "nothing", steps=1)
    names = {"F": "forward_step", "I": "backward_step", "W": name}
    called = [s._replace(phase=names[s.phase]) for s in slices]
    head = ["worker", *stages, "phase", "microbatch", "start", "end"]
    rows = [[getattr(s, key) for key in head] for s in called]
    path = truth.write_rows(tmp_path / "run", [[*head[:-2], "start_s", "end_s"], *rows])
    with pytest.raises(ValueError, match=rf"32 slices of microbatches are of phase '{name}'"):
        pj.traces.read(path)
    trace = pj.traces.read(path, columns={"W": name})
    assert pj.traces.registered(pj.traces.find_pipelines(trace).table) == ("zb-h1", {})


@with_cases("names", *read_cases("test_halves_of_a_backward_have_many_names"))
def test_halves_of_a_backward_have_many_names(names, tmp_path):
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
    slices, _ = truth.recorded(table, 1, "nothing", steps=1)
    letters = dict(zip("FIW", ("fwd", *names), strict=True))
    head = ["worker", "phase", "microbatch", "start_s", "end_s"]
    rows = [[s.worker, letters[s.phase], s.microbatch, s.start, s.end] for s in slices]
    trace = pj.traces.read(truth.write_rows(tmp_path / "run", [head, *rows]))
    assert pj.traces.registered(pj.traces.find_pipelines(trace).table) == ("zb-h1", {})
    events = [
        {
            "name": f"{letters[s.phase]} {s.microbatch}",
            "ph": "X",
            "pid": s.worker,
            "ts": 1e6 * s.start,
            "dur": 1e6 * (s.end - s.start),
        }
        for s in slices
    ]
    title = {"name": "process_name", "ph": "M"}
    ranks = [title | {"pid": k, "args": {"name": f"rank {k}"}} for k in range(4)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*ranks, *events]}))
    trace = pj.traces.read(tmp_path / "trace.json")
    assert pj.traces.registered(pj.traces.find_pipelines(trace).table) == ("zb-h1", {})


@pytest.mark.parametrize("first", [0, 601], ids=["through all steps", "in the middle of a run"])
def test_microbatches_are_counted_from_0_in_each_step(first, tmp_path):
    table = pj.schedules.build("1f1b", num_workers=3, num_microbatches=6)
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    head = ["step", "rank", "phase", "microbatch", "start_s", "end_s"]
    rows = [
        [s.step, s.worker, s.phase, s.microbatch + 6 * s.step + first, s.start, s.end]
        for s in slices
    ]
    trace = pj.traces.read(truth.write_rows(tmp_path / "run", [head, *rows]))
    assert "go on from step to step" in " ".join(trace.inferred)
    assert sorted({*trace.microbatch.tolist()}) == [0, 1, 2, 3, 4, 5]
    assert pj.traces.registered(pj.traces.find_pipelines(trace).table) == ("1f1b", {})


@pytest.mark.parametrize("numbers", [(1, 2, 3), (0, 8, 16), (0, 2, 4)])
@pytest.mark.parametrize("with_stages", [False, True])
def test_workers_that_are_not_counted_from_0_are_listed(numbers, with_stages, tmp_path):
    table = pj.schedules.build("1f1b", num_workers=3, num_microbatches=6)
    slices, _ = truth.recorded(table, 1, "nothing", steps=1)
    head = ["rank", "phase", "microbatch", "start_s", "end_s", *["stage"] * with_stages]
    rows = [
        [numbers[s.worker], s.phase, s.microbatch, s.start, s.end, *[s.stage] * with_stages]
        for s in slices
    ]
    listed = ", ".join(map(str, numbers))
    with pytest.raises(ValueError, match=f"numbered 0, 1, 2 and so on, got {listed}"):
        pj.traces.read(truth.write_rows(tmp_path / "run", [head, *rows]))


def test_our_export_of_a_grammar_is_refused(tmp_path):
    table = pj.schedules.build("vocabulary-1f1b", num_workers=2, num_microbatches=4)
    cost = pj.Costs(forward=1.0, backward=2.0, others=dict.fromkeys("stxy", 0.1))
    (tmp_path / "run").write_text(pj.files.chrome_trace(pj.evaluate(table, cost)))
    with pytest.raises(ValueError, match="must have phases by known names"):
        pj.traces.read(tmp_path)


RUNS = [  # schedule, workers, microbatches, options, steps, columns that the files have
    ("1f1b", 4, 12, {}, 8, ["worker"]),
    ("1f1b", 4, 6, {}, 4, ["worker", "stage"]),
    ("interleaved-1f1b", 4, 8, {"stages_per_worker": 2}, 3, ["worker"]),
    ("gpipe", 2, 6, {}, 4, ["worker"]),
    ("zb-h1", 4, 8, {}, 4, ["worker"]),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} {'+'.join(run[-1])}")
def test_the_number_of_microbatches_decides_between_numbers_of_steps(run, tmp_path):
    name, workers, count, options, steps, columns = run
    size = {"num_workers": workers, "num_microbatches": count}
    table = pj.schedules.build(name, **size, **options)
    slices, _ = truth.recorded(table, 1, "nothing", steps=steps)
    head = [*columns, "phase", "start_s", "end_s"]
    rows = [[*(getattr(s, c) for c in columns), s.phase, s.start, s.end] for s in slices]
    path = truth.write_rows(tmp_path / "run", [head, *rows])
    stages = table.stages_per_worker
    text = f"steps {steps}[;,)].* to choose, give --steps {steps} or"
    with pytest.raises(ValueError, match=text):
        pj.traces.read(path)
    # with the number of stages, each number of steps has its number of microbatches
    text = f"steps {steps},.* microbatches {count}.* or --microbatches {count} or"
    with pytest.raises(ValueError, match=text):
        pj.traces.read(path, stages_per_worker=stages)
    trace = pj.traces.read(path, microbatches=count)
    assert [*trace.steps] == [*range(steps)]
    assert trace.stages == workers * stages
    assert pj.traces.registered(pj.traces.find_pipelines(trace).table) == (name, options)
    with pytest.raises(ValueError, match="no reading has these sizes"):
        pj.traces.read(path, microbatches=7)
