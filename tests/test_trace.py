"""Measured runs replayed, attributed and forecast: against runs that are known, and as published."""

import dataclasses
import html
import itertools
import json
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import justhtml
import numpy as np
import pytest
import trace_truth as truth
from daily import daily, read_cases, with_cases
from explorer_cases import get_scene, run_of_page, unpack
from markupsafe import escape
from matplotlib.collections import QuadMesh

import pipejax as pj
from pipejax.cli.output.numbers import seconds
from pipejax.plots.heat_maps import HeatMap, heat_picture
from pipejax.schedules.table.links import Links
from pipejax.traces.findings.attribution import Attribution
from pipejax.traces.replaying.pipelines import is_second_of_pair
from pipejax.traces.replaying.replay import Replay, single_models

JOB = Path(__file__).parents[1] / "examples" / "production_job.parquet"
# DualPipe-V has fused pairs, Chimera two pipes
SCHEDULES = {name: {} for name in ("1f1b", "gpipe", "zb-h1", "dualpipe-v", "chimera")}
SCHEDULES["interleaved-1f1b"] = {"stages_per_worker": 2}
REPLAYED = [*dict.fromkeys(links.model for links in single_models())]
traces = pj.traces


def make_table(name, workers=4):
    size = {"num_workers": workers, "num_microbatches": 2 * workers}
    return pj.schedules.build(name, **size, **SCHEDULES[name])


def draw_samples(table, link, transmit=None, seed=1):
    """A run at random times of every stage and microbatch; messages up to 8 times, or alike."""
    rng = np.random.default_rng(seed)
    shape = table.num_stages, table.num_microbatches
    links = (2, table.num_stages - 1)
    sent = 0.05 * 8 ** rng.uniform(0, 1, links) if transmit is None else np.full(links, transmit)
    phases = {pj.Phase(code).name for code in np.unique(table.ops.phase).tolist()}
    names = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    times = {names[letter]: rng.uniform(1.0, 2.0, shape) for letter in sorted(phases)}
    if table.is_fused.any():
        times["pair"] = rng.uniform(2.0, 3.0, table.num_stages)
    by_pipe = np.repeat(sent[:, None], table.num_pipes, axis=1)
    costs = pj.Costs(**times, transmit=by_pipe)
    return pj.evaluate(table, costs, link=link), sent.ravel()


def replayed(*runs, **how):
    return traces.replay(traces.find_pipelines(traces.record_runs(runs)), **how)


@pytest.mark.parametrize(("name", "link"), [*itertools.product(SCHEDULES, REPLAYED)])
def test_the_replay_of_a_run_is_exact(name, link):
    table = make_table(name)
    run, sent = draw_samples(table, link)
    result = replayed(run, link=link)
    assert result.pipelines.table.num_pipes == table.num_pipes
    assert result.pipelines.table.is_fused.sum() == table.is_fused.sum()
    exact = Replay(result.pipelines, Links.resolve(link), sent, result.errors)
    assert np.abs(exact.residuals).max() <= 1e-9
    assert np.abs(exact.stalls).max() <= 1e-9
    other = Replay(result.pipelines, Links.resolve(link), 1.5 * sent, result.errors)
    assert np.abs(other.residuals).max() > 1e-3  # that it is seen


@pytest.mark.parametrize(("name", "link"), daily(itertools.product(SCHEDULES, REPLAYED)))
def test_a_pipeline_is_replayed_by_its_own_costs(name, link):
    """As a run of its table, start by start, as `residuals` say; what was recorded stands beside."""
    run, sent = draw_samples(make_table(name), link)
    result = replayed(run, link=link)
    shifted = Replay(result.pipelines, Links.resolve(link), 1.5 * sent, result.errors)
    (pipeline,) = result.pipelines.pipelines
    costs = traces.measured_costs(shifted, pipeline=pipeline)
    again = pj.evaluate(result.pipelines.tables[pipeline.table], costs, link=link)
    recorded = result.pipelines.starts(pipeline)
    is_op = again.table.cells.phase > 0
    assert (np.isfinite(recorded) == is_op).all()
    first = pipeline.slices[~is_second_of_pair(result.pipelines.trace, pipeline.slices)]
    residuals = shifted.residuals[first]
    np.testing.assert_allclose((recorded - again.start)[is_op], residuals, atol=1e-9)
    assert np.abs(residuals).max() > 1e-3


@with_cases("name link", *itertools.product(SCHEDULES, ("delay", "blocking", "rendezvous")))
def test_links_and_messages_are_found(name, link):
    run, sent = draw_samples(make_table(name), link, transmit=0.2)
    result = replayed(run)
    assert result.links.model == link
    message = result.link_estimate.is_observed
    assert result.link_times[message] == pytest.approx(sent[message], rel=1e-9)
    assert result.worst_error <= 1e-9
    assert result.message_time == pytest.approx(0.2, rel=1e-9)


MOST = [*itertools.product(sorted({*SCHEDULES} - {"dualpipe-v"}), single_models(), [4])]
LONG = ("interleaved-1f1b", Links("rendezvous", "direction"), 8)  # many are buffered


@pytest.mark.parametrize(("name", "links", "workers"), daily([LONG, *MOST], always=2), ids=str)
def test_messages_of_links_that_differ_are_found(name, links, workers):
    run, sent = draw_samples(make_table(name, workers), links)
    assert sent.max() > 3 * sent.min()
    result = replayed(run, link=links)
    assert result.link_times == pytest.approx(sent, rel=1e-9)
    assert (result.worst_error <= 1e-9, result.unobserved) == (True, {})
    message = {row.name: row.median for row in traces.op_times(result) if row.kind == "message"}
    stages = result.pipelines.table.num_stages
    forward = [message[f"stage {k} to {k + 1}"] for k in range(stages - 1)]
    back = [message[f"stage {k + 1} to {k}"] for k in range(stages - 1)]
    assert [*forward, *back] == pytest.approx(sent, rel=1e-9)


def test_messages_that_scatter_are_found_within_gaps():
    """Ops begin up to some percent late, and messages of a link differ by 3 %."""
    table, links = make_table("interleaved-1f1b"), Links("rendezvous")
    rng, shape = np.random.default_rng(7), (8, 8)
    sent = 0.05 * 8 ** rng.uniform(0, 1, (2, 1, 7, 1))
    costs = [
        pj.Costs(
            forward=rng.lognormal(0, 0.03, shape) + rng.exponential(0.01, shape),
            backward=2 * rng.lognormal(0, 0.03, shape) + rng.exponential(0.01, shape),
            transmit=sent * rng.lognormal(0, 0.03, (2, 1, 7, 8)),
        )
        for _ in range(4)
    ]
    result = replayed(*[pj.evaluate(table, cost, link=links) for cost in costs], link=links)
    assert result.link_estimate.is_observed.all()
    assert np.abs(result.link_times / sent.ravel() - 1).max() < 0.1
    assert result.mean_error < 0.002


def test_link_models_that_explain_a_run_as_well_are_named(answer_and_text, folder):
    table = make_table("1f1b")
    for link in ("queued", "blocking"):
        run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.2), link=link)
        truth.write_trace(folder / f"{link}.csv", traces.record_runs([run] * 2))
    line = ["--schedules", "gpipe", "--details"]
    result, text = answer_and_text("trace", "queued.csv", *line)
    links = result["links"]
    assert links["link"] == "delay"  # the simplest
    assert {"queued", "rendezvous direction"} <= {*links["alike"]}
    assert "blocking" not in links["alike"]
    assert "rendezvous pair" not in links["fits"]  # messages of both directions cross here
    assert "these link models fit as well: queued" in text
    result, text = answer_and_text("trace", "blocking.csv", *line)
    assert (result["links"]["link"], result["links"]["alike"]) == ("blocking", [])
    assert "fit as well" not in text


@pytest.mark.parametrize("gap", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_gaps_before_ops_are_part_of_the_replay(name, gap):
    """Every op begins a gap after its inputs: an op of 1 s takes 1.2 s of its worker's time."""
    table, costs = make_table(name), pj.Costs(forward=1.0 + gap, backward=2.0 + gap, transmit=0.3)
    if name == "zb-h1":
        costs = pj.Costs(forward=1.0 + gap, input_grad=1 + gap, weight_grad=1 + gap, transmit=0.3)
    trace = traces.record_runs([pj.evaluate(table, costs)] * 2)
    late = dataclasses.replace(trace, start=trace.start + gap)
    result = traces.replay(traces.find_pipelines(late))
    assert result.worst_error < 1e-9
    # schedules with more stages per worker send while a message is on its way: the worse model
    assert (result.links.model, result.equivalent_models[0]) == ("queued", "delay")
    assert result.message_time == pytest.approx(0.3)
    assert traces.attribute(result).replayed == pytest.approx(traces.attribute(result).recorded)


def test_a_step_that_nothing_explains_hides_no_link_model():
    table = make_table("1f1b")
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.2)
    trace = traces.record_runs([pj.evaluate(table, costs, link="blocking")] * 8)
    late = (trace.step == 0) & (trace.start > 5.0)
    moved = dataclasses.replace(trace, start=trace.start + 9.0 * late, end=trace.end + 9.0 * late)
    result = traces.replay(traces.find_pipelines(moved))
    assert result.worst_error > 0.1
    assert (result.links.model, result.equivalent_models) == ("blocking", [])


def test_links_that_nothing_waited_for_are_named(answer_and_text, folder):
    """The second worker is so fast that its gradients are there long before the first is free."""
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    costs = pj.Costs(forward=[1.0, 0.1], backward=[2.0, 0.2], transmit=0.05)
    run = pj.evaluate(table, costs)
    result = replayed(run)
    # the last gradient is made 0.35 after its forward ended, whose worker takes it 2 after that
    assert result.unobserved == {"stage 1 to 0": pytest.approx(1.0 - 0.05 - 0.3)}
    assert result.message_time == pytest.approx(0.05)
    assert "stage 1 to 0" not in {row.name for row in traces.op_times(result)}
    truth.write_trace(folder / "run.csv", traces.record_runs([run]))
    result, text = answer_and_text("trace", "run.csv", "--schedules", "gpipe", "--details")
    assert "messages stage 1 to 0 never delay an op: each takes under" in text
    (untold,) = result["links"]["untold"]
    assert untold == {"link": "stage 1 to 0", "at_most": pytest.approx(0.65)}


def test_a_fused_pair_is_of_its_forward_whatever_a_file_names_first():
    run = draw_samples(make_table("dualpipe-v"), "delay", transmit=0.2)[0]
    trace = traces.record_runs([run])
    phases = trace.phases[::-1]
    turned = dataclasses.replace(trace, phase=len(phases) - 1 - trace.phase, phases=phases)
    pipelines = map(traces.find_pipelines, (trace, turned))
    first, second = (traces.measured_costs(traces.replay(x)) for x in pipelines)
    assert np.asarray(first.pair).tolist() == np.asarray(second.pair).tolist()


def costs_but(run, table, chosen, usual):
    """Times of a run with some put right: (phase, stages, microbatches) are chosen."""
    fields = {"F": "forward", "B": "backward"}
    means = {k: float(np.mean(getattr(run.costs, name))) for k, name in fields.items()}
    right = {}
    for place, (letter, name) in enumerate(fields.items()):
        values = np.asarray(getattr(run.costs, name))
        right[name] = np.where(chosen[place] ^ usual, means[letter], values)
    return pj.evaluate(table, dataclasses.replace(run.costs, **right), link=run.links).makespan


@pytest.mark.parametrize("link", ["delay", "blocking"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_what_is_put_right_is_the_run_at_other_costs(name, link):
    table = make_table(name)
    run, _ = draw_samples(table, link, transmit=0.2)
    result = traces.attribute(replayed(run, link=link))
    stage, microbatch = np.indices((table.num_stages, table.num_microbatches))
    worker = table.placement[0][stage]
    phase = np.arange(2)[:, None, None]
    chosen = {
        "worker": lambda k: np.stack([worker == int(k)] * 2),
        "stage": lambda k: np.stack([stage == int(k)] * 2),
        "microbatch": lambda k: np.stack([microbatch == int(k)] * 2),
        "phase": lambda k: np.broadcast_to(phase == "FB".index(k), (2, *stage.shape)),
    }
    ideal = costs_but(run, table, np.ones((2, *stage.shape), bool), False)
    assert result.ideal == pytest.approx(ideal, rel=1e-9)
    assert result.replayed.tolist() == pytest.approx([run.makespan], rel=1e-9)
    seen = 0
    for share in result.shares:
        if share.kind in chosen:
            part = chosen[share.kind](share.name)
            saves = run.makespan - costs_but(run, table, part, False)
            assert share.saves == pytest.approx(saves, abs=1e-9), share.name
            if share.kind != "microbatch":
                adds = costs_but(run, table, part, True) - ideal
                assert share.adds == pytest.approx(adds, abs=1e-9), share.name
            seen += 1
    assert seen == table.num_workers + table.num_stages + table.num_microbatches + 2
    saves = [share.saves for share in result.shares]
    assert saves == sorted(saves, reverse=True)


@pytest.fixture(scope="module")
def job():
    pytest.importorskip("pyarrow")
    return traces.replay(traces.find_pipelines(traces.read(JOB)))


@pytest.fixture(scope="module")
def shares(job):
    return traces.attribute(job)


def test_the_slowdown_of_a_job_is_as_published(shares, data):
    """A stage of the published analysis is all that its workers run, collectives too."""
    valid_names = json.loads((data / "traces" / "published_what_if.json").read_text())
    recorded, again = (
        [valid_names[name][str(step)] for step in shares.steps] for name in ("recorded", "replayed")
    )
    assert shares.recorded.tolist() == pytest.approx(recorded, rel=1e-6)
    assert shares.replayed.tolist() == pytest.approx(again, rel=0.002)
    assert shares.ideal == pytest.approx(valid_names["ideal"], rel=0.001)
    assert shares.replayed_slowdown == pytest.approx(valid_names["slowdown"], rel=0.003)
    names = {"F": "forward-compute", "B": "backward-compute"}
    for kind in ("worker", "replica", "phase"):
        parts = shares.by_name(kind)
        assert len(parts) >= 2
        for name, share in parts.items():
            published = valid_names[kind][names.get(name, name)]
            assert 1 + share.adds / shares.ideal == pytest.approx(published, rel=0.002), name
    last = shares.by_name("worker")["3"]
    rest = shares.replayed.mean() - last.saves
    assert rest == pytest.approx(valid_names["without_last_stage"], rel=0.01)
    assert shares.ideal + last.adds == pytest.approx(valid_names["last_stage_alone"], rel=0.002)


def test_a_forecast_is_students_interval():
    recorded = np.array([10.0, 11.0, 12.0, 13.0, 11.0, 20.0])
    steps = Attribution(range(6), recorded, recorded - 1.0, 5.0, [])
    result = traces.forecast(steps)
    # three steps, replayed 9, 10, 11 of recorded 10, 11, 12; t(0.95) of 2 degrees is 2.919986
    first = np.array([9.0, 10.0, 11.0]) * 33 / 30
    reach = 2.919986 * first.std(ddof=1) * np.sqrt(1 + 1 / 3)
    assert result.predicted == pytest.approx(11.0)
    assert (result.low, result.high) == pytest.approx((11.0 - reach, 11.0 + reach), rel=1e-6)
    assert result.inside == pytest.approx(2 / 3)
    assert result.errors.tolist() == pytest.approx([11 / 13 - 1, 0.0, 11 / 20 - 1])
    assert result.median_error == pytest.approx(2 / 13)


@pytest.mark.parametrize(("inside", "size", "failed"), [(6, 8, False), (5, 8, True), (1, 2, False)])
def test_a_band_fails_if_chance_explains_so_few_steps_in_it_with_under_5_percent(
    inside, size, failed
):
    """At most 6 of 8 are in a band of 90 % with 18.7 %, at most 5 with 3.8 %; 1 of 2 with 19 %."""
    chance = sum(math.comb(size, k) * 0.9**k * 0.1 ** (size - k) for k in range(inside + 1))
    assert (chance < 0.05) == failed
    recorded = np.array([9.0, 11.0] * 4 + [10.0] * inside + [99.0] * (size - inside))
    recorded = recorded[-2 * size :]
    result = traces.forecast(Attribution(range(2 * size), recorded, recorded, 5.0, []))
    assert (result.inside, result.has_failed) == (inside / size, failed)


def stretched(run, factor):
    return dataclasses.replace(run, start=factor * run.start, finish=factor * run.finish)


@with_cases("factors odd", *read_cases("odd steps"))
def test_means_leave_out_odd_steps_and_name_them(factors, odd, answer, answer_and_text, folder):
    """1F1B on 4 workers takes 33 s: 11 microbatches of 3 s are in the way."""
    run = pj.evaluate(make_table("1f1b"), pj.Costs(forward=1.0, backward=2.0))
    truth.write_trace(folder / "run.csv", traces.record_runs([stretched(run, x) for x in factors]))
    line = ["trace", "run.csv", "--schedules", "gpipe"]
    (result, text), whole = answer_and_text(*line), answer(*line, "--all-steps")
    usual = [x for step, x in enumerate(factors) if step not in odd]
    assert result["step_time"] == pytest.approx(33 * np.mean(usual))
    assert whole["step_time"] == pytest.approx(33 * np.mean(factors))
    assert (result["steps"], whole["steps"]) == (len(usual), len(factors))
    assert [part["what"] for part in result["left_out"]] == [f"step {step}" for step in odd]
    named = [row for row in result["suspects"] if row["kind"] == "step"]
    assert named == [row for row in whole["suspects"] if row["kind"] == "step"]
    costs = {row["place"]["step"]: row["seconds"] for row in named}
    assert {step: costs[step] for step in odd} == {
        step: pytest.approx(33 * (factors[step] - 1)) for step in odd
    }
    if odd:
        first = text.splitlines()[0]
        assert f"step {odd[-1]} took {33 * factors[odd[-1]]:.3g} s" in first


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, float("nan"), True, "0.9"])
def test_a_forecast_of_no_confidence(confidence, shares):
    with pytest.raises((ValueError, TypeError), match="confidence"):
        traces.forecast(shares, confidence=confidence)


def test_a_forecast_of_few_steps():
    few = Attribution(range(3), np.ones(3), np.ones(3), 1.0, [])
    with pytest.raises(ValueError, match="needs at least 4 steps, there are 3"):
        traces.forecast(few)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jittered(table, slow=()):
    rng = np.random.default_rng(3)
    factor = np.ones((table.num_stages, 1))
    for stage in slow:
        factor[stage] = 1.3
    shape = table.num_stages, table.num_microbatches
    return [
        pj.evaluate(
            table,
            pj.Costs(
                forward=factor * rng.normal(1.0, 0.02, shape),
                backward=factor * rng.normal(2.0, 0.02, shape),
                transmit=0.1,
            ),
        )
        for _ in range(6)
    ]


KEYS = (
    "steps replicas workers stages microbatches left_out replay slowdown attribution links "
    "forecast remedies"
)


def test_the_answer_and_the_commands_that_go_on(answer, folder):
    pytest.importorskip("pyarrow")
    result = answer("trace", JOB, "--schedules", "1f1b", "--save", "trace")
    assert set(KEYS.split()) <= set(result)
    assert (result["steps"], result["replicas"], result["schedule"]) == (32, 2, "1f1b")
    assert set(result["replay"]) == {"mean_error", "worst_error", "per_step"}
    assert result["replay"]["mean_error"] == pytest.approx(0.029, rel=0.05)  # in percent
    assert {"worker", "stage", "phase", "replica"} <= set(result["attribution"])
    assert result["attribution"]["worker"][0]["name"] == "3"
    names = {"costs.json", "dataset.zarr", "deal.json", "perfetto.json", "table.csv"}
    assert {path.name for path in Path("trace").iterdir()} == names
    evaluated, shaken = (shlex.split(line)[1:] for line in result["next"])
    again = answer(*evaluated)
    assert again["makespan"] == pytest.approx(result["pipeline_time"], rel=1e-12)
    assert shaken[:3] == ["jitter", "--tables", "trace/table.csv"]
    assert shaken[shaken.index("--op") + 1] == "lognormal:0.0274"


def test_jitter_reads_what_is_saved(answer, folder):
    truth.write_trace(folder / "run.csv", traces.record_runs(jittered(make_table("gpipe"))))
    result = answer("trace", "run.csv", "--schedules", "1f1b", "--save", "trace")
    shaken = answer(*shlex.split(result["next"][1])[1:])
    (row,) = shaken["rows"]
    assert row["deterministic"] == pytest.approx(result["pipeline_time"], rel=1e-9)


MIXED = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]]
FASTER = pj.Costs(forward=1.0, backward=2.0, input_grad=1.2, weight_grad=1.0, transmit=0.1)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v", "mixed"])
def test_saved_costs_are_those_that_were_recorded(name, answer, call, folder):
    table = pj.ScheduleTable.from_rows(MIXED) if name == "mixed" else make_table(name)
    truth.write_trace(folder / "run.csv", traces.record_runs([pj.evaluate(table, FASTER)] * 2))
    result = answer("trace", "run.csv", "--schedules", "1f1b", "--save", "trace")
    run = answer(*shlex.split(result["next"][0])[1:])
    assert run["makespan"] == pytest.approx(result["pipeline_time"], rel=1e-12)
    assert "assumes" not in run
    saved = json.loads(Path("trace/costs.json").read_text())
    letters = {"1f1b": "FB", "mixed": "FBIW", "dualpipe-v": "FBIW"}[name]
    rest = {"unit", "recorded", "message", "message_back", "pair"}
    assert saved.keys() - rest == {*letters}
    if name == "mixed":
        assert [saved[letter] for letter in "BIW"] == [
            pytest.approx(times) for times in ([2.0, 2.2], [1.0, 1.2], [1.0, 1.0])
        ]
    if name == "1f1b":
        line = ["evaluate", "-s", "zb-h1", "-P", "4", "-M", "8", "--costs", "trace/costs.json"]
        why = "input gradient (I) and weight gradient (W) each take half of the backward (B)"
        assert why in answer(*line)["assumes"]
        assert why in call(*line)[1]


def test_what_is_saved_is_said(call, folder):
    table = make_table("1f1b")
    long = np.random.default_rng(1).uniform(1.0, 3.0, (8, 8, 8))
    runs = [pj.evaluate(table, pj.Costs(forward=x[:4], backward=x[4:])) for x in long]
    truth.write_trace(folder / "run.csv", traces.record_runs([*runs, *runs], replicas=2))
    _, text, _ = call("trace", "run.csv", "--schedules", "gpipe", "--save", "trace")
    lines = text.partition("wrote trace")[2].splitlines()
    message = [line.split()[0] for line in lines if re.match(r"  [a-z]+\.[a-z]+  ", line)]
    assert sorted(message) == sorted(path.name for path in Path("trace").iterdir())
    assert "deal.json" in message


def test_another_run_says_what_got_slower(answer_and_text, folder):
    table = make_table("1f1b")
    for name, slow in (("now", [2]), ("then", [])):
        truth.write_trace(folder / f"{name}.csv", traces.record_runs(jittered(table, slow)))
    line = ["trace", "now.csv", "--against", "then.csv", "--schedules", "1f1b"]
    result, text = answer_and_text(*line)
    against = result["against"]
    assert against["step_time"] > 1.1 * against["as_there"]
    first, *others = against["attribution"]["stage"]
    assert first["name"] == "2"
    assert first["saves"] > 0.9 * (against["step_time"] - against["as_there"])
    assert max(abs(share["saves"]) for share in others) < 0.1 * first["saves"]
    assert "slower than the other run" in text.splitlines()[0]
    text = answer_and_text("trace", "then.csv", "--against", "now.csv", "--schedules", "1f1b")[1]
    assert "faster than the other run" in text.splitlines()[0]


def test_a_run_against_itself_saves_nothing(answer, folder):
    truth.write_trace(folder / "run.csv", traces.record_runs(jittered(make_table("1f1b"), [2])))
    result = answer("trace", "run.csv", "--against", "run.csv", "--schedules", "1f1b")
    against = result["against"]
    assert against["other_step_time"] == against["step_time"] == result["step_time"]
    assert against["as_there"] == pytest.approx(against["replayed"], rel=1e-12)
    shares = [share for kind in against["attribution"].values() for share in kind]
    assert max(abs(share["saves"]) for share in shares) < 1e-9


def test_whole_backwards_are_held_against_halves(answer, folder):
    for name in ("1f1b", "zb-h1"):
        table = make_table(name)
        trace = traces.record_runs([pj.evaluate(table, EVEN)] * 4)
        truth.write_trace(folder / f"{name}.csv", trace)
    line = ["--schedules", "1f1b"]
    result = answer("trace", "zb-h1.csv", "--against", "1f1b.csv", *line)["against"]
    assert result["step_time"] < result["other_step_time"]
    assert result["as_there"] == pytest.approx(result["step_time"], rel=1e-9)


EVEN = pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)


def test_some_steps_alone(answer, mistake, folder):
    table = make_table("1f1b")
    truth.write_trace(folder / "run.csv", traces.record_runs(jittered(table, [2])))
    whole = answer("trace", "run.csv", "--schedules", "1f1b")
    steps = [step_row["step"] for step_row in whole["replay"]["per_step"]]
    texts = {f"{steps[1]}:": steps[1:], f":{steps[1]}": steps[:2], "2,3": [2, 3]}
    for text, expected in texts.items():
        result = answer("trace", "run.csv", "--only-steps", text, "--schedules", "1f1b")
        assert [step_row["step"] for step_row in result["replay"]["per_step"]] == expected
    message = mistake("trace", "run.csv", "--only-steps", "99")
    assert "--only-steps 99: the files have steps" in message
    for text, none in (("2,7,99", " and not 7, 99"), ("4:2", "")):
        message = mistake("trace", "run.csv", "--only-steps", text)
        assert f"--only-steps {text}: the files have steps 0 to 5{none}\n" in message
    for text in ("a:", "²", "1,²"):
        assert "--only-steps must be as 2:20" in mistake("trace", "run.csv", "--only-steps", text)


@with_cases("chunks stage factor layers action", *read_cases("slow stages and their layers"))
def test_the_first_remedy_of_a_slow_stage_moves_layers_if_they_are_small_enough(
    chunks, stage, factor, layers, action, answer_and_text, folder
):
    size, options = {"num_workers": 4, "num_microbatches": 4 * chunks}, {}
    if chunks > 1:
        options = {"stages_per_worker": chunks}
    table = pj.schedules.build("looped-bfs" if options else "1f1b", **size, **options)
    slow = np.ones(4 * chunks)
    slow[stage] = factor
    run = pj.evaluate(table, pj.Costs(forward=slow, backward=2 * slow))
    truth.write_trace(folder / "run.csv", traces.record_runs([run] * 2))
    line = ["trace", "run.csv", "--schedules", "gpipe" if options else "interleaved-1f1b"]
    line += [] if layers is None else ["--stage-layers", layers]
    result, text = answer_and_text(*line)
    assert (result["finding"]["kind"], result["finding"]["name"]) == ("stage", str(stage))
    assert result["remedies"][0]["what"] == action
    second = text.splitlines()[1]
    assert second.startswith("fix: ")
    assert action.removeprefix("layers over stages: ") in second


@pytest.mark.parametrize(("pause", "has_advice"), [(1.0, True), (2.0, False), (9.0, False)])
@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b"])
def test_a_replay_that_is_far_off_is_no_basis_for_advice(
    name, pause, has_advice, answer_and_text, call, folder
):
    """All workers stand still in every step, so 33 s of 33 s and the pause are replayed."""
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
    trace = traces.record_runs([run] * 4)
    begin = np.array([trace.start[trace.step == step].min() for step in trace.steps])
    late = pause * (trace.start - begin[trace.step] > 16.0) + 50.0 * trace.step
    truth.write_trace(
        folder / "run.csv",
        dataclasses.replace(trace, start=trace.start + late, end=trace.end + late),
    )
    line = ["trace", "run.csv", "--schedules", "zb-h1"]
    result, text = answer_and_text(*line)
    error = 100 * pause / (33 + pause)
    assert result["replay"]["mean_error"] == pytest.approx(error)
    assert (error <= 5) == has_advice == bool(result["remedies"]) == (result["no_advice"] is None)
    if not has_advice:
        limit = f"the replay is {error:.3g} % off; above 5 % there is no advice"
        assert result["no_advice"] == limit
        begin = f"{33 + pause:.3g} s per step; no advice: {limit}\nlaunch-starved or"
        assert text.startswith(begin)
        assert f"idles {pause:.3g} s before" in text
        assert "against it:" not in text
        assert "saves" not in text
        assert call(*line, "--out", "x.html")[0] == 2


@pytest.mark.parametrize(("forth", "back"), [(0.05, 0.05), (0.08, 0.0), (0.0, 0.09)])
def test_messages_that_arrive_before_they_are_sent_are_below_the_resolution(
    forth, back, call, folder
):
    """No clock is wrong: forwards or backwards begin up to 0.09 s before their inputs end."""
    run = pj.evaluate(make_table("gpipe"), pj.Costs(forward=1.0, backward=2.0))
    trace = traces.record_runs([run] * 4)
    lead = {"F": forth, "B": back}
    early = np.array([lead[trace.phases[code]] for code in trace.phase])
    is_forward = trace.phase == trace.phases.index("F")
    early[np.where(is_forward, trace.stage == 0, trace.stage == 3)] = 0.0
    truth.write_trace(folder / "run.csv", dataclasses.replace(trace, start=trace.start - early))
    _, text, _ = call("trace", "run.csv", "--schedules", "1f1b", "--details")
    assert "below the clocks' resolution" in text


def test_what_a_stranger_reads(answer, call, folder):
    run = pj.evaluate(make_table("gpipe"), pj.Costs(forward=1.0, backward=2.0, transmit=0.1))
    truth.write_trace(folder / "run.csv", traces.record_runs([run]))
    _, text, _ = call("trace", "run.csv", "--schedules", "1f1b", "--details")
    size = "gpipe, 4 workers, 4 stages, 8 microbatches: 1 step of 1 replica"
    assert f"based on {size}; replayed " in text
    assert " per step; 8 microbatches are few for" not in text
    assert "B of stage 0" in text
    assert "message stage 0 to 1" in text
    assert "to try a remedy: save the measured times in trace/, then evaluate with them\n" in text
    # ops that do not scatter are not shaken
    (alone,) = answer("trace", "run.csv", "--schedules", "1f1b", "--save", "trace")["next"]
    assert alone.startswith("pipejax evaluate ")


def test_columns_have_other_names(answer, folder):
    truth.write_trace(folder / "run.csv", traces.record_runs(jittered(make_table("gpipe"))))
    text = Path("run.csv").read_text().replace("worker", "who", 1).replace("start", "from", 1)
    Path("an other.csv").write_text(text)
    line = ["--schedules", "1f1b"]
    renamed = answer("trace", "run.csv", *line)
    other = answer("trace", "an other.csv", "--columns", "worker=who, start=from_s", *line)
    assert {name for name in renamed if renamed[name] != other[name]} == {"next"}
    (again,) = other["next"]
    assert answer(*shlex.split(again)[1:])["save"] == "trace"
    (again,) = answer("trace", "run.csv", "--against", "run.csv", *line)["next"]
    assert again == ("pipejax trace run.csv --schedules 1f1b --against run.csv --save trace-2")


@pytest.fixture(scope="module")
def result(job):
    run = draw_samples(make_table("interleaved-1f1b"), "delay", transmit=0.2)[0]
    return traces.analyse(traces.record_runs([run] * 2), schedules=["1f1b"])


def test_maps_share_their_colours():
    low = HeatMap("low", "step", ["5", "7"], ["stage 0"], np.array([[0.001, -0.002]]))
    high = HeatMap("high", "replica", ["0", "1"], ["worker 0"], np.array([[0.004, np.nan]]))
    picture = heat_picture([low, high])
    meshes = [m for axes in picture.axes[:2] for m in axes.collections if isinstance(m, QuadMesh)]
    assert [mesh.get_clim() for mesh in meshes] == [(-0.004, 0.004)] * 2
    assert [text.get_text() for text in picture.axes[0].texts] == ["1.00", "-2.00"]
    assert [text.get_text() for text in picture.axes[1].texts] == ["4.00"]
    assert [label.get_text() for label in picture.axes[0].get_xticklabels()] == ["5", "7"]
    assert picture.axes[2].get_ylabel() == "of the step [ms]"


def test_maps_of_other_sizes_have_their_own_scale():
    values = [np.array([[value]]) for value in (0.001, 2.0)]
    low, high = (HeatMap("", "step", ["1"], ["stage 0"], value) for value in values)
    axes = heat_picture([low, high]).axes
    assert [axes[k].collections[0].get_clim() for k in range(2)] == [(0.0, 0.001), (0.0, 2.0)]
    assert [bar.get_ylabel() for bar in axes[2:]] == ["of the step [ms]", "of the step [s]"]


def test_numbers_that_have_no_room_are_left_out():
    wide = HeatMap("", "step", [*map(str, range(99))], ["a"], np.linspace(0, 1, 99)[None])
    (axes, _) = heat_picture([wide]).axes
    assert not axes.texts
    assert len(axes.get_xticklabels()) < 60


def test_the_figure_names_workers_replicas_and_steps(call, folder):
    pytest.importorskip("pyarrow")
    code, text, _ = call("trace", JOB, "--schedules", "1f1b", "--figure", "x.svg")
    assert (code, "wrote x.svg" in text) == (0, True)
    drawn_texts = set(re.findall(r"<text[^>]*>([^<]*)</text>", Path("x.svg").read_text()))
    assert {"worker 3", "stage 3", "replica", "step", "1043"} <= drawn_texts


def test_the_page_shows_the_slowest_replica_of_the_median_step(job, shares):
    from pipejax.cli.output.trace_report import _median_ran

    recorded = np.sort(shares.recorded)[len(shares.steps) // 2]
    step = shares.steps[int(np.flatnonzero(shares.recorded == recorded)[0])]
    spans = zip(job.pipelines.spans.tolist(), job.pipelines.pipelines, strict=True)
    _, slowest = max((span, pipeline.replica) for span, pipeline in spans if pipeline.step == step)
    analysis = SimpleNamespace(attribution=shares, pipelines=job.pipelines, replay=job)
    assert _median_ran(analysis).title == f"step {step}, replica {slowest}"


def test_the_report_is_one_page(call, folder):
    runs = jittered(make_table("1f1b"), [2])
    truth.write_trace(folder / "run.csv", traces.record_runs(runs))
    truth.write_trace(folder / "other.csv", traces.record_runs(jittered(make_table("1f1b"))))
    line = ["--schedules", "zb-h1", "--against", "other.csv", "--out", "x.html"]
    code, _, error = call("trace", "run.csv", *line)
    assert (code, error) == (0, "")
    text = Path("x.html").read_text()
    justhtml.JustHTML(text, strict=True)
    assert "://" not in text.replace("http://www.w3.org/", "")
    assert text.count("<svg") == 1 + text.count("&lt;svg")
    heads = re.findall(r"<h2>([^<]*)</h2>", text)
    assert heads[:4] == ["Cost of each part", "Costs against the other run", "Files", "Replay"]
    assert heads[-4:-1] == ["Causes", "Remedies", "First remedy in launchers"]
    (parts,) = re.findall(r"<h2>Parts of the step</h2>(.*?)<h2>", text, re.DOTALL)
    shares = [float(share) for share in re.findall(r">(-?[\d.]+) %<", parts)]
    assert sum(shares) == pytest.approx(100.0, abs=0.3)  # three digits of each
    (inside,) = re.findall(r'srcdoc="([^"]*)"', text)
    assert html.unescape(inside).startswith("<!doctype html>")
    assert "stage 2 on worker 2" in text


def test_the_page_explores_the_median_step(call, folder):
    """As it ran and as replayed, then the mean pipeline; suspects are said as in the terminal."""
    table = make_table("1f1b")
    forward, backward = np.array([[1.0, 1.0, 1.5, 1.0], [2.0, 2.0, 3.0, 2.0]])
    runs = [
        pj.evaluate(table, pj.Costs(forward=k * forward, backward=k * backward, transmit=0.1))
        for k in (1.0, 1.02, 0.97, 1.05)
    ]
    trace = traces.record_runs(runs)
    # every step has a pause of its own, and begins after the one before
    shift = 0.5 * (trace.start > 20.0 + trace.step) + 60.0 * trace.step
    trace = dataclasses.replace(trace, start=trace.start + shift, end=trace.end + shift)
    truth.write_trace(folder / "run.csv", trace)
    code, message, _ = call("trace", "run.csv", "--schedules", "zb-h1", "--out", "x.html")
    assert code == 0
    text = Path("x.html").read_text()
    suspects = [line.strip() for line in message.splitlines() if "takes 1.5 times" in line]
    assert len(suspects) >= 1
    assert all(f"<p>{escape(line)}</p>" in text for line in suspects)
    scene = get_scene(html.unescape(re.search(r'srcdoc="([^"]*)"', text)[1]))
    names = [schedule["name"] for schedule in scene["schedules"]]
    assert names == ["replayed", "mean pipeline", "first remedy"]
    shown = re.findall(r"<h2>([^<]*)</h2>", text)[-1]
    number = int(re.match(r"Step (\d), as it ran, and below: replayed; mean pipeline; ", shown)[1])
    replayed = scene["schedules"][0]
    result = traces.replay(traces.find_pipelines(traces.read("run.csv")))
    assert scene["link"] == result.links.model
    pipeline = result.pipelines.pipelines[number]
    factors = [factor["initial"] for factor in scene["factors"]]
    finish, vector, program = run_of_page(replayed, factors, scene["link"])
    start = finish - vector[program["durations"]]
    starts = unpack(replayed["recorded"]["starts"])["start"]
    residuals = starts - start[program["op"]]
    np.testing.assert_allclose(residuals, result.residuals[pipeline.slices], atol=1e-9)
    assert residuals.max() > 0.1


def test_what_is_left_out_stands_on_the_page(call, folder):
    trace = traces.record_runs(jittered(make_table("1f1b")))
    whole = ~((trace.step == 4) & (trace.worker == 1))
    late = (trace.step == 2) & (trace.worker == 0) & (trace.start > 30.0)
    moved = dataclasses.replace(trace, start=trace.start + 5.0 * late, end=trace.end + 5.0 * late)
    truth.write_trace(folder / "run.csv", moved.only(whole))
    code, _, error = call("trace", "run.csv", "--schedules", "1f1b", "--out", "x.html")
    assert (code, error) == (0, "")
    text = Path("x.html").read_text()
    assert "<td>step 4, replica 0</td><td>worker 1 is missing</td>" in text
    row = re.search(r"Launch-starved ops.*?>2</td><td[^>]*>0</td><td[^>]*>0</td>", text, re.S)
    assert row is not None


def test_a_run_of_one_replica_is_drawn_by_step(result):
    from pipejax.cli.output.trace_report import _maps

    workers, stages = _maps(result)
    assert (workers.rows[0], stages.rows[-1]) == ("worker 0", "stage 7")
    assert (workers.x_label, workers.columns) == ("step", ["0", "1"])
    assert workers.seconds[:, 0].tolist() == [
        result.attribution.by_name("worker")[str(k)].by_step[0] for k in range(4)
    ]


@pytest.mark.parametrize(("workers", "count"), [(4, 8), (4, 12), (2, 8)])
def test_a_schedule_that_memory_rules_out_is_named_with_its_saving(
    call, answer, folder, workers, count
):
    size = {"num_workers": workers, "num_microbatches": count}
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.01)
    run = pj.evaluate(pj.schedules.build("1f1b", **size), costs)
    truth.write_trace(folder / "run.csv", traces.record_runs([run] * 3))
    text = call("trace", "run.csv", "--launcher", "torchtitan")[1]
    (line,) = re.findall(r"also: (.*--memory-limit.*)", text)
    command = re.search(r"; if more memory is free, try \(after --save\): pipejax (.*)", line)[1]
    pattern = r"schedule (\S+), stages per worker (\d+) .* would save"
    name, stages = re.search(pattern, line).groups()
    percent, need = re.search(r"would save ([\d.]+) %.*--memory-limit ([\d.]+)$", line).groups()
    assert (name, float(need)) == ("looped-bfs", count)  # which holds all microbatches
    table = pj.schedules.build(name, **size, stages_per_worker=int(stages))
    times = pj.Costs(forward=1 / int(stages), backward=2 / int(stages), transmit=0.01)
    saving = 100 * (1 - pj.evaluate(table, times).makespan / run.makespan)
    assert float(percent) == pytest.approx(saving, rel=0.01)
    answer("trace", "run.csv", "--save", "trace")
    what = f"schedule {name}, stages per worker {stages}"
    (remedy,) = (row for row in answer(*shlex.split(command))["remedies"] if row["what"] == what)
    assert 100 * remedy["saves"] / run.makespan == pytest.approx(saving, rel=1e-6)


@pytest.mark.parametrize(("stage", "microbatch", "odd"), [(1, 6, 5), (3, 2, 2), (0, 4, 7)])
def test_an_odd_step_names_the_command_that_finds_its_late_op(
    answer, call, folder, stage, microbatch, odd
):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    forward = np.ones((4, 8))
    usual = pj.evaluate(table, pj.Costs(forward=forward, backward=2.0))
    forward[stage, microbatch] += 15.0
    stalled = pj.evaluate(table, pj.Costs(forward=forward, backward=2.0))
    trace = traces.record_runs([stalled if step == odd else usual for step in range(8)])
    # the op itself takes its usual time: the host launched it late
    at_op = (trace.stage == stage) & (trace.microbatch == microbatch) & (trace.step == odd)
    at_op &= trace.phase == [*trace.phases].index("F")
    trace = dataclasses.replace(trace, start=np.where(at_op, trace.end - 1.0, trace.start))
    truth.write_trace(folder / "run.csv", trace)
    (command,) = re.findall(rf"late in step {odd}: pipejax (.*)", call("trace", "run.csv")[1])
    assert command == f"trace run.csv --only-steps {odd}"
    lost = seconds(stalled.makespan - usual.makespan)
    begin = f"late launch: {stage}F{microbatch} on worker {stage} starts 15 s late in the only step"
    assert call(*shlex.split(command))[1].startswith(f"{begin}; it costs {lost} of ")
    assert answer(*shlex.split(command))["finding"]["ratio"] is None


@with_cases("slow odd is_named", *read_cases("late ops of odd steps"))
def test_every_odd_step_has_the_command_that_finds_its_late_op(call, folder, slow, odd, is_named):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    forward, backward = np.ones((4, 8)), np.full(4, 2.0)
    if slow is not None:
        forward[slow], backward[slow] = 1.5, 3.0
    usual = pj.evaluate(table, pj.Costs(forward=forward, backward=backward))
    forward = forward.copy()
    forward[1, 6] += 20.0
    stalled = pj.evaluate(table, pj.Costs(forward=forward, backward=backward))
    trace = traces.record_runs([stalled if step in odd else usual for step in range(12)])
    at_op = (trace.stage == 1) & (trace.microbatch == 6) & np.isin(trace.step, odd)
    at_op &= trace.phase == [*trace.phases].index("F")
    if not is_named:  # the op takes its usual time, but begins late
        start = np.where(at_op, trace.start + 20.0, trace.start)
        trace = dataclasses.replace(trace, start=start)
    truth.write_trace(folder / "run.csv", trace)
    text = call("trace", "run.csv", "--details", "--schedules", "1f1b")[1]
    commands = re.findall(r"late in step (\d+): pipejax (.*)", text)
    assert [int(step) for step, _ in commands] == ([] if is_named else odd)
    for step, command in commands:
        line = f"trace run.csv --schedules 1f1b --only-steps {step}"
        assert command == line
        assert "1F6 on worker 1 starts 20 s late in the only step" in call(*shlex.split(line))[1]
    first = call("trace", "run.csv", "--schedules", "1f1b")[1]
    has_command = f"trace run.csv --schedules 1f1b --only-steps {odd[0]}\n" in first
    assert has_command == (not is_named)  # the first screen has room for it


@with_cases("steps late spread why over", *read_cases("gaps of the mean step"))
def test_the_sentence_on_the_mean_step_gives_the_reason_of_its_gap(
    call, folder, steps, late, spread, why, over
):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    rng, runs = np.random.default_rng(1), []
    for _ in steps:
        forward = np.exp(spread * rng.standard_normal((4, 8)))
        forward[2, 5] += late
        runs.append(pj.evaluate(table, pj.Costs(forward=forward, backward=2.0)))
    trace = traces.record_runs(runs)
    at_op = (trace.stage == 2) & (trace.microbatch == 5)
    at_op &= trace.phase == [*trace.phases].index("F")
    start = np.where(at_op, trace.start + late, trace.start)
    truth.write_trace(folder / "run.csv", dataclasses.replace(trace, start=start))
    text = call("trace", "run.csv", "--schedules", "1f1b")[1]
    measured = seconds(float(np.mean([run.makespan for run in runs])))
    (line,) = [line for line in text.splitlines() if line.startswith("shares of a step of ")]
    assert (
        f", in which each op takes its {over} (measured: {measured}, as {why}; causes and savings are "
        in line
    )
    # at usual times of ops a step takes 33 s: warm-up and cool-down of three stages of 3 s
    if late:
        assert line.startswith("shares of a step of 33 s, ")


@pytest.mark.parametrize("replicas", [1, 2])
@with_cases("stages", (35.5, 34.6, 34.6, 37.5), (36, 34, 34, 36.5), (34, 34, 36, 36.5))
def test_a_healthy_run_has_a_report(answer_and_text, folder, stages, replicas):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=10)
    forward = 1e-3 * np.array(stages)
    runs = [pj.evaluate(table, pj.Costs(forward=forward, backward=2 * forward, transmit=1e-4))]
    trace = traces.record_runs(runs * 6 * replicas, replicas=replicas)
    truth.write_trace(folder / "run.csv", trace)
    line = ["trace", "run.csv", "--schedules", "1f1b"]
    result, text = answer_and_text(*line)
    assert "per step" in text
    finding = result["finding"]
    if finding is not None and finding["kind"] == "stage":
        assert int(finding["name"]) == int(np.argmax(stages))


def test_a_production_job_is_replayed(job):
    assert traces.registered(job.pipelines.table) == ("1f1b", {})
    assert len(job.errors) == 64
    assert (job.pipelines.left_out, job.pipelines.odd_steps) == ((), [])
    assert job.links.model == "blocking"
    assert (job.mean_error, job.worst_error) == pytest.approx((0.00029, 0.00032), rel=0.05)
