"""Asynchronous tables: weight versions and delays against plain Python, updates as ops."""

import dataclasses
import json
import shlex

import numpy as np
import pytest
import strategies
from daily import with_cases
from hypothesis import given

import pipejax as pj
from pipejax.analysis.runs.timeline import bars
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.schedules.cells.dependencies import find_versions, versions_held
from pipejax.schedules.table.held_activations import peak_in_flight
from pipejax.schedules.table.links import LINKS
from pipejax.schedules.table.slot_simulation import with_idle_slots
from pipejax.schedules.table.table import without_phases

UNIT = pj.Costs(forward=1.0, backward=1.0)


def build(name="pipedream", p=4, m=16, **options):
    return pj.schedules.build(name, num_workers=p, num_microbatches=m, **options)


def simulate(stages, microbatches, admission):
    """The timeline rule of the theory, slot by slot: rows of (op, slot).

    A stage prefers B until its first B, then takes B and F in turn where both are ready; it has at
    most S - s microbatches in flight, or the first one S.
    """
    done = {}  # op: slot in which it ran
    rows = [[] for _ in range(stages)]
    slot = 0
    while len(done) < 2 * stages * microbatches:
        chosen = []
        for s in range(stages):
            f = sum(op[0] == "F" for op, _ in rows[s])
            b = len(rows[s]) - f
            ready = []
            is_open = f - b < stages - s or (s > 0 and admission == "first-stage")
            if f < microbatches and is_open and (s == 0 or ("F", s - 1, f) in done):
                ready.append(("F", s, f))
            if b < f and (("B", s + 1, b) if s < stages - 1 else ("F", s, b)) in done:
                ready.append(("B", s, b))
            prefers = "F" if rows[s] and rows[s][-1][0][0] == "B" else "B"
            chosen += sorted(ready, key=lambda op: op[0] != prefers)[:1]
        for op in chosen:
            done[op] = slot
            rows[op[1]].append((op, slot))
        slot += 1
    return rows


def own_count(rows, starts, ends, runs=1):
    """Count delays (update stage, microbatch, stage read) from rows of ops with times."""
    ops = {(w, k): op for w, row in enumerate(rows) for k, op in enumerate(row)}
    updates = sorted((ends[key], op[1], op[2]) for key, op in ops.items() if op[0] == "U")
    begins = {(op[1], op[2]): starts[key] for key, op in ops.items() if op[0] == "F"}
    number, count = {}, [0] * runs
    for _, stage, m in updates:
        number[stage, m] = count[m % runs]
        count[m % runs] += 1
    return {
        (s, m, r): k - sum(end <= begins[r, m] for end, _, n in updates if n % runs == m % runs)
        for (s, m), k in number.items()
        for r in range(len(rows))
    }


def by_op(run):
    rows, starts, ends = [], {}, {}
    for w, row in enumerate(run.table.rows()):
        rows.append([])
        for t, cell in enumerate(row):
            if cell:
                k = len(rows[-1])
                starts[w, k], ends[w, k] = run.start[w, t], run.finish[w, t]
                rows[-1].append((cell[0].phase.name, cell[0].stage, cell[0].microbatch))
    return rows, starts, ends


@pytest.mark.parametrize("admission", ["each-stage", "first-stage"])
@with_cases("stages microbatches", (1, 3), (2, 1), (4, 3), (3, 9), (4, 12), (7, 21))
def test_the_table_is_the_timeline_rule(stages, microbatches, admission):
    updating = build(p=stages, m=microbatches, admission=admission)
    table = without_phases(updating, (pj.Phase.U,))
    simulated = simulate(stages, microbatches, admission)
    for row, expected in zip(with_idle_slots(table).rows(), simulated, strict=True):
        slots = [(op, slot) for slot, cell in enumerate(row) for op in cell]
        assert [((o.phase.name, o.stage, o.microbatch), slot) for o, slot in slots] == expected


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_admission_moves_the_start_only(stages):
    tables = [build(p=stages, m=40, admission=a) for a in ("each-stage", "first-stage")]
    limited, free = map(pj.staleness, tables)
    assert (limited.delays == free.delays).all()
    assert limited.own_lag.tolist() == free.own_lag.tolist()
    assert len({pj.evaluate(table, UNIT).makespan for table in tables}) == 1
    held = [min(stages, 2 * (stages - s) - 1) for s in range(stages)]
    assert peak_in_flight(tables[1]).tolist() == held
    if stages == 4:  # on stage 2, F3 reads the first update while F2 still holds the start
        assert free.weight_versions.tolist() == [4, 3, 3, 1]


def test_the_naive_pipeline_is_local_sgd_of_one_run():
    table, same = build("naive", 3, 5), build("local-sgd", 3, 5, runs=1)
    rows = [[[cell for cell in row if cell] for row in t.rows()] for t in (table, same)]
    assert rows[0] == rows[1]
    assert (pj.staleness(table).max_delay, peak_in_flight(table).tolist()) == (0, [1, 1, 1])


@pytest.mark.parametrize("stages", range(2, 33))
def test_delays_of_pipedream(stages):
    stale = pj.staleness(build(p=stages, m=40 * stages))
    assert stale.max_delay == int(stages**2 - stages / 2)
    if stages % 2 == 0:
        assert stale.mean_delay == (stages**2 - 1) / 2 + stages / 4
    assert stale.own_lag.tolist() == [stages - 1 - s for s in range(stages)]
    assert stale.weight_versions.tolist() == [stages - s for s in range(stages)]
    counts = stale.histogram()
    assert counts.sum() == stages * 20 * stages * stages
    assert counts @ np.arange(len(counts)) / counts.sum() == pytest.approx(stale.mean_delay)


@with_cases(
    "costs",
    None,
    pj.Costs(forward=1.0, backward=2.0, transmit=0.7),
    pj.Costs(forward=0.3, backward=0.1),
    pj.Costs(forward=np.array([1.0, 2.0, 1.5]), backward=2.0, latency=3.0, update=0.2),
)
@pytest.mark.parametrize("link", ["delay", "queued", "rendezvous"])
def test_delays_are_counts(costs, link):
    table = build(p=3, m=24)
    stale = pj.staleness(table, costs, link=link)
    rows, starts, ends = by_op(pj.evaluate(table, costs or UNIT, link=link))
    rounded = [{key: round(time, 9) for key, time in times.items()} for times in (starts, ends)]
    expected = own_count(rows, *rounded)
    for (s, m, r), delay in expected.items():
        if 6 <= m < 18:
            assert stale.delays[s, m - 6, r] == delay
    assert stale.max_delay == max(d for (_, m, _), d in expected.items() if 6 <= m < 18)


@pytest.mark.parametrize("transmit", [0.0, 0.7])
@pytest.mark.parametrize(("name", "least"), [("pipedream", 0), ("pipedream-2bw", 1)])
def test_what_is_read_is_the_last_model_that_holds_it(name, least, transmit):
    """Models are walked block update by block update; reading begins with the forward."""
    table = build(name, 6, 36)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=transmit)
    stale, versions = pj.staleness(table, costs), find_versions(table)
    rows, starts, ends = by_op(pj.evaluate(table, costs))
    ends = {key: round(time, 9) for key, time in ends.items()}
    ops = {op: key for key, op in ((k, rows[k[0]][k[1]]) for k in ends)}
    updates = sorted((ends[key], op[1], op[2]) for op, key in ops.items() if op[0] == "U")
    models = [[0] * 6]
    for _, stage, _ in updates:
        models.append([count + (s == stage) for s, count in enumerate(models[-1])])
    for m in range(9, 27):
        for r in range(6):
            begins = round(starts[ops["F", r, m]], 9)
            seen = sum(end <= begins for end, *_ in updates)
            version = int(versions.read[r, m])
            model = max(j for j in range(seen + 1) if models[j][r] == version)
            for s in range(6):
                applied = models.index(next(v for v in models if v[s] > versions.applied[s, m])) - 1
                assert stale.delays[s, m - 9, r] == applied - model
    assert stale.delays.min() >= least


@pytest.mark.parametrize(("p", "accumulation"), [(2, None), (4, None), (4, 6), (3, 3)])
def test_double_buffering_needs_two_versions(p, accumulation):
    table = build("pipedream-2bw", p, 40 * p, accumulation=accumulation)
    stale = pj.staleness(table)
    assert stale.weight_versions.tolist() == [2] * p
    assert stale.own_lag.tolist() == [1] * p
    group = np.arange(40 * p) // (accumulation or p)
    versions = find_versions(table)
    assert np.array_equal(versions.applied, np.broadcast_to(group, versions.applied.shape))
    assert np.array_equal(versions.read[0], np.maximum(group - 1, 0))


@pytest.mark.parametrize(("runs", "local_steps"), [(1, 1), (4, 1), (4, 5), (2, 3), (6, 2)])
def test_local_sgd_is_never_stale(runs, local_steps):
    table = build("local-sgd", 4, 4 * runs * local_steps, runs=runs, local_steps=local_steps)
    stale = pj.staleness(table)
    assert (stale.max_delay, stale.mean_delay, stale.own_lag.tolist()) == (0, 0.0, [0] * 4)
    assert stale.weight_versions.tolist() == [runs] * 4
    start = pj.evaluate(table, UNIT).start
    where, finish = table.op_cells, pj.evaluate(table, UNIT).finish
    size = runs * local_steps
    for m in range(runs, table.num_microbatches):  # a run waits for its own last backward ...
        assert np.all(
            start.ravel()[where[pj.Phase.F][:, m]] >= finish.ravel()[where[pj.Phase.B][:, m - runs]]
        )
    for first in range(size, table.num_microbatches, size):  # ... and a round for the one before
        flushed = finish.ravel()[where[pj.Phase.B][0, :first]].max()
        assert start.ravel()[where[pj.Phase.F][0, first]] == flushed
    if runs >= 4:  # full: 2 R H + 2 S - 2 slots a round
        assert flushed == 3 * (2 * size + 2 * 4 - 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "chimera", "hanayo"])
def test_synchronous_tables_are_not_stale(name):
    stale = pj.staleness(build(name, 4, 2))
    assert not stale.delays.any()
    assert not stale.own_lag.any()
    assert stale.weight_versions.tolist() == [1] * 4
    assert stale.histogram().tolist() == [stale.delays.size]


@given(strategies.tables())
def test_versions_by_walking_the_rows(samples):
    table, _ = samples
    result = find_versions(table)
    held = np.zeros((table.num_workers, table.num_stages), int)
    for w, row in enumerate(table.rows()):
        updates, stash, peak = {}, {}, {}
        for op in (op for cell in row for op in cell):
            done = updates.setdefault(op.stage, 0)
            at = op.stage, op.microbatch
            if op.phase is pj.Phase.F:
                assert (result.newest[at], result.read[at]) == (done, done)
                stash[at] = done
            elif op.phase in (pj.Phase.B, pj.Phase.W):
                assert result.applied[at] == done * table.updates_within
                del stash[at]
            elif op.phase is pj.Phase.U:
                updates[op.stage] += 1
            in_use = {v for (s, _), v in stash.items() if s == op.stage}
            if op.phase in (pj.Phase.B, pj.Phase.W):
                in_use.add(result.read[at])
            now = len(in_use | {updates[op.stage]})
            peak[op.stage] = max(peak.get(op.stage, 0), now)
        for stage, largest in peak.items():
            held[w, stage] = largest
    assert np.array_equal(versions_held(table), held)


def test_updates_are_ops():
    table = build(p=4, m=8)
    plain = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8, slots={"F": 1, "B": 1})
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)
    for link in LINKS:
        assert (
            pj.evaluate(table, costs, link=link).makespan
            == pj.evaluate(plain, costs, link=link).makespan
        )
    updated = pj.evaluate(table, dataclasses.replace(costs, update=0.25))
    assert updated.busy.tolist() == [8 * 3.25] * 4
    reduced = pj.evaluate(table, dataclasses.replace(costs, update=0.25, all_reduce=5.0))
    assert reduced.makespan >= updated.makespan + 5
    assert sum(bar.label.endswith("A") for bar in bars(reduced)) == 32  # one before each update


def test_a_table_is_written_and_read_with_its_rule(tmp_path):
    tables = ("pipedream-2bw", {}), ("local-sgd", {"local_steps": 3}), ("pipedream", {})
    for name, options in tables:
        table = build(name, 4, 24, **options)
        pj.write_table(table, tmp_path / "table.json")
        read = pj.read_table(tmp_path / "table.json")
        assert read.weights == table.weights
        assert str(read) == str(table)
        assert pj.staleness(read).mean_delay == pj.staleness(table).mean_delay
    text = json.loads((tmp_path / "table.json").read_text())
    for rule, message in (
        ({"behind": -1}, "behind must be a whole number of at least 0, got -1"),
        ({"lag": 1}, "weights: unknown key 'lag': known are behind, runs"),
        (3, "weights must be an object with the keys behind"),
        ({"runs": 0}, "runs must be a whole number"),
    ):
        (tmp_path / "wrong.json").write_text(json.dumps(text | {"weights": rule}))
        with pytest.raises(pj.ScheduleError, match=message):
            pj.read_table(tmp_path / "wrong.json")


def test_memory_counts_versions_and_runs():
    workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=16, tensor_parallel=8)
    plain, stashed = build("1f1b", 4, 16), build("pipedream", 4, 16)
    more = pj.memory_bytes(workload, stashed) - pj.memory_bytes(workload, plain)
    version = stage_bytes(workload, plain).version
    np.testing.assert_allclose(more, version * [3, 2, 1, 0])
    runs = build("local-sgd", 4, 16, runs=2, local_steps=4)
    less = build("local-sgd", 4, 16, runs=1, local_steps=8)
    persistent = stage_bytes(workload, plain).static
    single, double = (pj.memory_bytes(workload, table) for table in (less, runs))
    assert np.all(double - single >= persistent)


def test_command(answer, tmp_path):
    line = "--schedule", "pipedream", "--workers", "4", "--microbatches", "160"
    result = answer("staleness", *line)
    rows = result.pop("histogram")
    counts = pj.staleness(build(m=160)).histogram()
    assert [row["delay"] for row in rows] == list(range(15))
    assert [row["count"] for row in rows] == counts.tolist()
    np.testing.assert_allclose([row["share"] for row in rows], counts / counts.sum())
    sizes = {"schedule": "pipedream", "workers": 4, "stages": 4, "microbatches": 160}
    delays = {"weight_versions": [4, 3, 2, 1], "own_lag": [3, 2, 1, 0], "max_delay": 14}
    assert result == sizes | delays | {"mean_delay": 8.5, "figure": None}
    model = shlex.split("--model gpt-22b --system h100 --minibatch 160 --out")
    result = answer("staleness", *line, *model, tmp_path / "delays.svg")
    assert result["weight_bytes"] == sorted(result["weight_bytes"], reverse=True)
    assert (tmp_path / "delays.svg").read_text().count("largest") == 1
    answer("export", *line, "--format", "json", "--out", tmp_path / "table.json")
    read = answer("staleness", "--table", tmp_path / "table.json")
    assert (read["max_delay"], read["weight_versions"]) == (14, [4, 3, 2, 1])
