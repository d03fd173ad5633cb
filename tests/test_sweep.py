"""Sweeps: the numbers against single evaluations, and mistakes in what is declared."""

import dataclasses
import random
import re

import numpy as np
import pytest
from legal_sizes import build
from sweep_cases import GRID, TOML, declare, refused, write_grid

import pipejax as pj
from pipejax.analysis.uncertainty.sensitivity import RESOURCES
from pipejax.cli.app import run
from pipejax.sweep import STATUS, read_sweep, run_sweep
from pipejax.sweep.declaration import read_system_axes
from pipejax.sweep.outputs import OUTPUTS, SweepOutput
from pipejax.sweep.results import read_results
from pipejax.sweep.store import get_block, num_blocks


@pytest.fixture(scope="module")
def declared(tmp_path_factory):
    return declare(tmp_path_factory.mktemp("declared"))


@pytest.fixture(scope="module")
def data(declared, tmp_path_factory):
    return run_sweep(declared, tmp_path_factory.mktemp("out") / "out.zarr").load()


def test_axes_and_units(data):
    assert dict(data.step_time.sizes) == {
        "schedule": 3,
        "model": 2,
        "microbatch_size": 3,
        "recompute": 2,
        "system": 2,
        "node.gpus": 2,
        "network.bandwidth": 3,
        "memory.capacity": 2,
        "compute.efficiency": 1,
    }
    np.testing.assert_allclose(data["network.bandwidth"], [1e9, 1e10, 1e11])
    assert data["network.bandwidth"].attrs["units"] == "B/s"
    assert data.step_time.attrs["units"] == "s"
    assert [*data.schedule.values] == ["gpipe", "chimera", "interleaved-1f1b stages_per_worker=2"]
    assert int(data.workers) == 2
    assert str(data.link.values) == "delay"
    for key in ("pipejax", "jax", "commit", "code", "grid", "dtype", "title"):
        assert data.attrs[key]
    assert data.status.dtype == np.int8
    assert data.status.attrs["flag_meanings"].split() == [s.replace(" ", "_") for s in STATUS]


def test_points_are_single_evaluations(data):
    rng = random.Random(1)
    names = {
        "gpipe": ("gpipe", {}),
        "chimera": ("chimera", {}),
        "interleaved-1f1b stages_per_worker=2": ("interleaved-1f1b", {"stages_per_worker": 2}),
    }
    stacked = data.stack(point=data.step_time.dims)
    legal = np.flatnonzero(stacked.status != STATUS.index("illegal"))
    for number in rng.sample(legal.tolist(), 12):
        at = stacked.isel(point=number)
        name, options = names[str(at.schedule.values)]
        table = build(name, 2, 8 // int(at.microbatch_size), **options)
        workload = pj.Workload(
            pj.load_model(str(at.model.values)),
            8,
            tensor_parallel=2,
            recompute=str(at.recompute.values),
        )
        system = make_system(at)
        costs = pj.stage_costs(workload, system, table)
        result = pj.evaluate(table, costs)
        assert float(at.step_time) == result.makespan
        assert float(at.bubble_ratio) == pytest.approx(result.bubble_ratio, rel=1e-9)
        tokens = 8 * workload.model.sequence
        assert float(at.tokens_per_second) == pytest.approx(tokens / result.makespan, rel=1e-12)
        per_accelerator = float(at.tokens_per_second_per_gpu)  # of 2 workers of 2
        assert per_accelerator == pytest.approx(float(at.tokens_per_second) / 4, rel=1e-12)
        need = pj.memory_bytes(workload, table).max()
        assert float(at.memory_bytes) == need
        fits = need <= system.memory_available
        assert STATUS[int(at.status)] == ("feasible" if fits else "out of memory")
        assert float(at.share.sum()) == pytest.approx(1, abs=1e-5)
        assert int(at.bound_by) == int(at.share.argmax("resource"))
    answer = pj.sensitivity(table, workload, system)
    np.testing.assert_allclose(at.share, list(answer.share.values()), atol=1e-6)
    assert RESOURCES[int(at.bound_by)] == answer.bound_by


def test_an_optimizer_on_the_host_needs_one_that_is_known(tmp_path):
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatch_size": 1}
    grid |= {"models": "gpt-22b", "optimizer_offload": [0.0, 0.5]}
    data = run_sweep({**grid, "systems": "h100"}, tmp_path / "x.zarr")
    assert data.step_time[1] > data.step_time[0]
    assert data.memory_bytes[1] < data.memory_bytes[0]
    data = run_sweep({**grid, "systems": ["mi300x", "h100"]}, tmp_path / "y.zarr").load()
    assert data.step_time.isnull().values.tolist() == [[False, False], [True, False]]
    assert re.search("must be 0 .*host: memory_bandwidth", str(data.reason[1].values))


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])  # v-half is planned for each system
def test_systems_without_the_peak_of_a_precision_are_illegal(schedule, tmp_path):
    grid = {"schedules": schedule, "workers": 2, "minibatch": 4, "microbatch_size": 1}
    grid |= {"models": "gpt-22b", "precision": ["bf16", "nvfp4"], "systems": ["h100", "b200"]}
    data = run_sweep(grid, tmp_path / "x.zarr").load()
    illegal = data.status == STATUS.index("illegal")
    assert illegal.values.ravel().tolist() == [False, False, True, False]
    assert (illegal == data.step_time.isnull()).all()
    assert "no peak is known for precision 'nvfp4'" in str(data.reason.values.ravel()[1])
    frame = read_results(tmp_path / "x.zarr").frame(np.arange(4))  # b200 has no reason
    assert [text != "" for text in frame.reason] == [False, False, True, False]


@pytest.mark.parametrize(
    ("axes", "illegal", "reason"),
    [  # illegal: of the points in the order of the axes
        (
            {"models": ["llama3-8b", "mixtral-8x7b"], "expert_parallel": [1, 2]},
            [False, True, False, False],
            "expert_parallel 2: llama3-8b has no experts",
        ),
        (
            {"tensor_parallel": 2, "expert_tensor_parallel": [0, 1, 2]},
            [False, False, True],
            "expert_tensor_parallel 2: gpt-22b has no experts",
        ),
        (
            {"models": ["gpt-22b", "mixtral-8x7b"], "dispatcher": ["all-to-all", "per-node"]},
            [False, True, False, False],
            "dispatcher per-node: gpt-22b has no experts",
        ),
        # those of a stack that a model cannot have are not its own
        ({"models": ["gpt-22b", "mixtral-8x7b"], "stack": "megatron-core-2026"}, [False] * 2, ""),
        (
            {"recompute": ["none", "full"], "recompute_layers": [0, 3]},
            [False, False, True, False],  # the dataset has the layers first
            "recompute_layers 3 needs recompute 'full', got 'none'",
        ),
    ],
)
def test_settings_that_the_command_line_refuses_are_illegal(axes, illegal, reason, tmp_path):
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatch_size": 1}
    grid |= {"models": "gpt-22b", "systems": "h100", "data_parallel": 4}
    data = run_sweep(grid | axes, tmp_path / "x.zarr").load()
    assert [*(data.status.values.ravel() == STATUS.index("illegal"))] == illegal
    assert [text != "" for text in data.reason.values.ravel()] == illegal
    assert any(text.startswith(reason) for text in data.reason.values.ravel().tolist())


@pytest.mark.parametrize(
    ("model", "recompute", "missing"),
    [
        ("llama3-8b", ["mla_up_proj", "mlp"], "mla_up_proj"),
        ("mixtral-8x7b", ["shared_experts", "moe"], "shared_experts"),
        ("mixtral-8x7b", ["layernorm+mlp", "layernorm"], "mlp"),
        ("gpt-22b", ["core_attn+moe_act", "core_attn"], "moe_act"),
    ],
)
def test_recomputed_parts_that_a_model_lacks_are_illegal(model, recompute, missing, tmp_path):
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatch_size": 1}
    grid |= {"models": model, "systems": "h100", "recompute": recompute}
    data = run_sweep(grid, tmp_path / "x.zarr").load()
    assert [*(data.status.values.ravel() == STATUS.index("illegal"))] == [True, False]
    assert f"{model} has no {missing}; known are" in str(data.reason.values.ravel()[0])


def test_link_options_without_effect_are_illegal(tmp_path):
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatch_size": 1}
    grid |= {"models": "gpt-22b", "systems": "h100", "link": ["delay", "queued"]}
    data = run_sweep({**grid, "shared_links": ["", "pairs"]}, tmp_path / "x.zarr").load()
    assert (data.status == STATUS.index("illegal")).values.ravel().sum() == 1
    assert "shared_links need the link model" in "".join(data.reason.values.ravel().tolist())


def make_system(at):
    system = pj.load_system(str(at.system.values))
    for name in ("network.bandwidth", "memory.capacity", "compute.efficiency"):
        system = system.with_number(name, float(at[name]))
    return dataclasses.replace(system, gpus_per_node=int(at["node.gpus"]))


def test_illegal_points_say_why(data):
    reasons = data.reason.isel(model=0, recompute=0)
    assert str(reasons.sel(schedule="gpipe", microbatch_size=3).values) == (
        "microbatch size 3 does not divide a minibatch of 8"
    )
    assert "even number of microbatches" in str(
        reasons.sel(schedule="chimera", microbatch_size=8).values
    )
    illegal = data.status == STATUS.index("illegal")
    assert (illegal == data.step_time.isnull()).all()
    assert (illegal == (data.bound_by == -1)).all()
    assert (
        illegal.any([d for d in illegal.dims if d not in data.reason.dims]) == (data.reason != "")
    ).all()
    assert set(np.unique(data.status)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("model", "axis", "degrees", "divided"),
    [  # divided: numbers of the model that the degree must divide
        ("llama3-8b", "tensor_parallel", [1, 3, 4, 5], 32),
        ("llama3-8b", "context_parallel", [2, 7, 3], 8192),
        ("mixtral-8x7b", "expert_parallel", [8, 3, 6], 8),
        ("gpt-22b", "tensor_parallel", [8, 6, 64, 48], 64),
    ],
)
def test_degrees_that_leave_unequal_parts_are_illegal(model, axis, degrees, divided, tmp_path):
    grid = {"schedules": "1f1b", "workers": 4, "microbatches": 8, "minibatch": 8}
    grid |= {"models": model, "systems": "h100", axis: degrees, "data_parallel": 24}
    data = run_sweep(grid, tmp_path / "out.zarr").load()
    legal = [divided % degree == 0 for degree in degrees]
    assert [*(data.status.values.ravel() != STATUS.index("illegal"))] == legal
    text = f"-way {axis.split('_')[0]} parallelism does not divide {divided} "
    assert [text not in reason for reason in data.reason.values.ravel()] == legal


def test_what_is_wrong_and_not_illegal_ends_the_sweep_and_names_the_point(tmp_path, monkeypatch):
    grid = {**GRID, "schedules": ["1f1b", "pipe-offload"], "workers": [2, 8], "microbatch_size": 1}
    point = (
        "at schedule = pipe-offload, workers = 2, recompute = none: .* a system has no host_link"
    )
    with pytest.raises(ValueError, match=point):
        run_sweep(read_sweep(grid), tmp_path / "offloads.zarr")

    def broken(*arguments):
        raise ValueError("a bug of ours")

    monkeypatch.setattr("pipejax.sweep.run.memory_bytes", broken)
    with pytest.raises(
        ValueError, match=r"at schedule = 1f1b, workers = 2, recompute = none: a bug of ours"
    ):
        run_sweep(read_sweep(grid), tmp_path / "broken.zarr")


def test_an_output_may_use_numbers_of_the_systems(monkeypatch, tmp_path):
    cost = SweepOutput("USD", "price of a step", lambda runs: runs.systems.price * runs.step_time)
    monkeypatch.setitem(OUTPUTS, "cost", cost)
    prices = [1.0, 2.0]
    system = {"price": {"accelerator_USD_per_hour": [3600 * price for price in prices]}}
    grid = {**GRID, "workers": 2, "microbatch_size": 1, "system": system, "outputs": ["cost"]}
    data = run_sweep(read_sweep(grid), tmp_path / "run.nc").squeeze()
    np.testing.assert_allclose(data.cost, data.step_time * np.array(prices))


def test_float32_is_close(tmp_path):
    grid = {**GRID, "workers": 3, "microbatch_size": [1, 5, 12]}
    grid |= {"outputs": ["bubble_ratio", "bound_by", "share"]}
    exact, short = (
        run_sweep({**grid, "dtype": d}, tmp_path / d).load() for d in ("float64", "float32")
    )
    np.testing.assert_allclose(short.share, exact.share, atol=1e-4)
    assert short.step_time.dtype == np.float32
    np.testing.assert_allclose(short.step_time, exact.step_time, rtol=1e-5)


def test_blocks_cover_the_grid_once():
    grid = {
        **GRID,
        "system": {
            "network": {"bandwidth_GB_per_s": {"from": 1, "to": 9, "points": 700}},
            "node": {"bandwidth_GB_per_s": {"from": 1, "to": 9, "points": 333}},
        },
    }
    sweep = read_sweep(grid)
    seen = np.zeros([len(axis.values) for axis in sweep.axes], int)
    for number in range(num_blocks(sweep)):
        seen[get_block(sweep, number).cuts] += 1
    assert (seen == 1).all()


WRONG = {
    "node: unknown key 'cpus': known are": ("node.gpus", "node.cpus"),
    "unknown key 'bandwidth_us'": ("bandwidth_GB_per_s", "bandwidth_us"),
    "key 'bandwidth' has no unit: expected": ("bandwidth_GB_per_s", "bandwidth"),
    "capacity_GB is empty": ("[200, 4000]", "[]"),
    "workers must be a whole number of at least 1, got -2": ("workers = 2", "workers = -2"),
    "capacity_GB must be a number above 0, got -1": ("[200, 4000]", "[-1]"),
    "capacity_GB must be a number above 0, got 'a'": ("[200, 4000]", '["a"]'),
    "capacity_GB must be a number above 0, got nan": ("[200, 4000]", "[nan]"),
    "efficiency must be a number above 0 and at most 1, got 1.5": ("[0.5]", "[1.5]"),
    "unknown schedule 'gpip': known are gpipe": ('"gpipe"', '"gpip"'),
    "models: unknown model 'gpt-23b'": ('"gpt-22b"', '"gpt-23b"'),
    "systems: unknown system 'h1'": ('"h100"', '"h1"'),
    "unknown recompute 'half': known are none, selective, full": ('"full"', '"half"'),
    "outputs must be one of bubble_ratio": ('"share"', '"shares"'),
    "points must be a whole number of at least 1": ("points = 3", "points = 0"),
    "points must be at most 1000000": ("points = 3", "points = 1_000_000_000"),
    "system: node must be an object with the keys": ("node.gpus = [2, 8]", "node = 3"),
    "workers must be at most 1000000000": ("workers = 2", "workers = 1" + "0" * 25),
    "capacity_GB must be from 1e-15 to 1e+24 B, got 1e-300": ("[200, 4000]", "[1e-300]"),
    "is not TOML": ("workers = 2", "workers = " + "[" * 5000 + "]" * 5000),
    "schedules holds chimera twice": ('"gpipe"', '"chimera"'),
    "systems holds h100 twice": ('"slow_nw_mid_cp"', '"h100"'),
    "gpus must be a whole number of at least 1, got True": ("[2, 8]", "[true]"),
    "scale must be one of linear, log": ('"log"', '"cubic"'),
    "one point cannot reach": ("points = 3", "points = 1"),
    "workers is missing": ("workers = 2\n", ""),
    "unknown key 'minibatch_size'": ("microbatch_size", "minibatch_size"),
    "not TOML": ("workers = 2", "workers ="),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_files(message, declared, tmp_path, capsys):
    old, new = WRONG[message]
    assert old in TOML
    path, out = tmp_path / "wrong.toml", tmp_path / "out.zarr"
    path.write_text(TOML.replace(old, new, 1))
    assert run(["sweep", "run", str(path), "--out", str(out), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert re.fullmatch("error: .+\\n(hint: .+\\n)?", printed.err)
    assert message in printed.err
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid_file"))


def test_a_scheduler_that_is_not_there_is_named(grid_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipejax.sweep.run.SCHEDULER_TIMEOUT", 0.5)
    address = "tcp://127.0.0.1:9"
    text = refused(capsys, grid_file, "--out", tmp_path / "o.zarr", "--scheduler", address)
    assert f"no scheduler answers at '{address}'" in text


def test_a_missing_file_is_named(tmp_path, capsys):
    assert "none.toml" in refused(capsys, tmp_path / "none.toml", "--out", tmp_path / "o.zarr")


def test_system_axes_in_every_unit():
    axes = read_system_axes(
        {
            "network": {"latency_us": [1, 2]},
            "compute": {"peak_PFLOP_per_s": {"from": 1, "to": 2, "points": 2}},
        },
        "system",
    )
    assert [(axis.name, axis.unit) for axis in axes] == [
        ("network.latency", "s"),
        ("compute.peak", "FLOP/s"),
    ]
    np.testing.assert_allclose(axes[0].values, [1e-6, 2e-6])
    np.testing.assert_allclose(axes[1].values, [1e15, 2e15])
