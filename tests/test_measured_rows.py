"""Measured rows: what a CSV file says is kept, defaults are said, mistakes are named."""

import csv
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.base.progress import Notice
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.measured.measured_rows import COLUMNS, OPS
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import DATA

GIVEN = json.loads((Path(__file__).parent / "data" / "mistakes.json").read_text())["measured"]


def write(tmp_path, *rows):
    path = tmp_path / "rows.csv"
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_row_keeps_what_it_says(tmp_path):
    rows = read_rows(write(tmp_path, GIVEN, {**GIVEN, "tensor": "4"}))
    assert (len(rows), len(rows.models)) == (2, 1)
    assert list(rows.tensor) == [8, 4]
    assert list(rows.microbatches) == [128 // (2 * 2)] * 2
    assert list(rows.accelerators) == [8 * 2 * 8, 4 * 2 * 8]
    assert (rows.seconds[0], rows.recompute[0]) == (18.13, "full")
    assert rows.schedule[0] == "interleaved-1f1b"
    assert np.isnan(rows.memory_bytes).all()
    assert list(rows.row) == [1, 2]
    assert list(rows.column("layers")) == [96, 96]
    assert list(rows.take(rows.tensor == 4).row) == [2]


def test_sizes_change_those_of_a_named_model(tmp_path):
    sizes = {"model": "llama3-70b", "layers": "24", "sequence": "32768"}
    rows = read_rows(write(tmp_path, GIVEN | sizes))
    model = rows.models[0]
    assert (model.layers, model.sequence, model.kv_heads, model.gated_mlp) == (24, 32768, 8, True)


def test_rows_without_a_model_are_gpts(tmp_path):
    sizes = {"layers": "24", "hidden": "1024", "heads": "16", "sequence": "512"}
    row = sizes | {name: text for name, text in GIVEN.items() if name != "model"}
    with pytest.warns(Notice, match="kv_heads = heads; ffn = 4 hidden; vocabulary = 51200"):
        rows = read_rows(write(tmp_path, row))
    model = rows.models[0]
    assert (model.kv_heads, model.ffn_hidden, model.vocabulary) == (16, 4096, 51200)
    assert (model.gated_mlp, model.tied_embeddings) == (False, True)


MIXTURE = {"expert": "4", "expert_tensor": "1", "experts": "8", "top_k": "2"}


def test_experts_are_those_of_the_model_or_as_wide_as_its_mlp(tmp_path):
    row = {**GIVEN, "model": "deepseek-v3", "layers": "24", "expert": "16", "experts": "128"}
    with pytest.raises(ValueError, match="row 1: expert_tensor must divide tensor x context"):
        read_rows(write(tmp_path, row))  # as many as tensor if not given
    row["expert_tensor"] = "1"
    rows = read_rows(write(tmp_path, row | {"dense_layers": "1", "capacity_factor": "1.25"}))
    moe = rows.models[0].moe
    assert (moe.experts, moe.top_k, moe.expert_hidden, moe.dense_layers) == (128, 8, 2048, 1)
    assert (rows.column("experts")[0], rows.column("capacity_factor")[0]) == (128, 1.25)
    more = {"gradient_bytes": "4", "fused_loss": "1"}
    model = read_rows(write(tmp_path, GIVEN | more)).models[0]
    assert (model.gradient_bytes, model.fused_loss, model.moe) == (4, True, None)
    rows = read_rows(write(tmp_path, {**GIVEN, **MIXTURE}))
    moe = rows.models[0].moe
    assert (moe.experts, moe.top_k, moe.expert_hidden) == (8, 2, 4 * 12288)
    assert read_rows(write(tmp_path, {**GIVEN, "experts": "0"})).models[0].moe is None


def test_attention_is_fused_below_16_bits(tmp_path):
    fp8 = {**GIVEN, "precision": "fp8"}
    model = read_rows(write(tmp_path, fp8)).models[0]
    assert (model.flash_attention, model.dropout) == (True, False)
    rows = read_rows(write(tmp_path, fp8 | {"flash_attention": "0", "dropout": "1"}))
    assert (rows.column("flash_attention")[0], rows.column("dropout")[0]) == (0, 1)
    model = read_rows(write(tmp_path, GIVEN)).models[0]
    assert (model.flash_attention, model.dropout) == (False, True)


def test_defaults_are_said(tmp_path):
    row = {"model": "gpt-22b", "tensor": "8", "global_batch": "4", "seconds": "1.42"}
    with pytest.warns(Notice) as message:
        rows = read_rows(write(tmp_path, row))
    assert "rows without a software stack: 1 (first: row 1)" in str(message[0].message)
    assert "data = 1" in str(message[1].message)
    assert "sequence_parallel = 1 where tensor > 1" in str(message[1].message)
    assert "tensor =" not in str(message[1].message).replace("tensor > 1", "")
    assert (rows.schedule[0], rows.sequence_parallel[0], rows.zero[0]) == ("1f1b", 1, 0)
    row |= {"stack": "megatron-lm-2021"}
    with pytest.warns(Notice, match="schedule = 1f1b"):  # overlap as its stack says
        assert read_rows(write(tmp_path, row | {"zero": "1"})).overlap[0] == Workload.overlap


def test_replicas_follow_from_the_accelerators(tmp_path):
    row = {name: text for name, text in GIVEN.items() if name != "data"}
    assert read_rows(write(tmp_path, row | {"accelerators": "128"})).data[0] == 2


@pytest.mark.parametrize("column", ["memory_bytes", "node_bandwidth", "network_bandwidth"])
def test_gigabytes_are_no_bytes(tmp_path, column):
    assert getattr(read_rows(write(tmp_path, {**GIVEN, column: "60e9"})), column)[0] == 60e9


def test_accelerators_are_as_many_as_the_degrees_say(tmp_path):
    row = {name: text for name, text in GIVEN.items() if name != "data"}
    with pytest.raises(ValueError, match="multiple of tensor x context x pipeline, 64, got 96"):
        read_rows(write(tmp_path, row | {"accelerators": "96"}))


def test_the_docs_tell_of_every_column():
    text = (Path(__file__).parents[1] / "docs" / "measured_rows.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(" ".join(cells).replace("`", "").replace(",", " ").split()) == sorted(COLUMNS)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_measured_bandwidth_within_a_node_carries_the_exchanges_of_tensor_parallelism(
    tmp_path, tensor
):
    """A layer sums its activations four times; a ring sends 2 (t - 1) / t of them each time."""
    shape = {"hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384, "vocabulary": 51200}
    job = {"sequence": 2048, "tensor": tensor, "context": 1, "expert": 1, "data": 1, "pipeline": 1}
    job |= {"stages_per_worker": 1, "microbatch_size": 1, "global_batch": 1, "zero": 0}
    job |= {"sequence_parallel": 0, "accelerators": tensor, "schedule": "1f1b", "system": "a100"}
    job |= {"recompute": "none", "precision": "bf16", "tensor_overlap": 0, "seconds": 1}
    job |= {"stack": "megatron-lm-2021", "accelerators_per_node": 8, "dropout": 0}
    job |= {"embedding_units": 0, "loss_units": 0, "flash_attention": 1}
    rows = [
        {key: str(value) for key, value in ({"layers": layers} | shape | job | rate).items()}
        for layers in (1, 2)
        for rate in ({"node_bandwidth": 1e9}, {"node_bandwidth": 2e9})
    ]
    seconds = pj.validate(write(tmp_path, *rows)).predicted.seconds.reshape(2, 2)
    slower = (seconds[1] - seconds[0]) @ [1, -1]  # what a layer takes more at half the rate
    sent = 4 * 2 * (tensor - 1) / tensor * 2048 * 4096 * 2
    assert slower == pytest.approx(sent / 1e9 - sent / 2e9, rel=1e-3)


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_cells_are_parted_as_the_header_has_them(mark, tmp_path):
    # a line of empty cells, as spreadsheets write it, is no row
    lines = [["model", "tensor", "global_batch", "seconds"], ["gpt-22b", "8", "4", "0.6"], [""] * 4]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(map(mark.join, lines)) + "\n")
    rows = read_rows(path)
    assert (rows.seconds.tolist(), rows.tensor.tolist()) == ([0.6], [8])
    costs = tmp_path / "costs.csv"
    costs.write_text("\n".join(map(mark.join, (("stage", "F_ms", "B_ms"), "012", "134"))))
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
    # stage 0: F 1, B 2; stage 1: F 3, B 4 [ms]
    assert pj.evaluate(table, pj.read_costs(costs, table)).makespan == pytest.approx(0.010)


@with_cases("cells seconds", *read_cases("decimal commas"))
@pytest.mark.parametrize("form", ["stage;F_ms;B_ms\n0;{};{}\n", 'stage,F_ms,B_ms\n0,"{}","{}"\n'])
def test_numbers_may_have_decimal_commas_where_these_are_no_thousands(
    form, cells, seconds, tmp_path
):
    costs = tmp_path / "costs.csv"
    costs.write_text(form.format(*cells))
    table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=1)
    if seconds is None:
        with pytest.raises(ValueError, match="F_ms must be a number of at least 0, got"):
            pj.read_costs(costs, table)
    else:
        times = pj.evaluate(table, pj.read_costs(costs, table))
        assert times.makespan == pytest.approx(seconds)


# The measured tables that come with pipejax: all rows are there, and every one says all it needs

MEASURED = DATA / "measured"
# rows, and the sum of their seconds
TABLES = json.loads((Path(__file__).parent / "data" / "measured_tables.json").read_text())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_whole_and_leaves_nothing_to_defaults(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = read_rows(MEASURED / f"{name}.csv")
    assert {path.stem for path in MEASURED.glob("*.csv")} == set(TABLES)
    assert len(result) == TABLES[name]["rows"]
    assert np.nansum(result.seconds) == pytest.approx(TABLES[name]["seconds"], rel=1e-5)
    assert "" not in {*result.group, *result.source, *result.system}


def test_a_collective_table_has_latency_and_bandwidth():
    with (DATA / "collectives" / "nccl_all_reduce_a100.csv").open() as file:
        rows = [[row["ranks"], row["bytes"], row["seconds"]] for row in csv.DictReader(file)]
    ranks, volume, seconds = np.array(rows, float).T
    assert sorted(set(ranks)) == [*range(2, 9)]
    for n in range(2, 9):
        slope, _ = np.polyfit(volume[ranks == n], seconds[ranks == n], 1)
        assert 150e9 < 2 * (n - 1) / n / slope < 300e9, n  # NVLink has 300 GB/s each way


# Rows of profiles: seconds of one op on one stage, beside seconds of whole steps

HEADER = "model,tensor,pipeline,microbatch_size,op,stage,n,spread,seconds"
TRUTH = {"compute.efficiency": 0.62, "memory.efficiency": 0.55}


@pytest.fixture(scope="module")
def a100():
    return pj.load_system("a100")


def write_profile(path, rows, header=HEADER):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def read(path):
    with pytest.warns():
        return read_rows(path)


def profile(sizes=(1, 4), tensors=(2, 8), ops=OPS, stages=(0, 1, 3)):
    return [
        ("gpt-22b", t, 4, b, op, stage, 20, 1e-5, 1.0)
        for t in tensors
        for b in sizes
        for op in ops
        for stage in stages
    ]


def test_ops_take_what_stage_costs_say(a100, tmp_path):
    rows = read(write_profile(tmp_path / "x.csv", profile()))
    seconds = StepTimes(rows).predict(a100)
    for k in range(len(rows)):
        size = int(rows.microbatch_size[k])
        table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
        split = {"tensor_parallel": int(rows.tensor[k]), "sequence_parallel": True}
        workload = pj.Workload(pj.load_model("gpt-22b"), 4 * size, **split, scatter_gather=True)
        costs = pj.stage_costs(workload, a100, table)
        expected = getattr(costs, PHASE_FIELDS[str(rows.op[k])])[rows.stage[k]]
        assert seconds[k] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_profile_finds_the_numbers_that_made_it(a100, tmp_path):
    machine = a100 = a100.with_number("host.launch", 5e-6)
    for name, value in TRUTH.items():
        machine = machine.with_number(name, value)
    steps = [("gpt-22b", t, 4, b, "step", "", "", "", 1.0) for t, b in ((2, 1), (8, 4))]
    lines = [*profile(sizes=(1, 2, 4)), *steps]
    header = HEADER + ",global_batch"
    shapes = [(*line, 8 * line[3]) for line in lines]
    rows = read(write_profile(tmp_path / "x.csv", shapes, header))
    assert rows.op.tolist()[-2:] == ["step", "step"]
    noisy = StepTimes(rows).predict(machine)
    noisy *= np.exp(0.002 * np.random.default_rng(1).standard_normal(len(rows)))
    timed = [(*s[:8], seconds, s[9]) for s, seconds in zip(shapes, noisy, strict=True)]
    rows = read(write_profile(tmp_path / "y.csv", timed, header))
    result = pj.calibrate(rows, a100, fit=(*TRUTH, "host.launch"))
    assert not result.parameters["host.launch"].identified  # the device is behind in every op
    for name, value in TRUTH.items():
        number = result.parameters[name]
        assert abs(number.value - value) < 4 * number.standard_error, name
        assert number.value == pytest.approx(value, rel=0.05), name
    assert result.fit.mape < 1


@pytest.mark.slow
def test_ops_that_spread_count_less(a100, tmp_path):
    """Every op is listed once more as a fifth longer, from one look with a large spread."""
    exact = StepTimes(read(write_profile(tmp_path / "x.csv", profile()))).predict(a100)
    sure = [(*row[:8], s) for row, s in zip(profile(), exact, strict=True)]
    unsure = [(*row[:6], 1, 20 * s, 1.2 * s) for row, s in zip(profile(), exact, strict=True)]
    rows = read(write_profile(tmp_path / "y.csv", [*sure, *unsure]))
    share = a100.compute_efficiency.shares[0]
    result = pj.calibrate(rows, a100, fit=("compute.efficiency",))
    assert result.parameters["compute.efficiency"].value == pytest.approx(share, rel=0.02)
    alike = rows.with_columns(variance=np.zeros(len(rows)))
    pulled = pj.calibrate(alike, a100, fit=("compute.efficiency",))
    assert pulled.parameters["compute.efficiency"].value < 0.95 * share


@with_cases("cells message", *read_cases("mistakes in measured rows"))
def test_mistakes_are_named(cells, message, tmp_path):
    lines = [("gpt-22b", 8, 4, 1, cells, 0.1, 8)]
    path = write_profile(tmp_path / "x.csv", lines, HEADER + ",global_batch")
    with pytest.raises(ValueError, match=f"row 1: {message}"):
        read_rows(path)
