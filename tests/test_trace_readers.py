"""Measured runs from files of every form, sound and damaged."""

import csv
import gzip
import itertools
import json
import random
import re
import shutil
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import trace_truth as truth
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.traces.clocks import aligned
from pipejax.traces.readers.chrome import read_events
from pipejax.traces.readers.rank_lists import file_rank
from pipejax.traces.record import INTEGERS, TIMES, Trace

read = pj.traces.read
PUBLIC = ["dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id", "gmc"]
COLLECTIVES = (
    "embedding-grads-all-reduce gc grads-reduce-scatter layernorm-grads-all-reduce optimizer "
    "optimizer-clip-main-grad params-all-gather"
)


@pytest.fixture
def runs(data):
    return data / "traces"


@pytest.fixture
def public(runs):
    pytest.importorskip("pyarrow")
    return read(runs / "public_job.parquet")


def cells(trace, step, worker, names=("F", "B", "I", "W"), replica=0):
    chosen = trace.has_phase(names) & (trace.step == step) & (trace.worker == worker)
    rows = np.flatnonzero(chosen & (trace.replica == replica))
    return " ".join(
        f"{trace.stage[k]}{trace.phases[trace.phase[k]]}{trace.microbatch[k]}" for k in rows
    )


def times(trace):
    keys = zip(*(getattr(trace, name).tolist() for name in INTEGERS), strict=True)
    named = [(s, r, trace.phases[p], st, m) for s, r, _, st, p, m in keys]
    return dict(zip(named, zip(trace.start, trace.end, strict=True), strict=True))


def same(first, second):
    assert len(first) == len(second)
    assert sorted(times(first)) == sorted(times(second))
    for key, (start, end) in times(first).items():
        assert times(second)[key] == pytest.approx((start, end), abs=2e-6)
    return True


def make_csv(path, parquet, rename=lambda name: name, change=lambda row: row):
    table = pytest.importorskip("pyarrow.parquet").read_table(parquet, columns=PUBLIC)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([rename(name) for name in PUBLIC])
        writer.writerows(change(list(row.values())) for row in table.to_pylist())
    return path


def labelled(path, slices, rank=0, world=1, **more):
    """Write a trace of PyTorch's profiler: name, start and duration of slices [ms]."""
    result = [
        {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
        | {"ts": 1000 * start, "dur": 1000 * durations}
        | {"name": name, "args": {"name": name}}
        for name, start, durations in slices
    ]
    header = {"distributedInfo": {"rank": rank, "world_size": world}, "baseTimeNanoseconds": 10**18}
    path.write_text(json.dumps(header | {"traceEvents": result} | more, indent=1))
    return path


# columns


def test_a_public_job_comes_whole(public):
    assert (public.steps, public.replicas) == ([23, 25, 33], [0, 1])
    assert (public.workers, public.stages) == (4, 4)
    assert len(public) == 3 * 212
    assert public.left_out == ()
    assert cells(public, 23, 2) == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3"
    expected = {"F", "B", "SEND_F", "SEND_B", "RECV_F", "RECV_B"}
    assert {*public.phases} - expected == {*COLLECTIVES.split()}


def test_csv_says_the_same_by_other_names_and_units(public, runs, tmp_path):
    source = runs / "public_job.parquet"
    assert same(read(make_csv(tmp_path / "a", source)), public)
    names = {"stage": "pp_rank", "start_ts": "begin_ms", "duration": "took_ms", "dp_rank": "copy"}
    path = make_csv(
        tmp_path / "b.json",
        source,
        lambda name: names.get(name, name),
        lambda row: [1e3 * v if 4 <= k < 6 else v for k, v in enumerate(row)],
    )
    with pytest.raises(ValueError, match=r"which column of .* is end or duration: it has copy, "):
        read(path)
    assert same(read(path, columns={"duration": "took_ms", "replica": "copy"}), public)
    packed = tmp_path / "b.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    options = {"duration": "took_ms", "replica": "copy"}
    assert same(read([packed], columns=options), public)
    slow = read(packed, columns=options | {"unit": "s"})
    assert slow.end.max() == pytest.approx(1e3 * public.end.max())

    def change(row):
        return [1e6 * v if 4 <= k < 6 else v for k, v in enumerate(row)]

    micro = make_csv(tmp_path / "c.csv", source, change=change)
    assert same(read(micro, columns={"unit": "us"}), public)
    with pytest.raises(ValueError, match="unknown columns 'rank': known are step, replica"):
        read(path, columns={"rank": "copy"})
    with pytest.raises(ValueError, match="columns: unit must be one of s, ms, us, ns, got 'h'"):
        read(path, columns={"unit": "h"})
    with pytest.raises(ValueError, match=r"columns: replica must be one of copy, .*got 'dp'"):
        read(path, columns={"replica": "dp"})


WORDS = {"F": "fwd", "B": "bwd"}
FOUR_OPS = [(0, "F", 0, 12), (1, "F", 13, 12), (1, "B", 25, 24), (0, "B", 50, 24)]  # [ms]


def write_ops(path, head, factor=1.0, begin=0.0):
    """Write four ops; `factor` are units of the file in a millisecond."""
    rows = [
        f"{worker},{op},0,{begin + start * factor!r},{length * factor!r}"
        for worker, op, start, length in FOUR_OPS
    ]
    path.write_text("\n".join([f"pp,op,mb,{head}", *rows]))
    return path


@with_cases("head factor begin", *read_cases("units of times"))
def test_units_are_stated_by_names_or_by_plausible_times(head, factor, begin, tmp_path):
    trace = read(write_ops(tmp_path / "run", head, factor, begin))
    scale = 5.0 if factor == 5.0 else 1.0
    length = 1e3 * (trace.end - trace.start)
    assert sorted(length) == pytest.approx([12 * scale] * 2 + [24 * scale] * 2, rel=2e-3)
    notes = [text for text in trace.inferred if text.startswith("unit of times")]
    assert len(notes) == (head == "start,duration")


NUMBERED = ("{0}{phase}{1}", "PP:{0}{phase}{1}", "{word} mb={1} stage={0}", "{word}_s{0}_mb{1}")
LABELLED = [*itertools.product(NUMBERED, ("1f1b", "interleaved-1f1b")), (NUMBERED[0], "dualpipe-v")]


def write_labels(path, form, slices, replicas, head="rank,name,ts_us,dur_us"):
    """Write a row for each cell; ranks count through the replicas of each worker."""
    by_cell = {}
    for s in slices:
        by_cell.setdefault((s.step, s.worker * replicas + s.replica, s.cell), []).append(s)
    rows = [head]
    for (_, rank, _), ops in by_cell.items():
        words = [{"phase": s.phase, "word": WORDS.get(s.phase)} for s in ops]
        names = [form.format(s.stage, s.microbatch, **w) for s, w in zip(ops, words, strict=True)]
        name = names[0] if len(names) == 1 else f"({';'.join(names)})OVERLAP_F_B"
        seconds = ops[0].end - ops[0].start
        rows.append(f"{rank},{name},{1e6 * ops[0].start:.3f},{1e6 * seconds:.3f}")
    rows.append(f"0,optimizer,{1e6 * slices[-1].end:.3f},10")
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("replicas", [1, 2])
@with_cases("form name", *LABELLED)
def test_labels_in_a_column_of_names_state_stages_and_microbatches(form, name, replicas, tmp_path):
    """Both ops of a fused pair are in one row, and no column says which replica a rank is of."""
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    slices, _ = truth.recorded(table, 3, "nothing", steps=2, replicas=replicas, message=0.0)
    ops = [s for s in slices if s.microbatch >= 0 and not s.phase.startswith(("SEND", "RECV"))]
    path = write_labels(tmp_path / "run.csv", form, ops, replicas)
    trace = read(path)
    keys = zip(*(getattr(trace, role).tolist() for role in INTEGERS), strict=True)
    rows = sorted((*key[:4], trace.phases[key[4]], key[5]) for key in keys if key[5] >= 0)
    assert rows == sorted(
        (s.step, s.replica, s.worker, s.stage, s.phase, s.microbatch) for s in ops
    )
    seconds = (trace.end - trace.start)[trace.microbatch >= 0]
    assert sorted(seconds) == pytest.approx(sorted(s.end - s.start for s in ops), abs=2e-9)
    path.write_text(path.read_text().replace("ts_us,dur_us", "ts,dur"))  # 10 ms, or 10 s in ms
    with pytest.raises(ValueError, match="must state the unit of times: ops take"):
        read(path)


def test_columns_of_stage_and_microbatch_tell_replicas_apart_by_their_ops(tmp_path):
    rows = [
        f"{2 * worker + replica},{op},{worker},0,{start + 3 * replica},{length}"
        for worker, op, start, length in FOUR_OPS
        for replica in (0, 1)
    ]
    (tmp_path / "run.csv").write_text("\n".join(["rank,op,stage,mb,start_ms,dur_ms", *rows]))
    trace = read(tmp_path / "run.csv")
    assert (trace.workers, trace.replicas) == (2, [0, 1])
    assert trace.start[trace.replica == 1] == pytest.approx(trace.start[trace.replica == 0] + 3e-3)


@with_cases("head factor begin why", *read_cases("undecided units of times"))
def test_a_unit_that_nothing_decides_is_asked_for(head, factor, begin, why, tmp_path):
    path = write_ops(tmp_path / "run", head, factor, begin)
    with pytest.raises(ValueError, match=why):
        read(path)
    unit = {1.0: "ms", 1e3: "us"}[factor]
    trace = read(path, columns={"unit": unit})
    assert sorted(1e3 * (trace.end - trace.start)) == pytest.approx([12, 12, 24, 24], rel=2e-3)


def test_types_of_cells_state_the_unit(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    workers, ops, start, length = zip(*FOUR_OPS, strict=True)
    begin = [1_750_000_000_000 + at for at in start]
    for types in (("timestamp", "duration"), ("timestamp", "float64"), ("duration", "duration")):
        values = {"start": begin if types[0] == "timestamp" else start, "dur": length}
        cells = {
            name: pyarrow.array(values[name]).cast(
                {"timestamp": pyarrow.timestamp("ms"), "duration": pyarrow.duration("ms")}.get(
                    kind, pyarrow.float64()
                )
            )
            for name, kind in zip(values, types, strict=True)
        }
        if types[1] == "float64":  # ops of 90 ms
            cells["dur"] = pyarrow.array([5.0 * value for value in length])
        rows = pyarrow.table({"pp": workers, "op": ops, "mb": [0] * 4} | cells)
        parquet.write_table(rows, tmp_path / "run")
        trace = read(tmp_path / "run")
        scale = 5 if types[1] == "float64" else 1
        expected = pytest.approx([12 * scale] * 2 + [24 * scale] * 2, rel=1e-3)
        assert sorted(1e3 * (trace.end - trace.start)) == expected
    # dates in text
    rows = [
        f"{worker},{op},0,2025-06-15T15:06:40.{at:03}Z,2025-06-15T15:06:40.{at + took:03}Z"
        for worker, op, at, took in FOUR_OPS
    ]
    (tmp_path / "dates").write_text("\n".join(["pp,op,mb,start,end", *rows]))
    trace = read(tmp_path / "dates")
    assert sorted(1e3 * (trace.end - trace.start)) == pytest.approx([12, 12, 24, 24], rel=1e-3)


def test_messages_without_a_microbatch_stay_as_they_are(tmp_path):
    """Megatron also records calls without a message: which op each belongs to is not said."""
    table = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4)
    rows = ["pp,op,chunk,mb,start_s,end_s"]
    for worker, row in enumerate(table.rows()):
        for slot, cell in enumerate(row):
            for op in cell:
                start, name = 10.0 * slot, {"F": "forward", "B": "backward"}[op.phase.name]
                place = f"{op.stage // 2},{op.microbatch}"
                rows.append(f"{worker},{name}-compute,{place},{start},{start + 8}")
                rows.append(f"{worker},{name}-recv,-1,-1,{start - 1},{start - 0.5}")
                rows.append(f"{worker},{name}-send,-1,-1,{start + 8},{start + 8.5}")
    (tmp_path / "run").write_text("\n".join(rows))
    trace = read(tmp_path / "run")
    messages = trace.has_phase(["SEND_F", "RECV_F", "SEND_B", "RECV_B"])
    assert (trace.stages, messages.sum(), trace.left_out) == (4, 2 * 2 * 16, ())
    assert (trace.microbatch[messages] == -1).all()
    (lead,) = (o.seconds for o in aligned(ahead(trace, 1, 50.0))[1] if o.is_corrected)
    # ops start 2 s after their inputs, or later, on the way there and back
    assert lead == pytest.approx(50.0, abs=2.0)


@pytest.mark.parametrize("decimals", [1, 3])
@pytest.mark.parametrize(("delimiter", "quote"), [(";", ""), ("\t", ""), (",", '"')])
def test_times_may_have_decimal_commas(delimiter, quote, decimals, tmp_path):
    path = write_ops(tmp_path / "run", "start_ms,dur_ms", begin=0.5)
    head, *rows = (line.split(",") for line in path.read_text().splitlines())
    for row in rows:  # 12,500 could be thousands, if 0,500 did not stand beside it
        texts = (f"{float(cell):.{decimals}f}".replace(".", ",") for cell in row[3:])
        row[3:] = (f"{quote}{text}{quote}" for text in texts)
    (tmp_path / "commas").write_text("\n".join(map(delimiter.join, [head, *rows])))
    assert same(read(tmp_path / "commas"), read(path))


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_may_be_a_list_of_json_objects(indent, tmp_path):
    path = write_ops(tmp_path / "run.csv", "start_ms,dur_ms")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    text = json.dumps(rows, indent=indent)
    (tmp_path / "run.json").write_text(text)
    assert same(read(tmp_path / "run.json"), read(path))
    (tmp_path / "cut.json").write_text(text[:-10])
    (left_out,) = read(tmp_path / "cut.json").left_out
    assert left_out.why == "it ends early"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("place", ["pp", "stage", "pp,stage"])
def test_microbatches_may_be_counted_over_all_steps(place, first, tmp_path):
    # two microbatches on two workers: F 10 ms, B 20 ms; a step is 3 (10 + 20) = 90 ms
    ops = [(0, "F", 0, 0), (0, "F", 1, 10), (0, "B", 0, 40), (0, "B", 1, 70)]
    ops += [(1, "F", 0, 10), (1, "B", 0, 20), (1, "F", 1, 40), (1, "B", 1, 50)]
    rows = [
        (place, step, worker, op, 2 * step + microbatch + first, 100 * step + start)
        for step in range(3)
        for worker, op, microbatch, start in ops
    ]
    path = tmp_path / "run.csv"

    def write(rows):
        lines = (
            f"{','.join([str(worker)] * len(place.split(',')))},{op},{microbatch},{start},"
            f"{start + {'F': 10, 'B': 20}[op]}"
            for _, _, worker, op, microbatch, start in rows
        )
        path.write_text("\n".join([f"{place},op,mb,start_ms,end_ms", *lines]))
        return read(path)

    trace = write(rows)
    assert (trace.steps, trace.workers, trace.microbatch.max()) == ([0, 1, 2], 2, 1)
    assert cells(trace, 2, 0) == "0F0 0F1 0B0 0B1"
    assert write(rows[:8]).steps == [0]


def test_dates_without_a_time_zone_do_not_depend_on_the_clock_change(monkeypatch, tmp_path):
    monkeypatch.setenv("TZ", "Europe/Berlin")  # 03:00 becomes 02:00 on this day
    time.tzset()
    day = "2026-10-25T"
    rows = ("0,F,{0}02:59:59.900,{0}03:00:00.000", "0,B,{0}03:00:00.000,{0}03:00:00.200")
    (tmp_path / "run.csv").write_text("\n".join(["pp,op,start,end", *rows]).format(day))
    trace = read(tmp_path / "run.csv")
    monkeypatch.undo()
    time.tzset()
    assert sorted(trace.end - trace.start) == pytest.approx([0.1, 0.2])


def test_split_backwards_have_several_names(tmp_path):
    path = tmp_path / "run"
    rows = "0;fwd;0;1\n0;bwd;1;2\n0;wgrad;2;3\n1;fwd;1;2\n1;bwd;2;4\n"
    path.write_text(f"pp;op;start_s;end_s\n{rows}")
    trace = read(path)
    assert (cells(trace, 0, 0), cells(trace, 0, 1)) == ("0F0 0I0 0W0", "1F0 1B0")


def test_damaged_rows_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(
        "pp,op,mb,start_s,end_s\n0,F,0,0,1\n0,F,1,nan,2\n0,F,2,5,4\n0,F,x,1,2\n0.5,F,1,1,2\n"
        '0,F\n-1,F,3,1,2\n0,F,0,0,1\n0,F,4,inf,2\n1,F,0,2,3\n"0,F,1'
    )
    trace = read(path)
    assert (cells(trace, 0, 0), cells(trace, 0, 1)) == ("0F0", "1F0")
    assert [(entry.what.split(" of ")[0], entry.why, entry.count) for entry in trace.left_out] == [
        ("rows", "their number of cells is not the header's, 5: 7, 12", 2),
        ("rows", "its start is no finite number: 3, 10", 2),
        ("rows", "it ends before it starts: 4", 1),
        ("rows", "its worker is no whole number of at least 0: 6, 8", 2),
        ("rows", "it is an op and has no microbatch: 5", 1),
        ("slices", "they are exact copies of others", 1),
    ]


def test_two_jobs_are_not_one_run(runs, tmp_path):
    first = make_csv(tmp_path / "one", runs / "public_job.parquet")

    def change(row):
        return [v + 1 if k == 4 else v for k, v in enumerate(row)]

    later = make_csv(tmp_path / "two", runs / "public_job.parquet", change=change)
    why = r"must be of one run: .*one and .*two both have ops of step 23, "
    with pytest.raises(ValueError, match=why):
        read([first, later])
    assert len(read([first, first])) == len(read(first))
    shutil.copy(first, tmp_path / "copy")
    doubled = read([first, tmp_path / "copy"])
    assert (len(doubled), doubled.left_out[-1].count) == (len(read(first)), len(read(first)))


# lists of ranks


def test_lists_of_ranks(runs):
    trace = read(runs / "primus")
    assert (trace.steps, trace.workers, len(trace), trace.left_out) == ([3, 4], 8, 2 * 8 * 32, ())
    table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=16)
    for worker, row in enumerate(table.rows()):
        assert cells(trace, 3, worker) == " ".join(str(op) for cell in row for op in cell)
    first = json.loads((runs / "primus" / "pp_rank_0.json").read_text())["3"]
    assert times(trace)[3, 0, "F", 0, 1][0] == pytest.approx(1e-3 * first["fwd_start"][1])


def test_a_missing_rank_is_named(runs, tmp_path):
    folder = shutil.copytree(runs / "primus", tmp_path / "run")
    (folder / "pp_rank_3.json").unlink()
    (folder / "pp_rank_5.json").write_text('{"3": {"fwd_start": [1, 2')
    (folder / "notes.txt").write_text("nothing here")
    with pytest.raises(ValueError, match=r"of 8 there is no sound file of 2: rank 3, 5$"):
        read(folder)
    trace = read(folder, world=8)
    assert len(trace) == 2 * 6 * 32
    assert [(entry.what, entry.count) for entry in trace.left_out] == [
        (str(folder / "pp_rank_5.json"), 1),
        ("rank 3, 5", 2),
        (str(folder / "notes.txt"), 1),
    ]


@pytest.mark.parametrize("pp_size", [1, 2, 7])
def test_ranks_beyond_the_stated_size_are_another_run(pp_size, runs, tmp_path):
    folder = shutil.copytree(runs / "primus", tmp_path / "run")
    for path in folder.iterdir():
        if "rank" not in path.name:
            path.unlink()
    (folder / "sizes.json").write_text(json.dumps({"pp_size": pp_size}))
    with pytest.raises(ValueError, match=rf"one states {pp_size} ranks, another is 7$"):
        read(folder)


# Chrome traces

ZB_H1 = {
    0: "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
    1: "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
}


def test_labels_of_pytorch(runs):
    trace = read(sorted((runs / "pytorch").glob("zb-h1_*")))
    assert (trace.steps, trace.workers, trace.stages, trace.left_out) == ([0, 1, 2], 2, 2, ())
    for step in trace.steps:
        assert {worker: cells(trace, step, worker) for worker in (0, 1)} == ZB_H1
    assert trace.start.min() == 0.0
    assert {"UNSHARD", "REDUCE_GRAD", "WAIT_SEND_F"} <= set(trace.phases)


@pytest.mark.parametrize("name", ["zb-h1", "interleaved-1f1b"])
def test_ops_begin_when_their_message_is_there(name, runs):
    trace = read(sorted((runs / "pytorch").glob(f"{name}_*")))
    at, waited = times(trace), 0
    for (step, replica, phase, stage, microbatch), (start, _) in at.items():
        spent = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(phase)
        if spent and (step, replica, spent, stage, microbatch) in at:
            arrived = at[step, replica, spent, stage, microbatch][1]
            assert start >= arrived
            waited += start == arrived
    assert waited > 10
    for worker in (0, 1):
        ops = np.flatnonzero(trace.has_phase(("F", "B", "I", "W")) & (trace.worker == worker))
        assert (trace.start[ops][1:] >= trace.end[ops][:-1]).all()
    assert name == "zb-h1" or cells(trace, 1, 1).startswith("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0")


def test_steps_by_marks_and_by_repetition(tmp_path):
    labels = [(f"PP:0F{m}", 10 * step + m, 1) for step in range(3) for m in range(2)]
    assert read(labelled(tmp_path / "a", labels)).steps == [0, 1, 2]
    marks = [("ProfilerStep#7", 0, 9.5), ("ProfilerStep#8", 10, 9.5)]
    trace = read(labelled(tmp_path / "a", labels + marks))
    assert (trace.steps, len(trace)) == ([7, 8], 4)
    assert trace.left_out[0].count == 2
    # one op of rank 0 is there twice, rank 1 begins a step late
    twice = [*labels, ("PP:0F1", 11.5, 1)]
    other = [(f"PP:1F{m}", 10 * step + m + 1, 1) for step in range(1, 3) for m in range(2)]
    third = [(name.replace("0F", "2F"), at + 2, 1) for name, at, _ in labels]
    for rank, slices in enumerate((twice, other, third)):
        labelled(tmp_path / f"b{rank}", slices, rank=rank, world=3)
    trace = read([tmp_path / f"b{rank}" for rank in range(3)])
    assert [cells(trace, step, 0) for step in trace.steps] == ["0F0 0F1", "0F0 0F1 0F1", "0F0 0F1"]
    assert [cells(trace, step, 1) for step in trace.steps] == ["", "1F0 1F1", "1F0 1F1"]


@pytest.mark.parametrize("mark", ["train_step", "iteration", "train"])
@pytest.mark.parametrize("lost", [[0], [3], [2], [0, 1]])
def test_marks_without_numbers_are_matched_in_time(lost, mark, tmp_path):
    for rank in range(3):
        steps = [step for step in range(4) if rank != 1 or step not in lost]
        # an op of step s lasts s + 1 ms
        slices = [(f"PP:{rank}F0", 100 * step + 10 * rank, 1 + step) for step in steps]
        marks = [(mark, 100 * step - 1, 60) for step in steps]
        labelled(tmp_path / f"rank{rank}", slices + marks, rank=rank, world=3)
    trace = read(tmp_path)
    durations = np.rint(1e3 * (trace.end - trace.start))
    assert durations.tolist() == (trace.step + 1).tolist()
    assert len(trace) == 12 - len(lost)


@pytest.mark.parametrize("shifts", [(0, 1, 0), (0, 2, 20), (3, 0, 3), (0, 1, 2)])
@pytest.mark.parametrize("clock", ["stated", "since 1970", "unknown"])
def test_ranks_that_number_their_steps_otherwise_are_matched_in_time(clock, shifts, tmp_path):
    zero, origin = (10**18, 0) if clock == "stated" else (None, 0)
    origin = 1.7e12 if clock == "since 1970" else origin  # [ms]
    for rank, shift in enumerate(shifts):
        # an op of step s lasts s + 1 ms
        slices = [(f"PP:{rank}F0", origin + 100 * s + 10 * rank, 1 + s) for s in range(4)]
        marks = [(f"ProfilerStep#{5 + s + shift}", origin + 100 * s - 1, 60) for s in range(4)]
        path = tmp_path / f"rank{rank}"
        labelled(path, slices + marks, rank=rank, world=3, baseTimeNanoseconds=zero)
    trace = read(tmp_path)
    if clock == "unknown":  # a recording of later steps may begin at the same time
        assert {*trace.step.tolist()} == {5 + s + shift for s in range(4) for shift in shifts}
        return
    durations = np.rint(1e3 * (trace.end - trace.start))
    assert durations.tolist() == (trace.step - 5 - shifts[0] + 1).tolist()
    notes = [f"rank {k} counts {s - shifts[0]:+}" for k, s in enumerate(shifts) if s != shifts[0]]
    assert all(any(note in text for text in trace.inferred) for note in notes)


def test_numbers_of_hosts_that_run_ahead_stay(tmp_path):
    for rank, ahead in enumerate((0, 35, 70)):  # of steps of 100 ms
        slices = [(f"PP:{rank}F0", 100 * s + 10 * rank, 1) for s in range(rank, 4)]
        marks = [(f"ProfilerStep#{s}", 100 * s - ahead, 99) for s in range(rank, 4)]
        labelled(tmp_path / f"rank{rank}", slices + marks, rank=rank, world=3)
    assert not any("counts" in text for text in read(tmp_path).inferred)


def test_marks_may_stand_twice_or_in_each_other(tmp_path):
    slices = [("PP:0F0", 100 * step, 5) for step in range(2)]
    for k, extra in enumerate([(), ("train_step", "train_step"), ("train", "train_step")]):
        marks = [(name, 100 * step - 1, 9) for step in range(2) for name in extra]
        whole = [("train", -2, 150)] if extra else []  # around all steps
        trace = read(labelled(tmp_path / str(k), slices + marks + whole))
        assert (len(trace), len(trace.steps)) == (2, 2)


def test_marks_of_two_files_of_a_rank_go_on(tmp_path):
    for k in (0, 1):
        slices = [("PP:0F0", 100 * k, 5), ("train_step", 100 * k - 1, 9)]
        labelled(tmp_path / f"{k}_rank0", slices, rank=0, world=1)
    assert read(tmp_path).step.tolist() == [0, 1]


def test_files_with_equal_starts_alone_are_no_copies(tmp_path):
    for k, (name, length) in enumerate([("PP:0F0", 5), ("PP:0F0", 6), ("PP:0F1", 5)]):
        labelled(tmp_path / f"{k}_rank0", [(name, 0, length)], rank=0, world=1)
    paths = sorted(tmp_path.iterdir())
    for pair in itertools.combinations(paths, 2):
        with pytest.raises(ValueError, match="hold rank 0 at the same time"):
            read(pair)


def get_ranks(folder, how="unmarked", ahead=0.0):
    """Write the traces of four ranks in six steps; how long ops last says of which step they are."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
    slices, marks, begin = [[] for _ in range(4)], [], 0.0
    for step in range(6):
        long = np.random.default_rng(step).uniform(90, 110, (2, 4, 4))
        run = pj.evaluate(table, pj.Costs(forward=long[0], backward=2 * long[1], transmit=5.0))
        starts, durations = run.start.ravel(), run.finish.ravel() - run.start.ravel()
        ops = zip(*np.stack(table.ops[:4]).tolist(), strict=True)
        for cell, phase, stage, microbatch in ops:
            name = f"PP:{stage}{pj.Phase(phase).name}{microbatch}"
            slices[cell // table.num_slots].append((name, begin + starts[cell], durations[cell]))
        marks.append((f"ProfilerStep#{step}", begin - 20, run.makespan + 40))
        begin += run.makespan + 50
    for rank, rank_slices in enumerate(slices):
        moved = [(name, at + ahead * (rank == 1), durations) for name, at, durations in rank_slices]
        result = sorted(moved + marks * (how == "marked"), key=lambda event: event[1])
        labelled(folder / f"rank{rank}", result, rank=rank, world=4)
    return folder


def sound_pipelines(trace):
    result = pj.traces.find_pipelines(trace)
    durations = trace.end - trace.start
    spans_by_pipeline = {
        pipeline.step: (span, *np.round(1e9 * durations[pipeline.slices]).tolist())
        for pipeline, span in zip(result.pipelines, np.round(result.spans, 9).tolist(), strict=True)
    }
    return spans_by_pipeline, {entry.what for entry in result.left_out}


@pytest.mark.parametrize("how", ["marked", "unmarked", "packed"])
def test_of_a_cut_rank_the_steps_before_it_are_as_they_were(how, tmp_path):
    get_ranks(tmp_path, how)
    whole, _ = sound_pipelines(read(tmp_path))
    assert sorted(whole) == [*range(6)]
    counts = []
    for percent in range(2, 100, 2):
        path = tmp_path / f"rank{percent // 2 % 4}"
        content = path.read_bytes()
        packed = gzip.compress(content) if how == "packed" else content
        path.write_bytes(packed[: len(packed) * percent // 100])
        trace = read(tmp_path, world=4)
        path.write_bytes(content)
        if percent > 36:  # before, no step may be whole
            result, named = sound_pipelines(trace)
            assert result == {step: whole[step] for step in result}
            assert {f"step {step}, replica 0" for step in whole if step not in result} <= named
            counts.append(len(result))
    assert counts == sorted(counts)
    assert set(counts) >= {2, 3, 4, 5}


def test_a_lost_last_worker_does_not_make_a_shorter_pipeline(tmp_path):
    get_ranks(tmp_path)
    (tmp_path / "rank3").write_text("{}")
    with pytest.raises(ValueError, match=r"of 4 there is no sound file of 1: rank 3$"):
        read(tmp_path)
    trace = read(tmp_path, world=4)
    assert trace.workers == aligned(trace)[0].workers == 4
    with pytest.raises(ValueError, match="worker 3 is missing"):
        pj.traces.find_pipelines(trace)


def test_a_cut_rank_whose_clock_is_another_is_left_out(tmp_path):
    for ahead, why in ((3.0, ""), (1500.0, "its steps are others by time than by count")):
        path = get_ranks(tmp_path, ahead=ahead) / "rank1"
        # counted alike, whatever the clock is
        assert len(sound_pipelines(aligned(read(tmp_path))[0])[0]) == 6
        text = path.read_text()
        path.write_text(text[: len(text) // 2])
        trace = read(tmp_path)
        message = [entry for entry in trace.left_out if entry.what == "slices of rank 1"]
        assert [entry.why[:42] for entry in message] == [why] * bool(why)
        assert (1 in trace.worker) == (not why)


def test_replicas_and_missing_ranks(tmp_path):
    ranks = {0: 0, 1: 0, 2: 1, 3: 1, 5: 2, 6: 3, 7: 3}  # rank 4 has no file
    for rank, stage in ranks.items():
        labelled(tmp_path / f"r{rank}.json", [(f"PP:{stage}F0", stage, 1)], rank=rank, world=8)
    with pytest.raises(ValueError, match="rank 4; if these run several replicas, --world 8 leaves"):
        read(tmp_path)
    trace = read(tmp_path, world=8)
    result = list(zip(trace.replica.tolist(), trace.worker.tolist(), strict=True))
    assert sorted(result) == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [(entry.what, entry.count) for entry in trace.left_out] == [("rank 4", 1)]
    # ranks of tensor parallelism would have the same files
    assert any(text.endswith("of these, give one file per stage") for text in trace.inferred)


@pytest.mark.parametrize("world", [0, 16])
def test_every_fourth_rank_is_a_pipeline(world, tmp_path):
    # four ranks split the ops of each stage; the files of one of them are enough
    for stage in range(4):
        slices = [(f"PP:{stage}F0", stage, 1), (f"PP:{stage}B0", 8 - stage, 1)]
        path = labelled(tmp_path / f"rank{4 * stage}", slices, rank=4 * stage, world=16)
        if not world:
            content = json.loads(path.read_text())
            path.write_text(json.dumps({"traceEvents": content["traceEvents"]}))
    trace = read(tmp_path)
    assert (trace.workers, trace.worker.tolist()) == (4, trace.stage.tolist())
    assert any("every 4th has a file" in note for note in trace.inferred)
    assert trace.ranks == {(0, worker): 4 * worker for worker in range(4)}
    (tmp_path / "rank4").unlink()
    with pytest.raises(ValueError, match="there is no sound file of"):
        read(tmp_path)


def test_ranks_that_no_file_states_follow_stages(tmp_path):
    # processes of a file in any order, and files whose names run against the stages
    events = [
        {"ph": "X", "name": f"PP:{s}F0", "pid": f"p{s}", "tid": 0, "ts": 1e3 * s, "dur": 1e3}
        for s in (2, 0, 3, 1)
    ]
    (tmp_path / "processes.json").write_text(json.dumps(events))
    for event in events:
        (tmp_path / f"{'dcba'[int(event['pid'][1])]}.json").write_text(json.dumps([event]))
    for paths in ([tmp_path / "processes.json"], sorted(tmp_path.glob("?.json"))):
        trace = read(paths)
        assert sorted(trace.stage.tolist()) == [0, 1, 2, 3]
        assert trace.worker.tolist() == trace.stage.tolist()


@with_cases("name rank", *read_cases("ranks in names of files"))
def test_ranks_on_single_axes_are_no_ranks_of_the_run(name, rank):
    assert file_rank(Path("folder", name)) == rank


def test_missing_ranks_are_named_where_labels_lack_stages(tmp_path):
    for rank in (0, 2, 4, 6):
        slices = [("forward_step", rank, 1), ("backward_step", 20 - rank, 1)]
        labelled(tmp_path / f"r{rank}", slices, rank=rank, world=8)
    why = "of 8 there is no sound file of 4: rank 1, 3, 5, 7; if one in 2 is a worker of one"
    with pytest.raises(ValueError, match=why):
        read(tmp_path)
    assert read(tmp_path, world=8).workers == 4


def test_two_files_of_a_rank_are_parts_copies_or_two_jobs(tmp_path):
    for part in range(2):
        slices = [(f"PP:0F{m}", 100 * part + 10 * m, 9) for m in range(2)]
        labelled(tmp_path / f"part{part}.json", slices)
    assert read(tmp_path).steps == [0, 1]
    shutil.copy(tmp_path / "part1.json", tmp_path / "part2.json")
    trace = read(tmp_path)
    assert (trace.steps, len(trace)) == ([0, 1], 4)
    assert [entry.why for entry in trace.left_out] == ["a copy of part1.json"]
    labelled(tmp_path / "part3.json", [("PP:0F0", 104, 20), ("PP:0F1", 130, 20)])
    with pytest.raises(ValueError, match=r"part3.json hold rank 0 at the same time; give the f"):
        read(tmp_path)


def test_two_lists_of_a_rank_are_parts_copies_or_two_jobs(runs, tmp_path):
    folder = shutil.copytree(runs / "primus", tmp_path / "run")
    data = json.loads((folder / "pp_rank_0.json").read_text())
    whole = read(folder)
    for step in data:
        (folder / f"step{step}_rank_0.json").write_text(json.dumps({step: data[step]}))
    assert same(read(folder), whole)
    (folder / "pp_rank_0.json").unlink()
    assert same(read(folder), whole)
    first = next(iter(data))
    other = data[first] | {"fwd_start": [at - 1 for at in data[first]["fwd_start"]]}
    (folder / "other_rank_0.json").write_text(json.dumps({first: other}))
    with pytest.raises(ValueError, match=f"another file hold step {first} of rank 0; give the"):
        read(folder)


def test_a_cut_rank_stays_with_the_replicas_of_its_worker(tmp_path):
    for rank in range(4):
        stages = [rank % 2] if rank == 2 else [rank % 2, rank % 2 + 2]
        slices = [(f"PP:{stage}F0", stage, 1) for stage in stages]
        labelled(tmp_path / f"r{rank}.json", slices, rank=rank, world=4)
    trace = read(tmp_path)
    result = zip(trace.replica.tolist(), trace.worker.tolist(), trace.stage.tolist(), strict=True)
    assert " ".join(f"{r}{w}{s}" for r, w, s in result) == "000 002 011 013 100 111 113"


def launching(number, at, start, durations, stream=7):
    called = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 99}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": stream, "ts": 1000 * start}
    arguments = {"correlation": number}
    return [
        called | {"ts": 1000 * at, "dur": 10, "args": arguments},
        kernel | {"dur": 1000 * durations, "args": arguments | {"stream": stream}},
    ]


def with_events(path, events):
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"traceEvents": [*data["traceEvents"], *events]}))
    return path


def test_kernels_time_the_ops_that_launched_them(tmp_path):
    slices = [("PP:0F0", 0, 1), ("PP:0SEND_F0", 1, 1), ("PP:0F1", 2, 1), ("PP:0B0", 3, 1)]
    kernels = [
        *launching(1, 0.2, 5, 1),
        *launching(2, 0.4, 7, 1),  # the same op: from 5 to 8
        *launching(3, 2.5, 9, 3),
        *launching(4, 2.6, 30, 0.1, stream=20),  # of another stream
        *launching(5, 3.5, 12, 4),
        *launching(6, 1.5, 0, 50),  # of no op
    ]
    trace = read(with_events(labelled(tmp_path / "a", slices), kernels))
    assert (trace.end - trace.start)[trace.has_phase("F")] == pytest.approx([3e-3, 3e-3])
    assert (trace.end - trace.start)[trace.has_phase("B")] == pytest.approx([4e-3])
    # without the kernels of one forward of two, its file is not whole
    trace = read(with_events(labelled(tmp_path / "b", slices), kernels[4:]))
    assert (trace.end - trace.start)[trace.has_phase("F")] == pytest.approx([1e-3, 1e-3])
    assert "timed by the host" in trace.left_out[0].why


NO_DURATION, NO_CALL = "no duration of at least 0", "no recorded call launched them"


@with_cases(
    "event fault why",
    *((1, {"dur": value}, NO_DURATION) for value in (-5, None, float("nan"))),
    (1, {"ts": "soon"}, NO_DURATION),
    (1, {"args": {"stream": 7}}, NO_CALL),
    (1, {"args": {"stream": 7, "correlation": "2"}}, NO_CALL),
    (0, {"args": {}}, NO_CALL),
    (0, {"ts": None}, NO_CALL),
)
def test_kernels_that_time_no_op_are_counted(event, fault, why, tmp_path):
    launched = launching(2, 0.4, 7, 1)
    launched[event] |= fault
    path = labelled(tmp_path / "a", [("PP:0F0", 0, 1), ("PP:0B0", 3, 1)])
    first, last = launching(1, 0.2, 5, 1), launching(3, 3.5, 9, 2)
    trace = read(with_events(path, [*first, *launched, *last]))
    # the lost kernel would end at 8 ms
    assert trace.end - trace.start == pytest.approx([1e-3, 2e-3])
    assert [(entry.what, entry.count) for entry in trace.left_out] == [("kernels of rank 0", 1)]
    assert why in trace.left_out[0].why


def test_kernels_of_several_processes_in_a_file_are_counted(tmp_path):
    path = labelled(tmp_path / "a", [("PP:0F0", 0, 1)], world=2)
    other = {"name": "PP:1F0", "ph": "X", "ts": 2000, "dur": 1000, "pid": 77}
    title = {"name": "process_name", "ph": "M", "args": {"name": "rank 1"}, "pid": 77}
    own_title = title | {"args": {"name": "rank 0"}, "pid": 1}
    trace = read(with_events(path, [other, title, own_title, *launching(1, 0.5, 5, 3)]))
    assert trace.end - trace.start == pytest.approx([1e-3, 1e-3])
    assert [entry.count for entry in trace.left_out] == [1]
    assert "ops are timed by the host" in trace.left_out[0].why


@pytest.mark.parametrize("kinds", ["BE", "be"])
@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("is_nested", [True, False])
def test_ends_close_the_slice_of_their_name(is_nested, has_names, kinds, tmp_path):
    begin, end = kinds
    # 0F0 lasts 2 ms and 0B0 3 ms; with equal times, B of the second may precede E of the first
    events = [("PP:0F0", begin, 0), ("PP:0F0", end, 2), ("PP:0B0", begin, 2), ("PP:0B0", end, 5)]
    if is_nested and has_names:
        events[1:3] = events[2:0:-1]
    slices = [
        {"ph": kind, "ts": 1000 * at, "pid": 0, "tid": 1, "id": 7}
        | ({"name": name} if has_names or kind == begin else {})
        for name, kind, at in [("load", begin, -1), *events, ("load", end, 9)]
    ]
    trace = read(with_events(labelled(tmp_path / "a", []), slices))
    assert trace.end - trace.start == pytest.approx([2e-3, 3e-3])


@pytest.mark.parametrize("name", ["PP:0B0", "PP:0B3", "PP:0W0"])
def test_ops_that_never_end_are_counted(name, tmp_path):
    begin = {"name": name, "ph": "B", "ts": 5000, "pid": 0, "tid": 1}
    ends = [{"ph": "E", "pid": 0, "tid": 1, "ts": value} for value in (None, "x", float("nan"))]
    for k, events in enumerate([[begin], *([begin, end] for end in ends)]):
        path = with_events(labelled(tmp_path / str(k), [("PP:0F0", 0, 1)]), events)
        (entry,) = read(path).left_out
        why = "its time is no finite number" if k else "it has no end"
        assert (entry.why, entry.count) == (why, 1)


def test_what_launches_no_kernel_takes_no_time(tmp_path):
    """As I of the first stage, whose input needs no gradient."""
    slices = [("PP:0F0", 0, 1), ("PP:0I0", 2, 4), ("PP:0W0", 7, 1)]
    kernels = [*launching(1, 0.5, 1, 9), *launching(2, 7.5, 10, 2)]
    trace = read(with_events(labelled(tmp_path / "a", slices), kernels))
    assert (trace.end - trace.start).tolist() == pytest.approx([9e-3, 0, 2e-3])
    assert trace.start[trace.has_phase("I")] == trace.start[trace.has_phase("W")]


@pytest.mark.parametrize("lost", ["last", "first"])
def test_ops_without_kernels_are_not_put_beside_others(lost, tmp_path):
    """Those after the last launch of a capture are left out, and all of a rank that lost others."""
    for rank in (0, 1):
        slices = [(f"PP:{rank}F{m}", 2 * m, 1) for m in range(2)]
        path = labelled(tmp_path / f"rank{rank}", slices, rank=rank, world=2)
        kernels = [*launching(1, 0.5, 5, 3), *launching(2, 2.5, 8, 3)]
        with_events(path, kernels[: 4 - 2 * rank] if lost == "last" else kernels[2 * rank :])
    trace, left_out = read(tmp_path), 1 if lost == "last" else 2
    assert (trace.workers, trace.worker.tolist()) == (2, [0, 0, 1][: 4 - left_out])
    assert (trace.end - trace.start).tolist() == pytest.approx([3e-3] * (4 - left_out))
    assert [(e.what, e.count) for e in trace.left_out] == [("slices of rank 1", left_out)]


def test_exports_of_runs_with_collectives_and_updates_are_read(tmp_path):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    times = {"forward": 1.0, "backward": 2.0, "all_reduce": 1.0, "update": 0.5, "transmit": 0.1}
    run = pj.evaluate(table, pj.Costs(**times))
    (tmp_path / "run.json").write_text(pj.files.chrome_trace(run))
    trace = read(tmp_path)
    assert trace.workers == 4
    last = run.makespan - 1.5  # all-reduce and update follow the last backward
    assert trace.end[trace.has_phase("B")].max() == pytest.approx(last, rel=1e-9)


def test_a_trace_of_a_gpu(data):
    """PyTorch 2.11, four processes on one H200, two stages each, stage 1 with three layers of two.

    Messages go through the host, which waits for them in its ops; the threads of autograd launch
    the kernels of backwards.
    """
    result = pj.traces.find_pipelines(read(data / "gpu_trace"))
    assert not result.left_out
    assert len(result.pipelines) == 2
    assert pj.traces.registered(result.table) == ("interleaved-zb", {"stages_per_worker": 2})
    trace = result.trace
    durations = trace.end - trace.start
    for phase in ("F", "I"):  # the quickest: processes take turns on the GPU
        chosen = [trace.has_phase(phase) & (trace.stage == stage) for stage in range(1, 7)]
        took = [durations[rows].min() for rows in chosen]
        assert took == pytest.approx([1.5 * took[1], *[took[1]] * 5], rel=0.01)


@pytest.mark.parametrize(("unit", "factor"), [("s", 1e-6), ("ms", 1e-3), ("ns", 1e3)])
def test_a_chrome_trace_in_another_unit_than_its_form_says_is_asked_for(unit, factor, tmp_path):
    path = labelled(tmp_path / "a", [("PP:0F0", 0, 12), ("PP:0B0", 13, 24)])
    assert sorted(read(path).end) == pytest.approx([0.012, 0.037])
    data = json.loads(path.read_text())
    for event in data["traceEvents"]:
        begin = 1.75e18 if unit == "ns" else 0.0  # since 1970
        event |= {"ts": begin + factor * event["ts"], "dur": factor * event["dur"]}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"in us; give .*unit={unit}.*, or unit=us if this is"):
        read(path)
    trace = read(path, columns={"unit": unit})
    assert sorted(trace.end - trace.start) == pytest.approx([0.012, 0.024])
    assert len(read(path, columns={"unit": "us"})) == 2


@pytest.mark.parametrize("milliseconds", [2.5, 12, 19])
def test_nanoseconds_that_look_like_seconds_are_asked_for(milliseconds, tmp_path):
    path = labelled(tmp_path / "a", [("PP:0F0", 0, 1e3 * milliseconds)])
    with pytest.raises(ValueError, match=r"in us; give .*unit=ns, or unit=us if this is right"):
        read(path)
    assert read(path, columns={"unit": "us"}).end == pytest.approx(milliseconds)
    assert read(path, columns={"unit": "ns"}).end == pytest.approx(milliseconds / 1e3)
    assert len(read(labelled(tmp_path / "b", [("PP:0F0", 0, 1900)]))) == 1


@with_cases("label", "{} 0", "{} microbatch 0 stage {}", "{}_mb0_stage{}", "{} stage {} mb 0")
def test_labels_number_ops_in_several_orders(label, tmp_path):
    for rank in (0, 1):
        starts = ("Forward", 10 * rank, 9), ("Backward", 50 - 10 * rank, 5)
        slices = [
            (label.format(name, rank), start + 100 * step, length)
            for step in range(2)
            for name, start, length in starts
        ]
        labelled(tmp_path / f"{rank}", slices, rank=rank, world=2)
    trace = read(tmp_path)
    assert (cells(trace, 1, 0), cells(trace, 1, 1)) == ("0F0 0B0", "1F0 1B0")
    assert trace.inferred == ()  # labels number all ops: a first op that repeats begins a step


def test_stages_that_labels_do_not_say(tmp_path):
    for rank in (0, 1):
        slices = [("Forward 0", 10 * rank, 9), ("Backward 0", 50 - 10 * rank, 5)]
        slices += [("gloo:recv", 11, 2)] * rank
        labelled(tmp_path / f"{rank}", slices, rank=rank, world=2)
    trace = read([tmp_path / "0", tmp_path / "1"])
    assert (cells(trace, 0, 0), cells(trace, 0, 1)) == ("0F0 0B0", "1F0 1B0")
    assert times(trace)[0, 0, "F", 1, 0][0] == pytest.approx(13e-3)


@pytest.mark.parametrize("name", ["zb-h1", "dualpipe-v", "chimera"])
def test_our_own_exports_come_back(name, tmp_path):
    table = pj.schedules.build(name, num_workers=2, num_microbatches=4)
    run = pj.evaluate(
        table, pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0, backward=2.0, latency=0.5)
    )
    path = tmp_path / "run"
    path.write_text(pj.files.chrome_trace(run))
    trace = read(path)
    assert trace.left_out == ()
    for worker, row in enumerate(table.rows()):
        expected = sorted(str(op) for cell in row for op in cell)
        assert sorted(cells(trace, 0, worker).split()) == expected
    assert trace.end.max() == pytest.approx(run.makespan)
    received = trace.has_phase(["RECV_F"])
    assert received.sum() == np.sum(trace.has_phase(["SEND_F"])) > 0
    places = zip(trace.stage[received].tolist(), trace.worker[received].tolist(), strict=True)
    assert {*places} <= {(s, w) for pipe in table.placement.tolist() for s, w in enumerate(pipe)}


# what is not one of ours


STAGES = {"1f1b": 1, "interleaved-1f1b": 2, "chimera": 1, "hanayo": 2}  # per worker


@pytest.mark.parametrize(
    ("name", "form"),
    # lists of ranks cannot say on which of two pipes an op runs
    [pair for pair in itertools.product(STAGES, truth.FORMS) if pair != ("chimera", "lists")],
)
def test_stated_sizes_must_be_those_of_the_files(name, form, tmp_path):
    """Sizes that labels state already may be repeated, but not changed."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    slices, _ = truth.recorded(table, 1, "nothing", steps=2)
    truth.write(tmp_path, form, slices, table, "nothing", 1)
    right = {"steps": 2, "microbatches": 8, "stages_per_worker": STAGES[name]}
    right |= {"world": 4, "replicas": 1}
    assert len(read(tmp_path, **right)) == len(read(tmp_path)) == len(slices)
    for size, value in right.items():
        wrong_values = [value + 1] + [value - 1] * (value > 1)
        # a run may have more ranks than there are files
        for wrong_value in wrong_values[size == "world" :]:
            with pytest.raises(ValueError, match=rf"^{size} must .*, got {wrong_value}$"):
                read(tmp_path, **{size: wrong_value})
    if form in ("lists", "chrome"):
        with pytest.raises(ValueError, match=r"^columns are for Parquet"):
            read(tmp_path, columns={"stage": "pp"})


def test_what_holds_no_slices_is_refused_in_one_line(tmp_path):
    cases = json.loads((Path(__file__).parent / "data" / "without_slices.json").read_text())
    for number, (content, why, *_) in enumerate(cases):
        path = tmp_path / str(number)
        path.write_bytes(content.encode())
        for name in (path, [path], tmp_path / f"{number}.gz"):
            (tmp_path / f"{number}.gz").write_bytes(gzip.compress(content.encode()))
            if content.startswith("PAR1") and str(name).endswith("gz"):
                continue
            with pytest.raises(ValueError, match=why) as error:
                read(name)
            assert "\n" not in str(error.value)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"there is no file in .*none$"):
        read(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere")


def test_events_are_found_beside_broken_ones(tmp_path):
    path = labelled(tmp_path / "a", [(f"PP:0F{m}", m, 1) for m in range(9)])
    text = path.read_text()
    path.write_text(text.replace('"PP:0F4"', '"PP:0F4', 1).replace('"ts": 6000', '"ts": NaN'))
    trace = read(path)
    assert cells(trace, 0, 0) == "0F0 0F1 0F2 0F3 0F5 0F7 0F8"
    assert {entry.why for entry in trace.left_out} == {
        "events that are not JSON",
        "its time is no finite number",
    }


def test_events_do_not_depend_on_how_the_text_is_cut():
    argument = {"name": [{"x": 1}]}
    all_events = [{"ph": "X", "name": '}],{"', "args": argument, "ts": k} for k in range(40)]
    text = json.dumps({"a": [1, {"traceEvents": 0}], "traceEvents": all_events, "last": 12})
    for size in (1, 7, 100, 10**6):
        header, faults = {}, Counter()
        pieces = (text[at : at + size] for at in range(0, len(text), size))
        assert list(read_events(pieces, header, faults)) == all_events
        assert header == {"a": [1, {"traceEvents": 0}], "last": 12}
        assert not faults


def tried(path, **sizes):
    try:
        return read(path, **sizes)
    except ValueError as error:
        return str(error)


SOURCES = ["public_job.parquet", "pytorch/zb-h1_rank0.json.gz", "pytorch/zb-h1_rank0.json.gz:"]
SOURCES += ["primus/pp_rank_0.json", "csv"]


@pytest.mark.parametrize("name", SOURCES)
def test_files_that_are_cut_or_changed_anywhere(name, runs, tmp_path):
    """Any damage ends in a trace or in one line; what was cut off leaves what is before it."""
    pytest.importorskip("pyarrow")
    if name == "csv":
        content = make_csv(tmp_path / "c", runs / "public_job.parquet").read_bytes()
    else:
        content = (runs / name.rstrip(":")).read_bytes()
        content = gzip.decompress(content) if name.endswith(":") else content
    path, draw, read_ones = tmp_path / "rank0", random.Random(1), 0
    # a rank alone is read as a run of one worker; the other files hold all workers
    sizes = {"world": 1, "stages_per_worker": 1} if "rank" in name else {}
    for turn in range(30):
        damaged = bytearray(content)
        if turn % 2:
            damaged = damaged[: draw.randrange(len(damaged))]
        else:
            for _ in range(draw.choice((1, 3, 100))):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(bytes(damaged))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcome = tried(path, **sizes)
        read_ones += isinstance(outcome, Trace)
        assert isinstance(outcome, Trace) or "\n" not in outcome
    assert read_ones > (0 if name.endswith(".json") or name.endswith("parquet") else 10)


def test_progress_is_told(runs):
    message = []
    read(runs / "primus", on_progress=lambda *news: message.append(news))
    size = sum(p.stat().st_size for p in (runs / "primus").iterdir())
    assert message[-1][:2] == (size, size)


# clocks


def ahead(trace, worker, seconds):
    by = seconds * (trace.worker == worker)
    columns = {name: getattr(trace, name) for name in INTEGERS}
    columns |= {name: getattr(trace, name) + by for name in TIMES}
    return Trace.from_columns(columns, trace.phases, trace.left_out, trace.source)


def test_sound_clocks_stay(public):
    trace, offsets = aligned(public)
    assert same(trace, public)
    assert not any(offset.is_corrected for offset in offsets)
    assert max(offset.residual for offset in offsets) < 2e-3


@pytest.mark.parametrize("worker", range(4))
@pytest.mark.parametrize("seconds", [0.01, -0.3])
def test_a_wrong_clock_is_named_and_put_right(worker, seconds, public):
    trace, offsets = aligned(ahead(public, worker, seconds))
    assert {offset.worker for offset in offsets if offset.is_corrected} == {worker}
    for offset in offsets:
        if offset.is_corrected:
            assert abs(offset.seconds - seconds) < 1e-4 < offset.residual < 1e-3
    assert same(ahead(trace, worker, 0.0), trace)
    assert max(abs(times(trace)[key][0] - times(public)[key][0]) for key in times(public)) < 1e-4


@pytest.mark.parametrize("worker", range(4))
def test_clocks_that_agree_with_all_but_a_wrong_one_stay(worker):
    """Also where the one furthest from it, over several messages, could agree with it."""
    table = pj.schedules.build("v-half", num_workers=4, num_microbatches=8)
    cost = pj.Costs(forward=2.0, input_grad=2.0, weight_grad=2.0, transmit=1.0)
    trace = pj.traces.record_runs([pj.evaluate(table, cost)] * 2)
    for seconds in (-2.6, 2.6):
        _, offsets = aligned(ahead(trace, worker, seconds))
        assert [offset.worker for offset in offsets if offset.is_corrected] == [worker]


def test_clocks_without_messages(runs, public):
    lists = read(runs / "primus")
    _, offsets = aligned(ahead(lists, 3, -0.02))
    assert [offset.worker for offset in offsets if offset.is_corrected] == [3]
    assert offsets[3].seconds == pytest.approx(-0.02, abs=1e-3)
    _, offsets = aligned(ahead(lists, 3, -0.02), by_step=True)
    assert [(o.step, o.worker) for o in offsets if o.is_corrected] == [(3, 3), (4, 3)]
    forwards = lists.only(lists.has_phase(["F"]))
    trace, offsets = aligned(forwards, always=True, by_step=False)
    assert [offset.residual for offset in offsets[1:]] == [np.inf] * 7
    assert trace.left_out[-1].why == "no messages lead from its worker, so its offset is unknown"


def test_few_early_ops_do_no_harm(public):
    """In one of six steps, ops seem to start a second before their inputs end."""
    columns = {
        name: np.concatenate([getattr(public, name), getattr(public, name) + (name == "step")])
        for name in (*INTEGERS, *TIMES)
    }
    trace = Trace.from_columns(columns, public.phases)
    assert len(trace.steps) == 6
    wrong = trace.has_phase(["F"]) & (trace.stage > 0) & (trace.step == 34)
    early = {name: getattr(trace, name) - 1.0 * wrong for name in TIMES}
    columns = {name: getattr(trace, name) for name in INTEGERS}
    damaged = Trace.from_columns(columns | early, trace.phases)
    assert not any(offset.is_corrected for offset in aligned(damaged)[1])
    two_steps, single_step = (damaged.only(damaged.step > first) for first in (30, 33))
    assert len(two_steps.steps) == 2
    assert not any(offset.is_corrected for offset in aligned(two_steps)[1])
    assert any(offset.is_corrected for offset in aligned(single_step)[1])


# slices that hold the waits of their ops


def holding_waits(trace, workers=range(8)):
    """Let every slice of some workers begin where the one before ended, the first at 0."""
    start = trace.start.copy()
    for step, worker in itertools.product(trace.steps, workers):
        rows = np.flatnonzero((trace.step == step) & (trace.worker == worker))
        rows = rows[np.argsort(trace.start[rows], kind="stable")]
        start[rows] = np.append(trace.start[trace.step == step].min(), trace.end[rows[:-1]])
    columns = {name: getattr(trace, name) for name in INTEGERS}
    return Trace.from_columns(columns | {"start": start, "end": trace.end}, trace.phases)


HELD = (
    r"worker ([\d, ]+) seem to include waits: (\d+) of (\d+) begin where the previous slice ended, "
    "and no offset of clocks explains the messages of both directions; record receives"
)
RUNS_WITH_WAITS = read_cases("slices with waits")


@pytest.mark.parametrize("case", RUNS_WITH_WAITS)
def test_slices_that_hold_their_waits_are_named_beside_clocks(case):
    schedule, options, workers = RUNS_WITH_WAITS[case]
    table = pj.schedules.build(schedule, num_workers=4, num_microbatches=8, **options)
    costs = pj.Costs(forward=10e-3, input_grad=10e-3, weight_grad=10e-3, transmit=1e-3)
    trace = pj.traces.record_runs([pj.evaluate(table, costs)] * 3)
    assert len(pj.traces.find_pipelines(trace).pipelines) == 3
    for held in (holding_waits(trace, workers), aligned(holding_waits(trace, workers))[0]):
        with pytest.raises(ValueError, match="clocks may differ, or slices of worker") as caught:
            pj.traces.find_pipelines(held)
        names, count, number = re.search(HELD, str(caught.value)).groups()
        assert {*map(str, workers)} <= {*names.split(", ")}
        assert int(count) >= 0.9 * int(number)


def test_messages_of_the_past_are_no_waits():
    """Ops begin 20 ms before their input is there, with idle time before them: no wait is held."""
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
    trace = pj.traces.record_runs([pj.evaluate(table, pj.Costs(forward=50e-3, backward=50e-3))])
    # worker 1: 1F0 50-100, 1F1 100-150, 1B1.. ; 0B0 begins 20 ms before 1B0 has ended
    by = 20e-3 * ((trace.worker == 1) & trace.has_phase(["F"]))
    by -= 20e-3 * ((trace.worker == 1) & trace.has_phase(["B"]))
    columns = {name: getattr(trace, name) for name in INTEGERS}
    columns |= {name: getattr(trace, name) - by for name in TIMES}
    with pytest.raises(ValueError, match=r"clocks may differ$"):
        pj.traces.find_pipelines(Trace.from_columns(columns, trace.phases))
