"""Hosts that launch late, slow links and machines: what the report says of each."""

import shlex

import host_runs
import pytest
import trace_truth as truth
from test_trace_faults import Case, simulate

import pipejax as pj

WRITERS = {
    "Nsight": host_runs.write_nsight,
    "Kineto": host_runs.write_kineto,
    "labels": lambda folder, run: host_runs.write_kineto(folder, run, with_device=False),
}
HOST = "launch-starved: the device of worker 2 idles"
LIKE_A_HOST = "a slow host would look like this {}: traces with CUDA calls distinguish them"
# changes of a run, first line with device work, error of the cost
RUNS = {
    "slow launches": ({"launch": {2: 1.5}, "waits": True}, HOST, 0.02),
    "slow launches, ahead": ({"launch": {2: 1.5}}, HOST, 0.2),  # the gaps before ops count, too
    "pauses": ({"pause": {2: 5.0}, "waits": True}, HOST, 0.06),
    "slow device": ({"slow": {2: 1.5}, "waits": True}, "straggler: worker 2", 0.02),
    "slow link": ({"links": {(1, 2): 5.0}, "waits": True}, "slow link: link worker 1 to 2 ", 0.02),
    "both ways": (
        {"links": {(1, 2): 12.0, (2, 1): 12.0}, "waits": True},
        "slow link: link worker 1 to 2 and back ",
        0.02,
    ),
}


@pytest.mark.parametrize("form", ["Nsight", "Kineto"])
@pytest.mark.parametrize("change", RUNS)
def test_a_slow_host_is_told_from_a_slow_device_or_link(change, form, tmp_path, answer_and_text):
    options, line, error = RUNS[change]
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    run, spans = host_runs.host_run(table, **options)
    _, usual = host_runs.host_run(table, waits=options.get("waits", False))
    WRITERS[form](tmp_path, run)
    result, text = answer_and_text("trace", str(tmp_path), "--schedules", "1f1b")
    assert text.startswith(line)
    assert "also:" not in text
    assert "slow host" not in text
    (first, *_) = result["suspects"]
    assert first["seconds"] == pytest.approx(1e-3 * (spans[0] - usual[0]), rel=error)


@pytest.mark.parametrize("change", ["slow launches", "slow launches, ahead", "pauses"])
def test_remedies_do_not_move_the_wait_for_a_host(change, tmp_path, answer_and_text):
    """They hold for the run that the event loop of `host_run` has without the fault."""
    options, _, _ = RUNS[change]
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    _, usual = host_runs.host_run(table, waits=options.get("waits", False))
    run, _ = host_runs.host_run(table, **options)
    host_runs.write_nsight(tmp_path, run)
    line = "trace", str(tmp_path), "--schedules", "zb-h1", "--save", str(tmp_path / "saved")
    result, text = answer_and_text(*line)
    assert result["pipeline_time"] == pytest.approx(1e-3 * usual[0], rel=0.015)
    assert "layers" not in [row["kind"] for row in result["remedies"]]
    assert ", as ops start late; causes and savings are shares of " in text
    assert "\nonce hosts launch in time: schedule zb-h1: saves " in text
    (remedy,) = (row for row in result["remedies"] if row["what"] == "schedule zb-h1")
    saved, _ = answer_and_text(*shlex.split(remedy["command"])[1:])
    assert saved["makespan"] == pytest.approx(remedy["step_time"], rel=1e-6)


@pytest.mark.parametrize(("change", "noun"), [("slow launches", "worker"), ("slow link", "link")])
def test_labels_alone_do_not_tell_a_slow_host(change, noun, tmp_path, call):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    run, _ = host_runs.host_run(table, **RUNS[change][0])
    WRITERS["labels"](tmp_path, run)
    _, text, _ = call("trace", str(tmp_path), "--schedules", "1f1b")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert LIKE_A_HOST.format(noun) in " ".join(lines)
    hint = "one replica does not tell stage 2 from the machine of its worker; the remedies here"
    assert (hint in " ".join(lines)) == (noun == "worker")


def test_the_stage_of_a_slow_worker_is_named_where_workers_run_backwards(tmp_path, call):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    run, _ = host_runs.host_run(table, slow={1: 1.5}, waits=True)
    WRITERS["labels"](tmp_path, run[::-1])  # stage 1 is on worker 2
    _, text, _ = call("trace", str(tmp_path))
    assert text.startswith("straggler: worker 2 (stage 1) takes")
    assert "does not tell stage 1 from the machine of its worker" in " ".join(text.split())


@pytest.mark.parametrize("form", ["csv", "chrome"])
@pytest.mark.parametrize(("source", "target"), [(1, 2), (3, 2)])
def test_a_link_that_is_slow_in_one_replica_is_named(source, target, form, tmp_path, answer):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    place = {"source": source, "target": target, "replica": 1}
    case = Case(table, form, 0.02, 2, "link", place, 20.0, 3)
    slices, times = simulate(case)
    cost = (times - simulate(case._replace(factor=1.0))[1]).mean()
    truth.write(tmp_path, form, slices, table, "nothing", 3)
    result = answer("trace", str(tmp_path), "--schedules", "1f1b")
    names = [row["name"] for row in result["suspects"]]
    assert names == [f"worker {source} to {target} of replica 1"]
    assert result["finding"]["seconds"] == pytest.approx(cost, rel=0.02)
    assert result["replay"]["mean_error"] < 0.5


def test_microbatches_of_a_slow_replica_are_no_suspects(tmp_path, answer):
    table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=12)
    case = Case(table, "csv", 0.01, 4, "replica", {"replica": 3}, 1.5, 3)
    truth.write(tmp_path, "csv", simulate(case)[0], table, "nothing", 3)
    suspects = answer("trace", str(tmp_path), "--schedules", "1f1b")["suspects"]
    assert [(row["kind"], row["name"]) for row in suspects] == [("replica", "3")]
