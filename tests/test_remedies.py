"""Remedies can be followed: options of a launcher give the promised step, and faults come first."""

import dataclasses
import itertools
import json
import random
import shlex

import numpy as np
import pytest
from daily import daily, read_cases, with_cases
from launch_reader import read_launch

import pipejax as pj
from pipejax.cli.output.remedies import _best_rows as best_rows
from pipejax.schedules.table.table_files import to_csv
from pipejax.search.remedies.explain import shortens

H100 = pj.load_system("h100")
LLAMA = pj.load_model("llama3-8b")
TWO = {"stages_per_worker": 2}
SHELVES = ("launcher", "code", "hardware")


def check_options(result, stage_layers=()):
    """Read options of all launchers of all remedies back."""
    begin = result.memory.begin.scenario
    for remedy in result.remedies:
        launches = {launch.launcher: launch for launch in remedy.launches}
        for name in remedy.launchers:
            again = read_launch(launches[name], begin, stage_layers).evaluate()
            what = f"{name}: {remedy.what}: {launches[name].text}"
            assert again.step_time == pytest.approx(remedy.step_time, rel=1e-9), what


def random_model(seed):
    """Draw a run of a model."""
    pick = random.Random(seed).choice
    workers, data = pick([4, 8]), pick([1, 2, 8])
    tensor = pick([1, 2, 4])
    workload = pj.Workload(
        LLAMA,
        minibatch=pick([16, 32]),
        tensor_parallel=tensor,
        sequence_parallel=tensor > 1 and pick([True, True, False]),
        data_parallel=data,
        zero=pick([0, 1]) if data > 1 else 0,
        recompute=pick(["none", "full", "uniform:2"]),
        **pick([{}, {"embedding_units": 1, "loss_units": 1}]),
    )
    name = pick(["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"])
    options = TWO if name == "interleaved-1f1b" else {}
    costs, link = pj.costing.ModelCosts(workload, H100), pick(["delay", "queued", "rendezvous"])
    run = pj.Scenario(name, workers, 16, options, costs=costs, link=link)
    return run if pick([True, False]) else run.with_edit(pj.costing.SlowWorkers({1: 1.3}))


def random_measured(seed):
    """Draw measured times of the stages of a run, and the layers of these."""
    rng, pick = np.random.default_rng(seed), random.Random(seed).choice
    name = pick(["1f1b", "gpipe", "interleaved-1f1b"])
    options = TWO if name == "interleaved-1f1b" else {}
    table = pj.schedules.build(name, num_workers=4, num_microbatches=16, **options)
    layers = pick([(), (8,) * table.num_stages, tuple(range(4, 4 + table.num_stages))])
    seconds = rng.uniform(0.97, 1.03, table.num_stages) * (np.array(layers) if layers else 8)
    seconds[-1] += pick([0, 6])
    costs = pj.Costs(forward=seconds, input_grad=1.1 * seconds, weight_grad=0.8 * seconds)
    costs = dataclasses.replace(costs, transmit=pick([0.1, 1.0]))
    return pj.Scenario(table, costs=costs, link=pick(["delay", "rendezvous"])), layers


@pytest.mark.parametrize("seed", daily(range(40), total=20))
def test_options_of_launchers_give_the_step_of_a_remedy(seed):
    if seed % 2:
        scenario, layers = random_measured(seed)
        result = pj.explain(scenario, stage_layers=layers or None)
        assert not any(remedy.kind == "microbatches" for remedy in result.remedies)
    else:
        layers, result = (), pj.explain(random_model(seed))
    check_options(result, layers)
    for remedy in result.remedies:
        assert len(remedy.assumes) <= 1
        assert (remedy.shelf == "launcher") == bool(remedy.launchers)


EAGER, COMPILED = map(pj.load_stack, ("torchtitan-2024-eager", "torchtitan-2024"))


@with_cases("name options fields", *read_cases("runs that torchtitan compiles"))
def test_flags_of_torchtitan_that_compile_promise_compiled_kernels(name, options, fields):
    def scenario(stack, workload):
        workload = dataclasses.replace(workload, model=stack.model(LLAMA))
        costs = pj.costing.ModelCosts(workload, stack.on(H100), stack=stack.name)
        return pj.Scenario(name, 4, 8, options, costs=costs)

    split = {"sequence_parallel": True, "data_parallel": 4, "zero": 1, "overlap": 1.0}
    workload = pj.Workload(LLAMA, minibatch=16, recompute_again=True, **split, **fields)
    result = pj.explain(scenario(EAGER, workload), launcher="torchtitan", schedules=["1f1b"])
    offered = [remedy for remedy in result.remedies if remedy.launchers]
    overlaps = [remedy for remedy in offered if remedy.scenario.source.workload.tensor_overlap]
    assert overlaps
    assert all("compiled kernels" in remedy.what for remedy in overlaps)
    best = max(offered, key=lambda remedy: remedy.saves)
    assert best in overlaps
    for remedy in offered:
        (launch,) = (row for row in remedy.launches if row.launcher == "torchtitan")
        stack = COMPILED if "compile.enable" in launch.options else EAGER
        again = read_launch(launch, scenario(stack, workload)).evaluate()
        assert again.step_time == pytest.approx(remedy.step_time, rel=1e-9), remedy.what


@pytest.mark.parametrize("name", ["zb-v", "zb-h1", "dualpipe-v", "ops.csv", "1f1b"])
def test_every_recomputation_of_the_launcher_is_tried_beside_a_table_file(name, tmp_path):
    """torchtitan reads all of these but 1f1b from a file, and recomputes as the options say."""
    stages = {"sequence_parallel": True, "tensor_parallel": 4, "data_parallel": 4, "zero": 1}
    workload = pj.Workload(LLAMA, minibatch=8, recompute="full", recompute_again=True, **stages)
    schedule, size = name, (4, 8)
    if name == "ops.csv":
        schedule, size = pj.costing.TableFile(str(tmp_path / name)), ()
        table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
        (tmp_path / name).write_text(to_csv(table))
    run = pj.Scenario(schedule, *size, costs=pj.costing.ModelCosts(workload, H100))
    result = pj.explain(run, launcher="torchtitan", schedules=["1f1b"])
    for level in ("half_products", "none"):
        other = run.with_workload(dataclasses.replace(workload, recompute=level))
        titles = {remedy.what: remedy for remedy in result.remedies}
        remedy = titles[f"recomputation {level}"]
        assert remedy.launchers == ("torchtitan",)
        assert remedy.step_time == pytest.approx(other.evaluate().step_time, rel=1e-9)


@pytest.mark.parametrize("name", ["zb-v", "zb-h1"])
def test_less_recomputation_and_compiled_kernels_combine_with_a_schedule(name):
    """W forbids compiled kernels; without W, torchtitan has them beside half_products."""

    def run(name, stack, recompute, **options):
        workload = pj.Workload(stack.model(LLAMA), minibatch=16, recompute=recompute, **fields)
        costs = pj.costing.ModelCosts(workload, stack.on(H100), stack=stack.name)
        return pj.Scenario(name, 4, 16, options, costs=costs)

    fields = {"tensor_parallel": 4, "sequence_parallel": True, "data_parallel": 4, "zero": 1}
    fields |= {"overlap": 1.0, "recompute_again": True}
    result = pj.explain(run(name, EAGER, "full"), launcher="torchtitan", schedules=["1f1b"])
    remedies = [remedy for remedy in result.remedies if remedy.launchers]
    best = max(remedies, key=lambda remedy: remedy.saves)
    assert "compiled kernels" in best.what
    assert best.scenario.schedule == "1f1b"
    workload = best.scenario.source.workload
    assert workload.recompute != "full"
    other = run("1f1b", COMPILED, workload.recompute).with_workload(workload)
    other = other.replace(num_microbatches=best.scenario.num_microbatches)
    assert best.step_time == pytest.approx(other.evaluate().step_time, rel=1e-9)


@with_cases(
    "zero replicas gathers", *read_cases("test_an_update_is_named_with_the_weights_that_it_gathers")
)
def test_an_update_is_named_with_the_weights_that_it_gathers(zero, replicas, gathers):
    """Replicas that split the optimizer (ZeRO 1, 2) gather the weights after the update."""
    workload = pj.Workload(LLAMA, minibatch=2, data_parallel=replicas, zero=zero)
    run = pj.Scenario("1f1b", 4, 2, costs=pj.costing.ModelCosts(workload, H100))
    result = pj.explain(run, schedules=["1f1b"])
    updates = [fault.why for fault in result.faults if fault.kind == "update"]
    updates += [part.meaning for part in result.parts if part.name == "update"]
    updates += [r.what for r in result.remedies if r.what.startswith("update")]
    assert len(updates) == 3
    assert ["all-gather" in text for text in updates] == [gathers] * 3
    (exchange,) = (part.meaning for part in result.parts if part.name == "exchange")
    assert exchange == ("reduce-scatter of gradients" if gathers else "all-reduce of gradients")
    fast = dataclasses.replace(workload, overlap=1.0)
    hidden = run.with_workload(fast).evaluate()
    assert (hidden.costs.update.max() < run.evaluate().costs.update.max()) == gathers


# one planted fault in the terms of a launcher

LAUNCHERS = ("Megatron-LM", "Megatron-Bridge", "torchtitan", "DeepSpeed")
FEW = ("1f1b", "interleaved-1f1b", "gpipe", "zb-h1")  # the others take most of the time


def job(launcher, **fields):
    """Return a healthy job: 1F1B with enough microbatches, 16 GB links, exchanges hidden."""
    values = {
        "minibatch": 32,
        "tensor_parallel": 4,
        "sequence_parallel": launcher != "DeepSpeed",
        "data_parallel": 2,
        "zero": 2 if launcher == "torchtitan" else 1,
        "overlap": float(launcher != "DeepSpeed"),  # which has it without a pipeline alone
    }
    workload = pj.Workload(**{"model": LLAMA, **values, **fields})
    costs = pj.costing.ModelCosts(workload, H100)
    return pj.Scenario("1f1b", 4, 32, costs=costs)


PLANTED = (
    *("uneven stages", "slow worker", "slow link", "few microbatches", "heavy head"),
    *("exposed exchange", "full recomputation", "gpipe"),
)


def plant(fault, launcher, rng):
    """Return a job with a fault, and a function that recognizes the fault in a report."""
    run = job(launcher)
    if fault == "uneven stages":
        layers = [8, 8, 8, 8]
        more, less = rng.choice(4, 2, replace=False)
        layers[more] += 4
        layers[less] -= 4
        layout = str(pj.costing.PipelineLayout.with_layers(layers, [0] * 4))
        return job(launcher, pipeline_layout=layout), lambda f: f.kind == "imbalance"
    if fault == "slow worker":
        worker = int(rng.integers(4))
        slow = run.with_edit(pj.costing.SlowWorkers({worker: 1.6}))
        return slow, lambda f: (f.kind, f.worker) == ("imbalance", worker)
    if fault == "slow link":
        ends = int(rng.integers(3)) + np.arange(2)
        slow = run.with_edit(pj.costing.ScaledTimes(f"message@boundary{ends[0]}*400"))
        return slow, lambda f: f.link == tuple(ends)
    if fault == "few microbatches":
        count = int(rng.choice([2, 4]))
        few = job(launcher, minibatch=2 * count).replace(num_microbatches=count)
        return few, lambda f: f.kind == "microbatches"
    if fault == "heavy head":
        vocabulary = int(rng.choice([512, 768])) * 1024
        model = dataclasses.replace(LLAMA, vocabulary=vocabulary)
        return job(launcher, model=model), lambda f: (f.kind, f.stage) == ("imbalance", 3)
    if fault == "exposed exchange":
        run = job(launcher, overlap=0.0, zero=0, minibatch=8).replace(num_microbatches=8)
        slow = run.with_edit(pj.costing.ScaledTimes(f"A*{rng.integers(100, 200)}"))
        return slow, lambda f: f.kind == "exchange"
    if fault == "full recomputation":
        return job(launcher, recompute="full"), lambda f: f.kind == "recompute"
    return run.replace(schedule="gpipe"), lambda f: f.kind == "memory"


CASES = [(fault, name, seed) for seed in range(3) for fault in PLANTED for name in LAUNCHERS]


@pytest.mark.parametrize(("fault", "launcher", "seed"), daily(CASES, total=12), ids=str)
def test_a_planted_fault_is_first_and_its_remedy_can_be_followed(fault, launcher, seed):
    run, is_named = plant(fault, launcher, np.random.default_rng(seed))
    result = pj.explain(run, launcher=launcher, schedules=FEW)
    assert is_named(result.bottleneck), [(f.kind, f.seconds, f.why) for f in result.faults]
    check_options(result)
    ranks = [SHELVES.index(remedy.shelf) for remedy in result.remedies]
    assert ranks == sorted(ranks)
    assert all(remedy.launchers in ((), (launcher,)) for remedy in result.remedies)


# a cause, its part and its remedy


@pytest.mark.parametrize("head", [1.3, 1.5, 1.8])
def test_a_cause_says_why_its_remedy_saves_another_time(head):
    """Even stages wait for each other's messages under rendezvous; over links of their own not."""
    size = {"num_workers": 4, "num_microbatches": 16}
    table = pj.schedules.build("interleaved-1f1b", **size, **TWO)
    times = np.r_[np.ones(7), head]
    costs = pj.Costs(forward=times, input_grad=1.1 * times, weight_grad=times, transmit=0.1)

    def step(scale, link="rendezvous"):
        slow = dataclasses.replace(
            costs,
            **{name: getattr(costs, name) * scale for name in ("forward", "input_grad")},
            weight_grad=costs.weight_grad * scale,
            backward=costs.backward * scale,
        )
        return pj.evaluate(table, slow, link=link).makespan

    result = pj.explain(table, costs, link="rendezvous", schedules=["1f1b"])
    part, cause, remedy = result.effects
    mended, balanced = 1 / times, times.mean() / times
    assert cause.seconds == pytest.approx(step(1.0) - step(mended), rel=1e-9)
    assert remedy.seconds == pytest.approx(step(1.0) - step(balanced), rel=1e-9)
    assert (remedy.what, remedy.part) == ("moving layers", "blocking")
    assert remedy.without == pytest.approx(step(1.0) - step(balanced, "delay"), rel=1e-9)
    more = (step(balanced) - step(balanced, "delay")) - (step(1.0) - step(1.0, "delay"))
    assert remedy.grows == pytest.approx(more, rel=1e-9)
    assert part.seconds == {part.name: part.seconds for part in result.parts}["imbalance"]


def test_equal_effects_need_no_reason():
    """Without messages a slow stage costs its part, and its repair saves that."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=64)
    costs = pj.Costs(forward=[1, 1, 1, 1.5], backward=[2, 2, 2, 3.0])
    assert pj.explain(table, costs, schedules=["1f1b"]).effects != ()  # less work: it saves more
    alone = pj.explain(table, pj.Costs(forward=1.0, backward=2.0, all_reduce=8.0))
    assert alone.bottleneck.kind == "exchange"
    assert alone.effects == ()


# names of tables


FILES = read_cases("names of table files")


@pytest.mark.parametrize(("name", "options", "stem", "runs"), FILES, ids=lambda value: str(value))
@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_launchers_go_by_the_order_of_a_table_file(tmp_path, name, options, stem, runs, suffix):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8, **options)
    path = tmp_path / f"{stem}{suffix}"
    pj.write_table(dataclasses.replace(table, name=stem), path)
    megatron, _, torchtitan = pj.costing.pipeline_launches(pj.read_table(path))
    by_name = [
        not launch.lacks and not any(str(v).endswith(".csv") for v in launch.options.values())
        for launch in (megatron, torchtitan)
    ]
    assert by_name == runs


def test_explain_names_a_table_file_after_its_schedule(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = {"num_workers": 4, "num_microbatches": 8}
    pj.write_table(pj.schedules.build("1f1b", **size), "sched.csv")
    line = ["-T", "F=1,I=1,W=1", "--comm", "0.1", "--memory-limit", 8, "--schedules", ",".join(FEW)]
    by_file = answer("explain", "-t", "sched.csv", *line)
    by_name = answer("explain", "-s", "1f1b", "-P", 4, "-M", 8, *line)
    assert by_file["remedies"] == by_name["remedies"]
    assert by_file["remedies"][0]["shelf"] == "launcher"


def test_an_order_of_messages_is_no_schedule_of_a_launcher():
    table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.3)
    result = pj.explain(table, costs, link="rendezvous", schedules=["1f1b"])
    (remedy,) = (remedy for remedy in result.remedies if remedy.kind == "messages")
    assert (remedy.shelf, remedy.launchers) == ("code", ())
    launches = pj.costing.pipeline_launches(remedy.scenario.table())
    assert all(launch.lacks for launch in launches)


def test_a_launcher_has_the_first_shelf_alone():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    costs = pj.Costs(forward=1.0, input_grad=1.1, weight_grad=0.9)
    for name, schedule in (("Megatron-LM", "interleaved-1f1b"), ("torchtitan", "interleaved-")):
        how = {"launcher": name, "memory_limit": 8, "schedules": FEW}
        first = pj.explain(table, costs, **how).remedies[0]
        assert (first.shelf, first.launchers) == ("launcher", (name,))
        assert first.what.startswith(f"schedule {schedule}")


def test_a_command_puts_one_launcher_first(answer, mistake):
    line = ("explain", "-t", "examples/schedule.csv", "-C", "examples/measured.json")
    for name, launchers in (("TORCHTITAN", {"torchtitan"}), ("megatron-lm", set())):
        remedies = answer(*line, "-l", "rendezvous", "--launcher", name)["remedies"]
        assert launchers == {name for row in remedies for name in row["launchers"]}
    assert "did you mean torchtitan?" in mistake(*line, "--launcher", "torchtitans")
    why = "must be one of Megatron-LM, Megatron-Bridge, torchtitan at measured times, got MaxText"
    assert why in mistake(*line, "--launcher", "maxtext")


@with_cases("launcher is_combined line", *read_cases("largest remedies of shelves"))
def test_a_shelf_shows_its_largest_remedy(answer, answer_and_text, launcher, is_combined, line):
    run = ("explain", "-s", "1f1b", *line.split(), "-y", "h100", "--minibatch", 32)
    run = (*run, "--data-parallel", 2, "--launcher", launcher, "--schedules", "interleaved-1f1b")
    result, text = answer_and_text(*run)
    rows = [row for row in result["remedies"] if row["launchers"] == [launcher]]
    combined = [row for row in rows if row["kind"] == "combined"]
    single = next(row for row in rows if row["kind"] != "combined")
    least = single["saves"] + 0.01 * result["step_time"]
    largest = next((row for row in combined if row["saves"] > least), single)
    assert (largest in combined) == is_combined
    lines = text.splitlines()
    shown = [line for line in lines if f"; set by options of {launcher}" in line]
    name = largest["what"].removeprefix("combined: ").replace(": ", " ").replace("; ", " + ")
    verb = "saves" if result["memory"]["fits"] else "fits and saves"
    assert [line.partition(f": {verb} ")[0] for line in shown] == [name]
    assert f"next: {largest['command']}" in lines
    again = answer(*shlex.split(largest["command"])[1:])
    assert result["step_time"] - again["makespan"] == pytest.approx(largest["saves"], rel=1e-9)


@pytest.mark.parametrize("launcher", ["torchtitan", "DeepSpeed"])
def test_a_setting_that_a_launcher_lacks_is_not_said_to_need_code(answer_and_text, launcher):
    line = "explain -s 1f1b -P 1 -M 2 -m llama3-8b -y a100 --minibatch 2 --sequence 32768"
    run = f"{line} --tensor-parallel 2 --data-parallel 16 --recompute half_products"
    result, text = answer_and_text(*run.split(), "--launcher", launcher)
    rows = [row for row in result["remedies"] if row["kind"] == "settings"]
    lacks = [", ".join(row["launch"][launcher]["lacks"]) for row in rows if not row["launchers"]]
    assert any(f"; {launcher} lacks {reasons}" in text for reasons in lacks)
    assert f"no option of {launcher} does it" not in text


@pytest.mark.parametrize("name", ["link", "slow link", "slow stage"])
def test_repairs_come_before_faster_hardware(answer, tmp_path, name):
    # one message of 6.8 in place of 0.9 ms, or all of them long, or one stage slow
    messages = {"link": [0.9] * 3 + [6.8] + [0.9] * 3, "slow link": [3.0] * 3 + [3.5] + [3.0] * 3}
    transmit = messages.get(name, [0.9] * 7)
    stages = [21.0] * 7 + [25.0 if name == "slow stage" else 21.0]
    costs = {"unit": "milliseconds", "F": stages, "B": [2 * time for time in stages]}
    costs["message"] = {"latency": 0.02, "transmit": transmit}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    run = ("explain", "-s", "1f1b", "-P", 8, "-M", 24, "--costs", path, "--link", "rendezvous")
    run = (*run, "--schedules", "1f1b")
    rows = [row for row in answer(*run)["remedies"] if row["shelf"] == "hardware"]
    for first, second in itertools.pairwise(rows):
        weights = [1.1 if row["kind"] == "repair" else 1.0 for row in (first, second)]
        assert first["saves"] * weights[0] >= second["saves"] * weights[1]
    kinds = {"link": "repair", "slow link": "hardware", "slow stage": "repair"}
    assert rows[0]["kind"] == kinds[name]


# all numbers of stages per worker

STAGED = read_cases("stages per worker of launchers")


@pytest.mark.parametrize("case", STAGED, ids=lambda case: f"{case[0]} {case[2]}")
def test_no_number_of_stages_per_worker_that_fits_is_faster(case):
    launcher, names, model, system, workers, microbatches, fields = case
    model, system, names = pj.load_model(model), pj.load_system(system), names.split()
    workload = pj.Workload(model, minibatch=microbatches, **fields)
    size = {"num_workers": workers, "num_microbatches": microbatches}
    table = pj.schedules.build("1f1b", **size)
    options = {"schedules": ["1f1b", *names], "launcher": launcher}
    result = pj.explain(table, workload, system=system, **options)
    seconds, needs = [], []
    for name, count in itertools.product(names, range(2, 17)):
        other = pj.schedules.build(name, **size, stages_per_worker=count)
        try:
            launch = pj.costing.launches(workload, other, launcher)[0]
        except ValueError:  # fewer layers than stages
            continue
        if not launch.lacks:
            costs = pj.stage_costs(workload, system, other)
            seconds.append(pj.evaluate(other, costs).step_time)
            needs.append(pj.memory_bytes(workload, other).max())
    fitting = np.array(seconds)[np.array(needs) <= result.memory.limit]
    assert len({*seconds}) > 2
    remedies = [r for r in result.remedies if r.kind == "schedule" and r.shelf == "launcher"]
    steps = [result.step_time, *(remedy.step_time for remedy in remedies)]
    assert min(steps) == pytest.approx(min([result.step_time, *fitting]), rel=1e-12)
    is_ruled_out = min(steps) - min(seconds) > 0.01 * result.step_time
    assert any(fault.kind == "memory" for fault in result.faults) == is_ruled_out


@pytest.mark.parametrize(("layers", "best"), [(12, 12), (9, 9), (5, 5), (7, 7), (34, 2)])
def test_measured_layers_give_the_numbers_of_stages_per_worker(layers, best):
    """Without messages a step is (M + (P - 1) / V) (F + B): most stages are fastest."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    costs = pj.Costs(forward=1.0, backward=2.0)
    result = pj.explain(
        table, costs, stage_layers=[layers] * 4, memory_limit=20, schedules=["interleaved-1f1b"]
    )
    (remedy,) = (remedy for remedy in result.remedies if remedy.kind == "schedule")
    assert remedy.what == f"schedule interleaved-1f1b, stages per worker {best}"
    assert remedy.launchers
    assert remedy.step_time == pytest.approx((8 + 3 / best) * 3)


def remedy_row(kind, saves):
    return {"kind": kind, "saves": saves, "launchers": [], "shelf": "code"}


@with_cases(
    "step single both is_shown",
    *read_cases("test_a_combination_counts_from_a_hundredth_of_the_step"),
)
def test_a_combination_counts_from_a_hundredth_of_the_step(step, single, both, is_shown):
    rows = [remedy_row("schedule", single), remedy_row("combined", both)]
    assert best_rows(rows, step) == [rows[is_shown]]


@with_cases("schedule model options fields", *read_cases("runs of a slow host"))
def test_a_slow_host_is_a_cause_of_any_table(schedule, model, options, fields):
    size = {"num_workers": 4, "num_microbatches": 8, "options": options}
    workload, system = pj.Workload(pj.load_model(model), 8, **fields), pj.load_system("gb200")

    def scenario(factor):
        machine = system
        for name in ("launch", "collective", "layer", "microbatch"):
            number = factor * float(getattr(system.host, name))
            machine = machine.with_number(f"host.{name}", number)
        return pj.Scenario(schedule, costs=pj.costing.ModelCosts(workload, machine), **size)

    slow, fast = scenario(5.0), scenario(0.0)
    steps = [run.evaluate().step_time for run in (slow, fast)]
    result = pj.explain(slow, schedules=["1f1b"])
    (cause,) = (cause for cause in result.faults if cause.kind == "host")
    # the step without this cause takes as long as that of a host which takes no time
    assert cause.seconds == pytest.approx(steps[0] - steps[1], rel=1e-6)
    assert not any(cause.kind == "host" for cause in pj.explain(fast, schedules=["1f1b"]).faults)


@with_cases("name link slow", *read_cases("slow links"))
def test_a_remedy_shortens_a_slow_link_only_if_it_then_costs_less(name, link, slow):
    """The link between workers 2 and 3 costs what it would save at the others' mean time."""
    times = np.full((2, 1, 5), 0.1)
    times[:, 0, 2] *= slow
    repaired = times.copy()
    repaired[:, 0, 2] /= np.mean(slow)

    def link_cost(table):
        pair = (pj.Costs(1.0, 2.0, 1.0, 1.0, transmit=row) for row in (times, repaired))
        begin, end = (pj.evaluate(table, costs, link=link).step_time for costs in pair)
        return begin - end, begin

    table = pj.schedules.build(name, num_workers=6, num_microbatches=12)
    costs = pj.Costs(1.0, 2.0, 1.0, 1.0, transmit=times)
    names = ["gpipe", "1f1b", "zb-h1", "zb-h2"]
    result = pj.explain(table, costs, link=link, schedules=names, memory_limit=99.0)
    first = next(fault for fault in result.faults if fault.kind == "link")
    result = dataclasses.replace(result, bottleneck=first)
    now, _ = link_cost(table)
    assert result.bottleneck.seconds == pytest.approx(now, rel=1e-9)
    remedies = [remedy for remedy in result.remedies if remedy.kind == "schedule"]
    assert remedies
    for remedy in remedies:
        later, step = link_cost(remedy.scenario.table())
        later = later if later > 0.01 * step else 0.0  # less is no cause
        assert shortens(remedy, result) == (now - later > 0.1 * now), remedy.what


@with_cases("slow", {}, {2: 1.25}, {0: 1.5}, {1: 1.2, 3: 1.1})
def test_divided_stages_keep_their_slow_workers(slow, answer, tmp_path):
    """Layers of 10 and 20 ms, and on the last stage a head of 1 and 2 ms, divided by hand."""
    times = {"F": [10, 10, 10, 11], "B": [20, 20, 20, 22], "unit": "milliseconds"}
    (tmp_path / "c.json").write_text(json.dumps(times | {"stragglers": slow}))
    line = ["-s", "1f1b", "-P", 4, "-M", 16, "-C", tmp_path / "c.json", "--memory-limit", 6]
    rows = answer("explain", *line, "--launcher", "Megatron-LM")["remedies"]
    row = next(row for row in rows if "stages per worker" in row["what"])
    stages = int(row["what"].split()[-1])
    size = {"num_workers": 4, "num_microbatches": 16, "stages_per_worker": stages}
    stage = np.arange(4 * stages)
    factor = np.array([slow.get(worker, 1.0) for worker in (stage % 4).tolist()])
    forward = factor * (0.010 / stages + 0.001 * (stage == stage[-1]))
    costs = pj.Costs(forward=forward, backward=2 * forward)
    table = pj.schedules.build("interleaved-1f1b", **size)
    assert row["step_time"] == pytest.approx(pj.evaluate(table, costs).step_time)


@with_cases("line slow", (["--stragglers", "2=1.5"], {}), ([], {2: 1.5}))
def test_a_layer_that_leaves_a_slow_worker_takes_its_slowness_along(line, slow, answer, tmp_path):
    """Four layers of 2.5 s on each stage; a layer on worker 2 takes 3.75 s."""
    times = {"F": 4.0, "B": 6.0, "unit": "seconds", "stragglers": slow}
    (tmp_path / "c.json").write_text(json.dumps(times))
    line = ["-C", tmp_path / "c.json", "-s", "1f1b", "-P", 4, "-M", 16, *line]
    rows = answer("explain", *line, "--stage-layers", "4,4,4,4")["remedies"]
    command = next(row["command"] for row in rows if row["what"].endswith("5,4,3,4"))
    busy = answer(*shlex.split(command)[1:])["busy"]
    assert busy == pytest.approx([16 * seconds for seconds in (12.5, 10, 3 * 3.75, 10)])
