"""Files that contradict or repeat themselves: a reader names the wrong part and uses the rest."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import trace_truth as truth
from daily import with_cases

import pipejax as pj

WORKERS, COUNT = 3, 6
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@pytest.fixture
def table():
    return pj.schedules.build("1f1b", num_workers=WORKERS, num_microbatches=COUNT)


def write_csv(path, slices, duration=None, unit="s", head="duration"):
    names = ["step", "worker", "stage", "phase", "microbatch", "start_s", "end_s"]
    rows = [[s.step, s.worker, s.stage, s.phase, s.microbatch, s.start, s.end] for s in slices]
    if duration is not None:
        names = [*names, head]
        rows = [[*row, duration(s) / SECONDS[unit]] for row, s in zip(rows, slices, strict=True)]
    return truth.write_rows(path, [names, *rows])


def reasons(trace):
    counts = Counter()
    for entry in trace.left_out:
        counts[entry.why.split(":")[0]] += entry.count
    return counts


DIFFER = "end and duration differ (remove the wrong one)"


@with_cases(
    "wrong seconds",
    (lambda s: s.step == 1, lambda s: 0.5),
    (lambda s: s.worker == 0 and s.phase == "F", lambda s: 3 * (s.end - s.start)),
    (lambda s: s.microbatch == 2, lambda s: s.end - s.start + 0.002),
    (lambda s: (s.step, s.microbatch, s.phase) == (0, 0, "B"), lambda s: 0.0),
    ids=["a step", "a worker", "2 ms longer", "zeros"],
)
@pytest.mark.parametrize(("unit", "head"), [("s", "duration_s"), ("ms", "dur_ms"), ("us", "dur")])
def test_rows_whose_end_and_duration_differ_are_counted(
    wrong, seconds, unit, head, table, tmp_path
):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)

    def length(s):
        return seconds(s) if wrong(s) else s.end - s.start

    path = write_csv(tmp_path / "run.csv", slices, length, unit, head)
    trace = pj.traces.read(path)
    count = sum(map(wrong, slices))
    assert reasons(trace) == {DIFFER: count}
    assert len(trace) == len(slices) - count


@with_cases(
    "seconds",
    lambda s: round(s.end - s.start, 3),
    lambda s: round(s.end - s.start, 4),
    lambda s: 1.005 * (s.end - s.start),
    lambda s: float(np.float32(s.end - s.start)),
    lambda s: np.nan,
    ids=["ms", "100 us", "another clock", "32 bits", "no duration"],
)
def test_ends_and_durations_that_differ_by_rounding_are_read(seconds, table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    trace = pj.traces.read(write_csv(tmp_path / "run.csv", slices, seconds))
    assert not trace.left_out
    spent = sum(s.end - s.start for s in slices)
    assert (trace.end - trace.start).sum() == pytest.approx(spent)


def test_starts_and_ends_in_ms_since_1970_are_rounded(table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    begin = 1.7e9
    since_1970 = [
        s._replace(start=round(begin + s.start, 3), end=round(begin + s.end, 3)) for s in slices
    ]
    spent = {(s.step, s.stage, s.phase, s.microbatch): s.end - s.start for s in slices}

    def seconds(s):
        return spent[s.step, s.stage, s.phase, s.microbatch]

    trace = pj.traces.read(write_csv(tmp_path / "right.csv", since_1970, seconds))
    assert not trace.left_out
    path = write_csv(tmp_path / "wrong.csv", since_1970, lambda s: 1.5 * seconds(s), "s", "dur_s")
    with pytest.raises(ValueError, match="end and duration differ"):
        pj.traces.read(path)


@pytest.mark.parametrize("seconds", [0.5, 0.03, 0.0005])
@pytest.mark.parametrize("head", ["duration", "duration_s"])
def test_a_file_of_nothing_but_contradictions_is_refused(seconds, head, table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    path = write_csv(tmp_path / "run.csv", slices, lambda s: seconds, head=head)
    with pytest.raises(ValueError, match="end and duration differ"):
        pj.traces.read(path)


@pytest.mark.parametrize("form", ["csv", "lists", "chrome"])
@pytest.mark.parametrize("way", ["same path", "its folder", "other spelling", "link"])
def test_a_file_that_is_listed_twice_is_named(form, way, table, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    truth.write(folder, form, slices, table, "nothing", 1)
    files = sorted(folder.iterdir())
    (tmp_path / "link").symlink_to(files[0])
    again = {
        "same path": files[0],
        "its folder": folder,
        "other spelling": folder / ".." / "run" / files[0].name,
        "link": tmp_path / "link",
    }[way]
    trace = pj.traces.read([*files, again])
    count = len(files) if way == "its folder" else 1
    assert reasons(trace) == {"it is listed again": count}
    assert len(trace) == len(slices)


def write_labels(path, slices, label):
    ranks = [
        {"name": "process_name", "ph": "M", "pid": k, "args": {"name": f"rank {k}"}}
        for k in range(WORKERS)
    ]
    place = {"ph": "X", "cat": "user_annotation", "tid": 1}
    events = [
        place
        | {"name": label(s), "pid": s.worker, "ts": 1e6 * s.start}
        | {"dur": 1e6 * (s.end - s.start)}
        for s in slices
    ]
    marks = []
    for step in sorted({s.step for s in slices}):
        begin = min(s.start for s in slices if s.step == step)
        end = max(s.end for s in slices if s.step == step)
        mark = {"name": f"ProfilerStep#{step}", "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        marks += [place | mark | {"pid": worker} for worker in range(WORKERS)]
    path.write_text(json.dumps({"traceEvents": [*ranks, *marks, *events]}))
    return path


WORDS = {"F": "forward", "B": "backward"}
LABELS = {
    "PyTorch": lambda s: f"PP:{s.stage}{s.phase}{s.microbatch}",
    "PyTorch without stages": lambda s: f"{WORDS[s.phase].title()} {s.microbatch}",
    "stages": lambda s: f"{WORDS[s.phase]}_stage{s.stage}_mb{s.microbatch}",
    "no stages": lambda s: f"{WORDS[s.phase]} mb{s.microbatch}",
    "Megatron-LM": lambda s: f"{WORDS[s.phase]}_step {s.microbatch}",
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", [*LABELS, "csv", "lists"])
def test_microbatches_that_count_from_1_are_read_and_named(name, first, table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    numbered = [s._replace(microbatch=s.microbatch + first) for s in slices]
    if name in LABELS:
        path = write_labels(tmp_path / "run.json", numbered, LABELS[name])
    else:
        truth.write(tmp_path, name, numbered, table, "nothing", 1)
        path = tmp_path
    trace = pj.traces.read(path)
    note = f"1 to {COUNT} in the files are read as 0 to {COUNT - 1}, unless"
    assert (note in " ".join(trace.inferred)) is bool(first)
    aligned, _ = pj.traces.aligned(trace)
    pipelines = pj.traces.find_pipelines(aligned)
    assert truth.judge(slices, aligned, pipelines) == "right"


@pytest.mark.parametrize("name", [*LABELS, "csv"])
def test_a_lost_first_microbatch_is_named(name, table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    rest = [s for s in slices if s.microbatch]
    if name in LABELS:
        path = write_labels(tmp_path / "run.json", rest, LABELS[name])
    else:
        path = write_csv(tmp_path / "run.csv", rest)
    note = f"1 to {COUNT - 1} in the files are read as 0 to {COUNT - 2}, unless microbatch 0"
    assert note in " ".join(pj.traces.read(path).inferred)
    with pytest.raises(ValueError, match=f"not of 1 to {COUNT - 1} alone: microbatches is 6"):
        pj.traces.read(path, microbatches=COUNT)


def test_a_message_shows_that_the_first_microbatch_is_lost(table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    rest = [
        s._replace(phase="SEND_F") if (s.phase, s.microbatch) == ("F", 0) else s for s in slices
    ]
    rest = [s for s in rest if s.microbatch or s.phase == "SEND_F"]
    lost = "must hold ops of microbatch 0, not of 1 to 5 alone: mess"
    with pytest.raises(ValueError, match=lost):
        pj.traces.read(write_csv(tmp_path / "run.csv", rest))


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_without_its_first_microbatch_is_left_out(step, table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=3)
    rest = [s for s in slices if s.microbatch or s.step != step]
    trace = pj.traces.read(write_csv(tmp_path / "run.csv", rest))
    pipelines = pj.traces.find_pipelines(trace)
    assert [pipeline.step for pipeline in pipelines.pipelines] == [k for k in range(3) if k != step]
    assert [entry.what for entry in pipelines.left_out] == [f"step {step}, replica 0"]


@pytest.mark.parametrize("seconds", [0.05, 1.0, 100.0])
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("steps", [2, 3, 4, 6])
@pytest.mark.parametrize("worker", range(WORKERS))
def test_one_wrong_time_costs_its_own_step_alone(worker, steps, side, seconds, table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=steps)
    row = next(k for k, s in enumerate(slices) if (s.worker, s.microbatch) == (worker, 3))
    times = {side: getattr(slices[row], side) + (seconds if side == "end" else -seconds)}
    damaged = [*slices[:row], slices[row]._replace(**times), *slices[row + 1 :]]
    trace, offsets = pj.traces.aligned(pj.traces.read(write_csv(tmp_path / "run.csv", damaged)))
    assert not any(offset.is_corrected for offset in offsets)
    pipelines = pj.traces.find_pipelines(trace)
    step = slices[row].step
    usual = [k for k in range(steps) if k != step]
    assert [pipeline.step for pipeline in pipelines.pipelines] == usual
    assert [entry.what for entry in pipelines.left_out] == [f"step {step}, replica 0"]
    spans = [
        max(s.end for s in slices if s.step == k) - min(s.start for s in slices if s.step == k)
        for k in usual
    ]
    assert pipelines.spans == pytest.approx(spans)


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("lead", [0.3, -2.0])
def test_a_wrong_clock_is_put_right_beside_one_wrong_time(lead, steps, table, tmp_path):
    slices, _ = truth.recorded(table, 1, "nothing", steps=steps)
    row = next(k for k, s in enumerate(slices) if (s.worker, s.microbatch) == (0, 3))
    moved = [
        s._replace(start=s.start + lead, end=s.end + lead) if s.worker == 2 else s for s in slices
    ]
    moved[row] = moved[row]._replace(end=moved[row].end + 1.0)
    trace, offsets = pj.traces.aligned(pj.traces.read(write_csv(tmp_path / "run.csv", moved)))
    corrected = {offset.worker: offset.seconds for offset in offsets if offset.is_corrected}
    assert corrected == pytest.approx({2: lead}, abs=2e-3)
    assert len(pj.traces.find_pipelines(trace).pipelines) == steps - 1


# steps of 12 ops that begin within one second, as whole seconds or another unit say them
@with_cases("text", "2025-03-30T01:00:{:02d}", "2025-03-30 01:00:{:02d}+02:00", "17432964{:02d}")
def test_times_that_hide_ops_are_refused(text, tmp_path, mistake):
    path = tmp_path / "run.csv"
    lines = ["step,pp,stage,op,mb,start,end"]
    for step, worker, phase, microbatch in itertools.product(range(3), (0, 1), "FB", range(3)):
        time = text.format(10 * step)
        lines.append(f"{step},{worker},{worker},{phase},{microbatch},{time},{time}")
    path.write_text("\n".join([*lines, ""]))
    options = () if "T" in text or "+" in text else ("--columns", "unit=s")
    why = "must have finer times: 36 of 36 ops end at the time at which they start"
    assert why in mistake("trace", path, *options)
