"""Link models told apart by noisy step times of runs that were chosen to tell them apart."""

import functools
import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.search.links.identify import candidates_of, judge, model_of, predict
from pipejax.search.links.link_runs import read_link_runs

NOISE, SEEDS = 0.02, 20
KNOWN = candidates_of()
# Transfers of a pair stand in one queue already, of a worker or of the pair: a link that they share
# has their order, which changes nothing, or another one, which is a deadlock.
EQUAL = {
    pj.Links("rendezvous", queues, posting=posting, shared_links="pairs"): pj.Links(
        "rendezvous", queues, posting=posting
    )
    for queues in ("worker", "pair")
    for posting in ("early", "program")
}


@functools.cache
def designed():
    """Runs chosen at 2 % noise, and what every candidate predicts of them."""
    more = {"interleaved-1f1b": {"stages_per_worker": 2}}
    tables = [
        pj.schedules.build(name, num_workers=3, num_microbatches=6, **more.get(name, {}))
        for name in ("gpipe", "1f1b", "interleaved-1f1b")
    ]
    sizes = (0.05, 0.4), (0.1, 1.5), (0.8, 0.3)
    costs = [pj.Costs(forward=1.0, backward=2.0, latency=x, transmit=y) for x, y in sizes]
    design = pj.links.design_link_runs(tables, costs, count=16, delay=3.0, noise=NOISE)
    assert len(design.runs) == 16
    return design, predict(design.runs, KNOWN)


def told_apart(truth, seeds):
    """How often the truth, or what is equal to it, is found, and all others are ruled out."""
    _, times = designed()
    own = times[KNOWN.index(truth)]
    ran = np.isfinite(own)  # a deadlock has no step time
    found = 0
    for seed in seeds:
        noise = np.random.default_rng(seed).standard_normal(ran.sum())
        measured = own[ran] * np.exp(NOISE * noise)
        result = judge(measured, KNOWN, times[:, ran], NOISE)
        same = {fit.links for fit in result.fits if fit.verdict == "same"}
        assert same <= {*EQUAL, *EQUAL.values()}
        found += result.links == EQUAL.get(truth, truth) and {*result.alike} == same
    return found


@pytest.mark.slow
@pytest.mark.parametrize("truth", KNOWN, ids=str)
def test_every_link_model_is_told_apart(truth):
    assert told_apart(truth, range(7000, 7000 + SEEDS)) == SEEDS


def few():
    """Four runs of each of two tables under five machines: what always runs."""
    tables = [
        pj.schedules.build(name, num_workers=2, num_microbatches=4) for name in ("gpipe", "1f1b")
    ]
    costs = [pj.Costs(forward=1.0, backward=2.0, transmit=x) for x in (0.5, 1.5, 3.0)]
    return [
        pj.links.LinkRun(table, each, on, 2.0)
        for table in tables
        for each in costs
        for on in ("", "0-1")
    ]


def measured_runs(runs, links, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    times = predict(runs, [links])[0] * np.exp(noise * rng.standard_normal(len(runs)))
    return [
        pj.links.LinkRun(run.table, run.costs, run.delay_on, run.delay, seconds=float(seconds))
        for run, seconds in zip(runs, times, strict=True)
    ]


@pytest.mark.parametrize("truth", ["delay", "queued", "blocking", "rendezvous"])
def test_models_are_told_apart_with_noise(truth):
    machines = [pj.Links(model) for model in ("delay", "queued", "blocking", "rendezvous")]
    runs = measured_runs(few(), pj.Links(truth), NOISE, seed=5)
    found = pj.links.identify_links(runs, noise=NOISE, candidates=machines)
    assert (found.links.model, found.told_apart, found.explains) == (truth, True, True)
    assert found.fits[0].rms < 2 * NOISE < found.fits[1].rms


def test_what_predicts_the_same_cannot_be_told_apart():
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)  # one message at a time
    runs = [pj.links.LinkRun(table, costs, seconds=pj.evaluate(table, costs).makespan)]
    found = pj.links.identify_links(runs, noise=NOISE)
    assert found.links == pj.Links()
    assert not found.told_apart
    assert {fit.verdict for fit in found.fits} == {"best", "same"}


def test_what_no_candidate_explains_is_said():
    slow = [
        pj.links.LinkRun(run.table, run.costs, seconds=3 * run.seconds)
        for run in measured_runs(few(), pj.Links("queued"))
    ]
    assert not pj.links.identify_links(
        slow, noise=NOISE, candidates=[pj.Links(), pj.Links("queued")]
    ).explains


def test_each_pair_of_workers_may_have_its_own():
    names = "gpipe", "1f1b"
    tables = [pj.schedules.build(name, num_workers=3, num_microbatches=4) for name in names]
    costs = [pj.Costs(forward=1.0, backward=2.0, latency=0.25, transmit=x) for x in (1.5, 3.0)]
    runs = [
        pj.links.LinkRun(t, c, on, 2.0)
        for t in tables
        for c in costs
        for on in ("", "0-1", "1-2", "2-1", "1-0")
    ]
    truth = pj.Links("delay", pair_links={(1, 2): "blocking"})
    machines = [pj.Links(model) for model in ("delay", "queued", "blocking")]
    found = pj.links.identify_links(
        measured_runs(runs, truth), noise=0.001, by_pair=True, candidates=machines
    )
    # blocking on one pair or the other costs these runs the same: what is left open is said
    assert [model_of(truth, pair) in found.pairs[pair] for pair in ((0, 1), (1, 2))] == [True] * 2
    assert not found.told_apart
    assert found.fits[0].rms == pytest.approx(0, abs=1e-12)


def test_buffered_sizes_are_candidates():
    sizes = {below for links in candidates_of(few()) if (below := links.eager_below)}
    assert sizes == {1.0, 2.25}


@pytest.mark.parametrize(
    ("on", "longer"), [("0F1", 2.0), ("0SEND_F1", 2.0), ("0-1", 2.0), ("worker1", 8.0), ("", 0.0)]
)
def test_a_delay_is_where_it_is_said(on, longer):
    # GPipe without messages that take time: 0F0, all four ops of worker 1, 0B1, or 0F1 before 1F1
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
    run = pj.links.LinkRun(table, pj.Costs(forward=1.0, backward=2.0), on, 2.0)
    before = pj.evaluate(table, run.costs).makespan
    assert pj.evaluate(table, run.delayed).makespan == before + longer


@pytest.mark.parametrize("on", ["0F9", "1SEND_F0", "1-2", "worker7", "nothing", "0A0"])
def test_a_delay_on_nothing_is_refused(on):
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
    with pytest.raises(ValueError, match="delay_on"):
        pj.links.LinkRun(table, pj.Costs(forward=1.0), on, 2.0)


HEADER = "schedule,workers,microbatches,costs,F,B,transmit,delay_on,delay,seconds"
MACHINE = pj.Links("rendezvous", "pair", posting="program")
POSSIBLE = [("gpipe", 0.4), ("gpipe", 1.5), ("1f1b", 0.4), ("1f1b", 1.5)]
DELAYED = [("", ""), ("0-1", 3.0), ("0SEND_F3", 3.0), ("1F3", 3.0)]


def written(path, seed=None):
    """A file of runs on a machine whose links are known; not yet measured without a seed."""
    (path.parent / "costs.json").write_text('{"unit": "milliseconds", "F": 1000, "B": 2000}')
    rng = np.random.default_rng(seed)
    lines = [HEADER]
    delays = DELAYED + DELAYED[::-1]
    for (name, transmit), (on, delay) in zip(POSSIBLE * 2, delays, strict=True):
        table = pj.schedules.build(name, num_workers=3, num_microbatches=4)
        costs = pj.Costs(forward=1.0, backward=2.0, transmit=transmit)
        run = pj.links.LinkRun(table, costs, on, delay or 0.0)
        seconds = pj.evaluate(table, run.delayed, link=MACHINE).makespan
        seconds *= np.exp(NOISE * rng.standard_normal())
        times = "costs.json,," if len(lines) % 2 else ",1,2"
        measured = "" if seed is None else float(seconds)
        lines.append(f"{name},3,4,{times},{transmit},{on},{delay},{measured}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_command_finds_the_links_and_writes_options(call, answer, tmp_path):
    rows, out = written(tmp_path / "runs.csv", seed=3), tmp_path / "links.json"
    code, shown, _ = call("calibrate", rows, "--time-noise", NOISE, "--out", out)
    assert code == 0
    assert "--link rendezvous --queues pair --posting program\n" in shown
    assert "cannot be told apart from the best by these runs:\n" in shown
    assert "  --link rendezvous --queues pair --posting program --shared-links pairs\n" in shown
    told = answer("calibrate", rows, "--time-noise", NOISE)
    found = {"link": "rendezvous", "queues": "pair", "posting": "program"}
    assert told["links"] == found == json.loads(out.read_text())
    assert told["alike"] == [found | {"shared_links": "pairs"}]
    assert (told["told_apart"], told["explains"]) == (False, True)
    assert [each["verdict"] for each in told["candidates"][:3]] == ["best", "same", "worse"]
    residual = [np.log(run["measured"] / run["predicted"]) for run in told["runs"]]
    assert np.sqrt(np.mean(np.square(residual))) == pytest.approx(told["candidates"][0]["residual"])
    size = "-P", 3, "-M", 4, "-T", "F=1,B=2", "-c", 0.4
    run = answer("evaluate", "-s", "gpipe", *size, "--config", out)
    assert run["makespan"] == told["runs"][0]["predicted"]


def test_the_command_chooses_runs_that_it_can_read(answer, tmp_path):
    rows, out = written(tmp_path / "can.csv"), tmp_path / "runs.csv"
    told = answer("calibrate", rows, "--design", 3, "--delay", "2s", "--out", out)
    header, *lines = [line.split(",") for line in out.read_text().splitlines()]
    assert header[-3:] == ["delay_on", "delay", "seconds"]
    assert len(lines) == len(told["runs"]) == 3
    assert {line[-1] for line in lines} == {""}  # to be measured
    chosen = read_link_runs(out, is_measured=False)
    assert [cells for cells, _ in chosen] == told["runs"]
    assert any(run.delay_on and run.delay == 2 for _, run in chosen)
    shared = {"link": "queued"}, {"link": "queued", "shared_links": "pairs"}
    assert all(shared[0] not in group or shared[1] not in group for group in told["alike"])


def test_options_for_runs_of_the_other_kind_have_no_effect(mistake, tmp_path):
    links, models = written(tmp_path / "runs.csv", seed=3), tmp_path / "models.csv"
    models.write_text("model,tensor,pipeline,global_batch,seconds\ngpt-22b,8,2,4,0.6\n")
    for option, value in (("--system", "a100"), ("--fit", "host.step"), ("--starts", 2)):
        assert f"{option} has no effect on runs of links" in mistake(
            "calibrate", links, option, value
        )
    for option, value in (
        ("--design", [2]),
        ("--time-noise", [0.02]),
        ("--by-pair", []),
        ("--delay", ["1s"]),
    ):
        assert f"{option} has no effect on runs of models" in mistake(
            "calibrate", models, option, *value
        )
    assert "runs of links are one file, got 2" in mistake("calibrate", links, models)


def test_what_meets_noise_better_than_is_called_for_is_not_taken():
    table = pj.schedules.build("1f1b", num_workers=3, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.1)
    runs = [pj.links.LinkRun(table, costs, on, 1.0) for on in ("", "0-1")]
    runs = measured_runs(runs, pj.Links("queued"), NOISE, seed=1)
    machines = [pj.Links(model) for model in ("delay", "queued", "blocking")]
    found = pj.links.identify_links(runs, noise=NOISE, by_pair=True, candidates=machines)
    assert min(fit.excess for fit in found.fits) < 0  # with models of pairs
    assert found.fits[0].links == found.links
    for pair, models in found.pairs.items():
        assert models[0] == model_of(found.links, pair)
