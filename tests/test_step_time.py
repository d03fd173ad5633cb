"""Step times of measured rows: each is what `evaluate` says, with exact gradients."""

import dataclasses
import shlex

import numpy as np
import pytest
from daily import with_cases
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.runs.evaluate import op_counts
from pipejax.analysis.step.step_time import StepTimes
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.layers.formulas import layer_flop, model_flop
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.stage.stage_costs import PARTS, stage_parts
from pipejax.costs.stage.stage_work import stage_bytes, static_parts
from pipejax.costs.system.parts import Host, Kernels, Link, system_number
from pipejax.costs.system.system import DATA, Band, CalibrationRecord
from pipejax.engine.pricing import cost_vector

HEADER = "layers,hidden,heads,sequence,tensor,data,pipeline,microbatch_size,global_batch,schedule,"
LAYOUTS = ((1, 2, 1, 2, 8), (2, 1, 2, 1, 4), (8, 2, 4, 1, 24), (2, 4, 4, 2, 64))
NAMES = (
    "compute.efficiency compute.latency memory.efficiency kernels.sharpness host.launch "
    "host.step network.latency network.efficiency collectives.latency"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [
        f"{layers},1024,16,512,{t},{d},{p},{b},{batch},1f1b,0,none,0.5"
        for layers in (8, 12)
        for t, d, p, b, batch in LAYOUTS
    ]
    path.write_text(HEADER + "sequence_parallel,recompute,seconds\n" + "\n".join(lines))
    with pytest.warns():
        return read_rows(path)


@pytest.fixture(scope="module")
def system():
    machine = pj.load_system("a100")
    return dataclasses.replace(machine, kernels=dataclasses.replace(machine.kernels, priced=1.0))


@pytest.fixture(scope="module")
def times(rows):
    return StepTimes(rows, layer_group=rows.tensor // 8)


@pytest.fixture(scope="module")
def at(system):
    return np.array([float(system_number(system, n)) or 1e-4 for n in NAMES.split()] + [1.0, 1.0])


@pytest.fixture(scope="module")
def result(times, system, at):
    return times.predict_and_grad(system, NAMES.split(), around(at))


def around(at):
    """Return a point, and those a little above and below it along each axis."""
    steps = np.diag(1e-5 * at)
    return np.array([at, *(at + steps), *(at - steps)])


def check_slopes(at, seconds, slopes):
    rises = (seconds[1 : 1 + len(at)] - seconds[1 + len(at) :]).T / 2e-5
    np.testing.assert_allclose(slopes[0] * at, rises, atol=1e-6 * seconds[0].max())


@pytest.mark.slow
def test_rows_take_what_evaluate_says(times, system, at, result):
    assert len(times.batches) == 1
    for name, value in zip(NAMES.split(), at, strict=False):
        system = system.with_number(name, value)
    for k in (1, 6):
        table = times.tables[k]
        costs = pj.stage_costs(times.workloads[k], system, table)
        assert result[0][0, k] == pytest.approx(pj.evaluate(table, costs).makespan, rel=1e-12)


def test_gradients_are_those_of_finite_differences(at, result):
    seconds, slopes = result
    check_slopes(at, seconds, slopes)
    assert (np.abs(slopes[0] * at).max(axis=0) > 1e-6 * seconds[0].max()).all()


@with_cases("table", "megatron_bridge_b200", "megatron_bridge_h100", "unseen/dgxc_moe")
def test_rows_with_experts_have_slopes_of_finite_differences(table):
    rows = read_rows(DATA / "measured" / f"{table}.csv")
    has_experts = [rows.models[k].moe is not None for k in rows.model]
    rows = rows.take(np.flatnonzero(has_experts & np.isfinite(rows.seconds))[[0, -1]])
    names = ["compute.efficiency", "network.efficiency"]
    system = pj.load_system(str(rows.system[0]))
    at = np.array([float(system_number(system, name)) for name in names])
    check_slopes(at, *StepTimes(rows, system=system).predict_and_grad(system, names, around(at)))


def test_a_factor_lengthens_the_layers_of_its_group_alone(rows, at, result):
    group_slopes = result[1][0, :, len(NAMES.split()) :]
    np.testing.assert_array_equal(group_slopes > 0, (rows.tensor // 8)[:, None] == np.arange(2))
    assert (group_slopes.sum(axis=1) < result[0][0]).all()


OVERLAPPING = [  # layers, workers, sequences, schedule, and whether steps overlap
    (8, 4, 16, "zb-2p", 1),
    (8, 4, 16, "zb-2p", 0),
    (8, 2, 5, "zb-1p", 1),
    (12, 4, 6, "gpipe", 1),
    (7, 4, 9, "zb-2p", 1),
]


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "overlapping.csv"
    lines = [
        f"{layers},4096,32,1024,1,1,{p},1,{batch},{schedule},0,none,0.5,{overlaps},512"
        for layers, p, batch, schedule, overlaps in OVERLAPPING
    ]
    header = HEADER + "sequence_parallel,recompute,seconds,steps_overlap,vocabulary\n"
    path.write_text(header + "\n".join(lines))
    with pytest.warns():
        return StepTimes(read_rows(path))


def worker_times(table, costs):
    """Return each worker's first start and the end of its update, cell by cell."""
    run = pj.evaluate(table, dataclasses.replace(costs, update=0.0, all_reduce=0.0))
    is_op = table.cells.phase > 0
    begins = np.where(is_op, run.start, np.inf).min(axis=1)
    # the last op of a worker completes the gradient of its stage
    ends = np.where(is_op, run.finish, 0).max(axis=1) + costs.all_reduce + costs.update
    return begins, ends


def test_a_step_that_overlaps_the_next_lasts_as_its_longest_worker(overlapping, system, at):
    names = NAMES.split()
    numbers = np.append(at[: len(names)], 1.0)
    seconds, slopes = overlapping.predict_and_grad(system, names, around(numbers))
    for name, value in zip(names, at, strict=False):
        system = system.with_number(name, value)
    for k, (*_, overlaps) in enumerate(OVERLAPPING):
        table = overlapping.tables[k]
        costs = pj.stage_costs(overlapping.workloads[k], system, table)
        begins, ends = worker_times(table, costs)
        expected = (ends - begins).max() if overlaps else ends.max()
        assert seconds[0, k] == pytest.approx(expected, rel=1e-12)
        if table.name == "zb-2p":
            assert (seconds[0, k] < 0.999 * ends.max()) == bool(overlaps)
    check_slopes(numbers, seconds, slopes)


# Parts of the seconds and bytes of a step sum to the whole, and MFU is counted by hand

SYSTEM = dataclasses.replace(
    pj.load_system("h100"),
    kernels=Kernels(priced=1.0),
    host=Host(launch=2e-5, microbatch=1e-4),
    host_link=Link(40e9, 1e-5),
    price=2.0 / 3600,
    calibration=CalibrationRecord("made up", 9, (), (Band(80.0, 0.9, 1.2), Band(90.0, 0.8, 1.3))),
)
MODEL = dataclasses.replace(pj.load_model("gpt-22b"), layers=8)
DEGREES = {"tensor_parallel": 2, "context_parallel": 2, "data_parallel": 4, "zero": 1}
WORKLOAD = pj.Workload(MODEL, minibatch=8, **DEGREES, embedding_units=1, loss_units=1)
ZERO_3 = dataclasses.replace(WORKLOAD, zero=3, data_parallel=64, context_parallel=1)


def make_run(workload=WORKLOAD, system=SYSTEM, table=None, link="delay"):
    table = build() if table is None else table
    return pj.evaluate(table, pj.stage_costs(workload, system, table), link=link)


@with_cases(
    "name link workload",
    ("1f1b", "delay", WORKLOAD),
    ("chimera", "rendezvous", WORKLOAD),
    ("zb-h1", "blocking", ZERO_3),
)
def test_parts_sum_to_the_step(name, link, workload):
    run = make_run(workload, table=build(name), link=link)
    parts = pj.step_report(run, workload, SYSTEM).breakdown
    assert sum(parts.values()) == pytest.approx(run.step_time, rel=1e-12)
    assert min(parts.values()) >= 0
    assert ("weights" if workload.zero == 3 else "gradients") in [p for p in parts if parts[p] > 0]
    assert all(parts[name] > 0 for name in ("compute", "tensor", "host", "bubble", "messages"))
    in_ops = sum(parts[name] for name in PARTS)
    without = dataclasses.replace(run.costs, update=0.0, all_reduce=0.0)
    vector = np.asarray(cost_vector(run.program, without))
    assert in_ops == pytest.approx(op_counts(run.program).mean(axis=0) @ vector, rel=1e-9)
    alone = dataclasses.replace(without, latency=0.0, transmit=0.0)
    busy = pj.evaluate(run.table, alone, link=link).makespan
    assert in_ops + parts["bubble"] == pytest.approx(busy)


def test_what_costs_nothing_takes_no_part():
    fast = dataclasses.replace(SYSTEM, host=Host(), network=Link(1e30, 0.0), node=Link(1e30, 0.0))
    untied = dataclasses.replace(MODEL, tied_embeddings=False)
    alone = pj.Workload(untied, minibatch=8)
    parts = pj.step_report(make_run(alone, fast), alone, fast).breakdown
    assert {x for x, part in parts.items() if part > 1e-12} == {"compute", "bubble", "optimizer"}


def test_ops_are_the_sum_of_their_parts():
    table = build("zb-h1")
    whole, parts = pj.stage_costs(ZERO_3, SYSTEM, table), stage_parts(ZERO_3, SYSTEM, table)
    for letter in "FBIWR":
        field = PHASE_FIELDS[letter]
        result = sum(np.asarray(getattr(part, field)) for part in parts.values())
        np.testing.assert_allclose(result, np.asarray(getattr(whole, field)), rtol=1e-12)


def test_model_flop_is_the_published_count():
    gpt = pj.load_model("gpt3-175b")
    h, s, v, layers = 12288, 2048, 51200, 96
    published = 72 * 64 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert model_flop(gpt, 64) == pytest.approx(published)
    fused = dataclasses.replace(gpt, flash_attention=True)  # computes scores twice
    assert model_flop(fused, 64) == pytest.approx(published)


def test_a_layer_of_further_prediction_needs_its_flop_too():
    """One layer more, a product of two inputs with h columns, and the output head once more."""
    with_it, without = map(pj.load_model, ("deepseek-v3-mtp", "deepseek-v3"))
    tokens = 64 * without.sequence
    layer = layer_flop(without, 64, kind="moe").forward
    products = 2 * tokens * (2 * 7168 * 7168 + 7168 * 129280)
    result = model_flop(with_it, 64) - model_flop(without, 64)
    assert result == pytest.approx(3 * (layer + products))


def test_mfu_tokens_price_and_bands():
    run = make_run()
    report = pj.step_report(run, WORKLOAD, SYSTEM)
    step, tokens = run.step_time, 8 * 4 * MODEL.sequence
    assert report.accelerators == 4 * 2 * 2 * 4
    assert report.mfu == pytest.approx(model_flop(MODEL, 32) / step / 64 / 989e12)
    assert report.flops_per_accelerator == pytest.approx(report.mfu * 989e12)
    assert report.tokens_per_second == pytest.approx(tokens / step)
    assert report.cost_per_step == pytest.approx(2.0 / 3600 * 64 * step)
    assert report.cost_per_token == pytest.approx(report.cost_per_step / tokens)
    assert report.bands == {
        "80": pytest.approx((0.9 * step, 1.2 * step)),
        "90": pytest.approx((0.8 * step, 1.3 * step)),
    }
    plain = dataclasses.replace(SYSTEM, price=0.0, calibration=None)
    report = pj.step_report(run, WORKLOAD, plain)
    assert (report.cost_per_step, report.cost_per_token, report.bands) == (None, None, {})


@pytest.mark.parametrize("gradient_bytes", [None, 4])  # wider ones need a buffer of their own
def test_memory_is_the_sum_of_its_parts(gradient_bytes):
    model = dataclasses.replace(ZERO_3.model, gradient_bytes=gradient_bytes)
    workload = dataclasses.replace(ZERO_3, model=model)
    parts, memory = static_parts(workload, build()), stage_bytes(workload, build())
    assert set(parts) == {"parameters", "gradients", "optimizer", "buffers"}
    np.testing.assert_allclose(sum(parts.values()), memory.static)
    assert min(part.min() for part in parts.values()) > 0


def test_offloads_take_what_the_host_link_takes():
    table = build("pipe-offload")
    costs = pj.stage_costs(WORKLOAD, SYSTEM, table)
    size = np.asarray(stage_bytes(WORKLOAD, table).activations)
    np.testing.assert_allclose(np.asarray(costs.offload), 1e-5 + size / 40e9)
    run = pj.evaluate(table, costs)
    slow = dataclasses.replace(SYSTEM, host_link=Link(1e9, 1e-5))
    longer = make_run(WORKLOAD, slow, table)
    assert longer.makespan > run.makespan
    parts = pj.step_report(longer, WORKLOAD, slow).breakdown
    assert parts["offloads"] > 0
    assert sum(parts.values()) == pytest.approx(longer.step_time, rel=1e-12)


ONE = "--schedule", "1f1b", "--workers", 4, "--microbatches", 8
GIVEN = (
    *ONE,
    *shlex.split("--model gpt-22b --system h100 --minibatch 8 --tensor-parallel 2 --zero 1"),
    *shlex.split("--context-parallel 2 --data-parallel 4 --embedding-units 1 --loss-units 1"),
    *shlex.split("--rank-order tp-pp-dp --overlap 1 --scatter-gather"),
)


def test_options_are_fields_of_the_workload(answer, call):
    result = answer("evaluate", *GIVEN)
    more = {"scatter_gather": True, "overlap": True, "rank_order": "tp-pp-dp"}
    workload = dataclasses.replace(WORKLOAD, model=pj.load_model("gpt-22b"), **more)
    run = make_run(workload, pj.load_system("h100"))
    report = pj.step_report(run, workload, pj.load_system("h100"))
    for name in ("step_time", "mfu", "tokens_per_second", "accelerators", "precision"):
        assert result[name] == getattr(report, name)
    assert result["breakdown"] == report.breakdown
    needs = np.sum(list(result["memory_parts"].values()), axis=0)
    reserve = result["memory_parts"].get("reserve", [0.0])[0]
    np.testing.assert_allclose(needs - reserve, result["memory_bytes"])
    _, text, _ = call("evaluate", *GIVEN)
    texts = "MFU", "of the bf16 peak", "64 accelerators", "bubble"
    for words in (*texts, "that tensors can use: parameters"):
        assert words in text
    (row,) = answer("compare", "--schedules", "1f1b", *GIVEN[2:])["rows"]
    assert (row["mfu"], row["breakdown"]) == (result["mfu"], result["breakdown"])
