"""The plan search: legal layouts, bounds that hold, and the optimum among all of them."""

import dataclasses
import re
import shlex

import jax
import numpy as np
import pytest
import strategies
from daily import daily, read_cases, with_cases
from hypothesis import assume, given

import pipejax as pj
from pipejax.analysis.step.validation import StepTimes
from pipejax.base.checks import as_tuple
from pipejax.cli.options.line import command_line, config_text
from pipejax.cli.options.scenario import scenario_options
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.model.launchers import LAUNCHERS
from pipejax.costs.model.workload_fields import RECOMPUTE
from pipejax.costs.system.parts import RESOURCES, system_number
from pipejax.schedules.table.held_activations import held_counts
from pipejax.search.calibration.calibrate import _names
from pipejax.sweep.plan import programs
from pipejax.sweep.plan.layouts import (
    SHARED,
    Layouts,
    PlanRequest,
    _launcher_refusals,
    enumerate_layouts,
    layout_workload,
    program_shape,
)
from pipejax.sweep.plan.programs import (
    Pipe,
    ProgramShape,
    build_table,
    count_activations,
    exact_times,
    lower_bounds,
)
from pipejax.sweep.plan.result import break_even_factors, layout_resource_shares
from pipejax.sweep.plan.search import price, row_groups

GPT, H100 = pj.load_model("gpt-22b"), pj.load_system("h100")
H100_NUMBERS = {name: float(system_number(H100, name)) for name in RESOURCES}
FEW = {"tensor": (2, 4), "microbatch_size": (1, 2), "zero": (0, 1), "recompute": ("none", "full")}
FEW |= {"edge_units": (0,), "stages_per_worker": (1, 3), "pipeline": (2,)}
SMALL = {"gpus": 8, "minibatch": 8, "choices": FEW, "headroom": 0.0}


@pytest.fixture(scope="module")
def small():
    return pj.plan(GPT, H100, **SMALL, front=True)


def one_by_one(request, layouts, row):
    """Step time and memory of a layout by `evaluate`, as any other command finds them."""
    table = build_table(program_shape(request, layouts, row), int(layouts.microbatches[row]))
    workload = layout_workload(request, layouts, row)
    costs = pj.stage_costs(workload, request.system, table)
    return pj.evaluate(table, costs).step_time, pj.memory_bytes(workload, table).max()


def test_an_error_lists_the_fields_that_all_layouts_share():
    with pytest.raises(ValueError, match="hidden_size") as error:
        pj.plan("gpt-22b", "a100", gpus=8, minibatch=8, hidden_size=3)
    assert all(name in str(error.value) for name in SHARED)


def test_one_value_is_a_list_of_one():
    single = {"schedules": "1f1b", "choices": {"tensor": 4, "recompute": "selective"}}
    lists = {"schedules": ["1f1b"], "choices": {"tensor": [4], "recompute": ["selective"]}}
    plans = [pj.plan("gpt-22b", "h100", gpus=8, minibatch=8, **names) for names in (single, lists)]
    assert plans[0].best.layout == plans[1].best.layout
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=2.0)
    first, second = (pj.explain(table, costs, schedules=name) for name in ("zb-h1", ["zb-h1"]))
    assert repr(first.remedies) == repr(second.remedies)
    assert _names("all") == _names(["all"]) == _names(None)
    assert as_tuple(np.array([1, 2])) == (1, 2)


def test_the_best_is_that_of_brute_force(small):
    request, layouts = small.request, small.layouts
    times, memory = np.array([one_by_one(request, layouts, k) for k in range(len(layouts))]).T
    np.testing.assert_allclose(small.estimates.memory_bytes, memory, rtol=1e-12)
    fits = memory <= H100.memory_available
    assert small.fitting == fits.sum() < small.enumerated == len(layouts)
    ideas, axes = {}, [layouts.tensor, layouts.pipeline, layouts.expert, layouts.zero >= 3]
    for k in np.flatnonzero(fits):
        ideas.setdefault(tuple(axis[k] for axis in axes), []).append(times[k])
    shortest = sorted(map(sorted, ideas.values()))[: 1 + len(small.runners_up)]
    for layout, same in zip((small.best, *small.runners_up), shortest, strict=True):
        ties = [time for time in same if time <= 1.01 * same[0]]
        result = [layout.step_time, *(tie["step_time"] for tie in layout.also)]
        np.testing.assert_allclose(result, ties, rtol=1e-12)
    assert (small.estimates.lower_bound <= times * (1 + 1e-9)).all()
    assert small.evaluated < small.fitting  # some were left out, and rightly so
    front = [
        not any(fits & (memory <= memory[k]) & (times < times[k] * (1 - 1e-12)))
        and not any(fits & (memory < memory[k]) & (times <= times[k] * (1 - 1e-12)))
        for k in np.flatnonzero(small.front)
    ]
    assert all(front)
    for k in np.flatnonzero(fits):  # every layout is reached by a point of the front
        reached = (memory[small.front] <= memory[k]) & (times[small.front] <= times[k] * (1 + 1e-9))
        assert reached.any()


TIED = dataclasses.replace(GPT, layers=12, tied_embeddings=True)
WIDE = {"precision": "fp8", "wide_first": 1, "wide_last": 2}


@with_cases(
    "model schedules shared",
    (TIED, ("1f1b", "chimera", "interleaved-1f1b"), {}),
    (pj.load_model("deepseek-v3-mtp"), ("1f1b", "dualpipe-v"), {}),
    (pj.load_model("deepseek-v3"), ("1f1b", "interleaved-1f1b"), WIDE),
    (pj.load_model("llama3-8b"), ("interleaved-1f1b", "zb-h1"), WIDE),
    (pj.load_model("mixtral-8x7b"), ("1f1b", "dualpipe"), {}),
)
def test_stages_of_one_class_have_the_costs_of_each_of_them(model, schedules, shared):
    """Layouts are priced by classes of stages; `stage_costs` prices every stage of one layout."""
    choices = {"tensor": (1, 8), "pipeline": (2, 4, 8), "stages_per_worker": (1, 2, 3)}
    request = PlanRequest(model, H100, 64, 64, schedules, choices, shared=shared)
    layouts = enumerate_layouts(request)
    rng = np.random.default_rng(0)
    couples = np.isin(schedules, ("chimera", "dualpipe"))
    has_two_pipes = couples[layouts.schedule]
    for rows in row_groups((has_two_pipes, layouts.stages)):  # of several shapes
        few = layouts.take(rng.choice(rows, min(24, len(rows)), replace=False))
        priced = price(request, few)
        for k, microbatches in enumerate(few.microbatches.tolist()):
            table = build_table(program_shape(request, few, k), microbatches)
            workload = layout_workload(request, few, k)
            expected = vars(pj.stage_costs(workload, H100, table))
            for name, leaf in vars(priced.costs).items():
                if expected[name] is not None and leaf is not None and np.ndim(leaf):
                    np.testing.assert_allclose(
                        np.broadcast_to(leaf[k], np.shape(expected[name])),
                        expected[name],
                        rtol=1e-12,
                        err_msg=name,
                    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_a_launcher_refuses_the_layouts_that_it_refuses_one_by_one(model, launcher):
    """All layouts that a launcher would refuse by itself are left out, and no others."""
    choices = {"tensor": (1, 2, 4), "pipeline": (1, 2, 4), "microbatch_size": (1, 4)}
    schedules = ("gpipe", "1f1b", "interleaved-1f1b", "circular")
    free = PlanRequest(pj.load_model(model), H100, 32, 64, schedules, choices)
    layouts, rng = enumerate_layouts(free), np.random.default_rng(1)
    few = layouts.take(rng.choice(len(layouts), 400, replace=False))
    request = dataclasses.replace(free, launcher=launcher)
    lacks = _launcher_refusals(request, few)
    for k in range(len(few)):
        table = build_table(program_shape(free, few, k), int(few.microbatches[k]))
        workload = layout_workload(request, few, k)
        expected = pj.costing.launches(workload, table, launcher)[0].lacks
        assert bool(lacks[k]) == bool(expected), few.described(free, k)
    assert (lacks == "").any() or launcher == "MaxText"


def test_shares_of_the_step_are_of_one_whole(small):
    best = np.array([np.nanargmin(small.estimates.step_time)])
    shares = layout_resource_shares(small.request, small.layouts.take(best))
    np.testing.assert_allclose(shares.sum(axis=0), 1, atol=1e-3)
    assert small.best.bound_by == RESOURCES[shares.argmax()] == "compute.peak"


@with_cases("model system gpus recipe", *read_cases("published recipes"))
def test_published_recipes_are_searched(model, system, gpus, recipe):
    names = "tensor", "pipeline", "stages_per_worker", "expert", "edge_units"
    choices = {"microbatch_size": (1,), "tensor": (recipe[0],), "context": (1, 2), "zero": (1,)}
    model, system = pj.load_model(model), pj.load_system(system)
    request = PlanRequest(model, system, gpus, 2 * gpus, choices=choices)
    layouts = enumerate_layouts(request)
    columns = [getattr(layouts, name).tolist() for name in names]
    assert tuple(recipe) in zip(*columns, strict=True)


def test_what_would_turn_best_and_runner_up_round_does_so(small):
    best, other = small.best, small.runners_up[0]
    described = [small.layouts.described(small.request, k) for k in range(len(small.layouts))]
    rows = [described.index(layout.layout) for layout in (best, other)]
    result = small.break_even_factors
    assert [change.number for change in result][:2] == ["node.bandwidth", "memory.bandwidth"]
    # nothing helps 1F1B: more bubble at the same costs
    plain = described.index(best.layout | {"schedule": "1f1b", "stages_per_worker": 1})
    assert break_even_factors(small.request, small.layouts, np.array([rows[0], plain])) == ()
    far = [abs(np.log(change.factor)) for change in result]
    assert far == sorted(far)
    # it is not behind
    assert break_even_factors(small.request, small.layouts, np.array(rows[::-1])) == ()
    for number, factor, value in result:
        assert value == pytest.approx(factor * H100_NUMBERS[number])
        for share, is_turned in ((1, True), (0.999, False)):
            changed = H100.with_number(number, H100_NUMBERS[number] * factor**share)
            first, second = (
                pj.evaluate(
                    layout.table, pj.stage_costs(layout.workload, changed, layout.table)
                ).step_time
                for layout in (best, other)
            )
            assert (second <= first * (1 + 1e-12)) == is_turned, number


def test_what_evaluate_is_given_has_the_step_time_of_the_plan(small, answer, tmp_path):
    for layout in (small.best, *small.runners_up):
        options = scenario_options(layout.scenario)
        assert options["minibatch"] * options.get("data_parallel", 1) == 8
        path = tmp_path / f"{id(layout)}.toml"
        path.write_text(config_text(options))
        result = answer("evaluate", "--config", path)
        assert result["step_time"] == pytest.approx(layout.step_time, rel=1e-12)
        assert max(result["memory_bytes"]) == pytest.approx(layout.memory_bytes, rel=1e-12)
        (line,) = [command_line("evaluate", options)]
        assert answer(*shlex.split(line)[1:]) == result


def test_memory_that_tensors_may_take():
    whole = float(H100.memory_available)
    assert PlanRequest(GPT, H100, 8, 8).usable_memory == 0.9 * whole
    assert PlanRequest(GPT, H100, 8, 8, headroom=0.25).usable_memory == 0.75 * whole
    assert PlanRequest(GPT, H100, 8, 8, memory_limit=5e10).usable_memory == 5e10


def test_the_headroom_is_what_runs_left_that_were_made_to_fit():
    for name, largest in (("llm_foundry_h100", 0.901), ("llm_foundry_a100_40gb", 0.912)):
        rows = read_rows(pj.files.DATA / "measured" / f"{name}.csv")
        times, system = StepTimes(rows), pj.load_system(str(rows.system[0]))
        pairs = zip(times.workloads, times.tables, strict=True)
        need = max(pj.memory_bytes(workload, table).max() for workload, table in pairs)
        assert need / system.memory_available == pytest.approx(largest, abs=5e-4)


@given(strategies.cases(step_end=True))
def test_bounds_are_never_above_the_makespan(case):
    assume(not case.table.updates_within)
    batch = jax.tree.map(lambda leaf: np.asarray(leaf, float)[None], case.costs)
    count = np.array([case.table.num_microbatches])
    bound = lower_bounds(Pipe.from_table(case.table), batch, count)
    assert bound[0] <= pj.evaluate(case.table, case.costs).makespan * (1 + 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1"])
def test_bounds_are_reached_without_messages(schedule):
    shape = ProgramShape(schedule, 4, 2 if schedule == "interleaved-1f1b" else 1)
    table = build_table(shape, 16)
    costs = pj.Costs(forward=1.0, backward=2.0)
    batch = jax.tree.map(lambda leaf: np.asarray(leaf, float)[None], costs)
    bound = lower_bounds(Pipe.from_table(table), batch, np.array([16]))
    assert bound[0] == pj.evaluate(table, costs).makespan


def test_layouts_are_legal_and_complete():
    request = PlanRequest(GPT, H100, 64, 96)
    result = enumerate_layouts(request)
    used = result.tensor * result.context * result.data * result.pipeline
    assert (used == 64).all()
    assert (result.data * result.microbatch_size * result.microbatches == 96).all()
    assert (result.tensor <= 8).all()
    assert (GPT.heads % result.tensor == 0).all()
    layers = GPT.layers + 2 * result.edge_units
    assert (result.stages <= layers).all()
    several = result.stages_per_worker > 1
    fullest = np.ceil(layers / result.stages)
    assert (fullest * result.stages <= 1.1 * layers)[several].all()
    assert (result.microbatches[several] % result.pipeline[several] == 0).all()
    rows = set(zip(*(column.tolist() for column in result), strict=True))
    assert len(rows) == len(result)
    # 1F1B, p = 4, t = 8, d = 2, b = 1: with and without recomputation, ZeRO, and units at the edges
    matching = [r for r in rows if (r[1], r[2], r[3], r[7], r[8]) == (4, 1, 8, 2, 1) and r[0] == 0]
    assert len(matching) == len(RECOMPUTE) * 4 * 2


def test_parts_of_layers_that_are_recomputed_can_be_searched():
    kinds = ("none", "mlp+layernorm", "core_attn", "full")
    few = FEW | {"tensor": (2,), "microbatch_size": (1,), "stages_per_worker": (1,)}
    result = pj.plan(GPT, H100, **SMALL | {"choices": few | {"recompute": kinds}}, exhaustive=True)
    columns = result.columns()
    assert set(columns["recompute"]) == {"none", "layernorm+mlp", "core_attn", "full"}
    for layout in (result.best, *result.runners_up):
        costs = pj.stage_costs(layout.workload, H100, layout.table)
        assert layout.workload.recompute == layout.layout["recompute"]
        run = pj.evaluate(layout.table, costs)
        assert layout.step_time == pytest.approx(run.step_time, rel=1e-12)
        need = pj.memory_bytes(layout.workload, layout.table).max()
        assert layout.memory_bytes == pytest.approx(need, rel=1e-12)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "deepseek-v3-mtp", "llama3-8b"])
def test_latent_attention_is_recomputed_by_default_as_in_recipes(name):
    request = PlanRequest(pj.load_model(name), H100, 64, 64, choices={"pipeline": (1,)})
    layouts = enumerate_layouts(request)
    searched = {request.recomputations[place] for place in set(layouts.recompute.tolist())}
    latent = {"mla_up_proj", "mla_up_proj+mlp"} if name != "llama3-8b" else set()
    assert searched == {"none", "full"} | latent
    if latent:  # without dense layers there is no such part
        sparse = dataclasses.replace(request.model.moe, dense_layers=0)
        sparse = dataclasses.replace(request.model, moe=sparse)
        kinds = ("none", "selective", "full", "mla_up_proj")
        assert PlanRequest(sparse, H100, 64, 64).recomputations == kinds


def test_edge_units_that_change_nothing_are_left_out():
    llama = pj.load_model("llama3-405b")  # 126 layers: first and last stage have fewer anyway
    result = enumerate_layouts(PlanRequest(llama, H100, 64, 64))
    assert set(result.edge_units[result.stages_per_worker == 1]) == {0}
    several = result.stages_per_worker > 1
    assert set(result.edge_units[several & (result.stages == 32)]) == {0}
    assert set(result.edge_units[result.stages == 128]) == {1}  # embedding and head stand alone


@with_cases(
    "schedule exists",
    ("chimera", lambda p, m: p % 2 == m % 2 == 0),
    ("dualpipe", lambda p, m: p % 2 == m % 2 == 0 and m >= 2 * p),
)
def test_layouts_that_a_schedule_does_not_exist_for_are_left_out(schedule, exists):
    few = {"edge_units": (0,), "zero": (0,), "recompute": ("none",), "tensor": (1, 2)}
    layouts = enumerate_layouts(PlanRequest(GPT, H100, 16, 48, ("1f1b", schedule), few))
    rows = np.array(layouts).T
    any_size, for_schedule = (rows[layouts.schedule == place, 1:].tolist() for place in (0, 1))
    places = Layouts._fields.index("pipeline") - 1, Layouts._fields.index("microbatches") - 1
    assert for_schedule == [row for row in any_size if exists(*(row[place] for place in places))]
    assert 0 < len(for_schedule) < len(any_size)


def test_where_nothing_fits_the_nearest_layout_says_what_it_lacks():
    tiny = dataclasses.replace(H100, memory_capacity=5e9, memory_reserve=0.0)
    with pytest.raises(ValueError, match=r"nearest \(.*tensor 4.*\) needs .* more than the 5.0 GB"):
        pj.plan(GPT, tiny, **SMALL)


@with_cases("schedule stages", ("1f1b", 1), ("interleaved-1f1b", 3), ("zb-h1", 1), ("gpipe", 1))
def test_what_workers_hold_with_many_microbatches_is_what_the_whole_table_says(schedule, stages):
    shape = ProgramShape(schedule, 4, stages)
    options = {"stages_per_worker": stages} if stages > 1 else {}
    for count in (4, 12, 16, 40):
        whole = pj.schedules.build(schedule, num_workers=4, num_microbatches=count, **options)
        sizes = np.random.default_rng(0).random((6, 1, 4 * stages))
        np.testing.assert_array_equal(
            count_activations(shape, count).activation_bytes(tuple(sizes)),
            held_counts(whole).activation_bytes(tuple(sizes)),
        )


@pytest.mark.parametrize(
    ("schedule", "stages"),
    daily([("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("1f1b", 1)]),
)
def test_long_programs_have_the_times_of_whole_ones(schedule, stages, monkeypatch):
    shape, rng = ProgramShape(schedule, 2, stages), np.random.default_rng(1)
    values = {
        name: rng.random((3, 2 * stages))
        for name in ("forward", "input_grad", "weight_grad", "all_reduce", "update")
    }
    costs = pj.Costs(**values, transmit=rng.random((3, 2, 1, 2 * stages - 1)))
    whole = exact_times(shape, 26, costs, pj.Links())
    sizes = []  # of the batches that grow from periods: the matrices of one layout take a GB

    def grow(*arguments, **options):
        sizes.append(options["batch_size"])
        return pj.analysis.extrapolated_makespans(*arguments, **options)

    monkeypatch.setattr(programs, "MAX_OPS", 10)
    monkeypatch.setattr(programs, "extrapolated_makespans", grow)
    np.testing.assert_allclose(exact_times(shape, 26, costs, pj.Links()), whole, rtol=1e-12)
    assert sizes == [1, 1, 1] or schedule == "gpipe"  # which has no period


@pytest.mark.slow
def test_the_command_says_json_and_keeps_all_layouts(tmp_path, answer, call, monkeypatch):
    words = ["plan", "--model", "gpt-22b", "--system", "h100", "--gpus", "8", "--minibatch", "8"]
    words += ["--tensor", "4", "--zero", "0,1", "--recompute", "none,full", "-S", "1f1b"]
    words += ["--edge-units", "0", "--stages-per-worker", "1", "--microbatch-size", "1,2"]
    out = tmp_path / "plan.zarr"
    result = answer(*words, "--runners-up", 1, "--out", out)
    says = (
        "layout step_time band band_percent mfu memory_bytes bound_by memory_left tokens_per_second"
    )
    says += " regime evidence also layers_of_stages"
    assert set(result["best"]) == set(says.split())
    assert len(result["runners_up"]) == 1
    assert (result["memory_limit"], result["headroom"]) == (None, 0.1)
    assert result["room"] == 0.9 * H100.memory_available
    assert all({"number", "factor", "value"} == set(change) for change in result["reversals"])
    assert set(result["launch"]) == {*LAUNCHERS}
    assert result["launch"]["Megatron-LM"]["options"]["tensor-model-parallel-size"] == 4
    evaluate, show = result["next"]
    assert evaluate.startswith("pipejax evaluate --schedule ")
    assert show.endswith("--out plan.html")
    assert result["best"]["layout"]["tensor"] == 4
    assert result["evaluated"] <= result["fitting"] <= result["enumerated"]
    code, _, message = call(*words, "--out", out)
    assert (code, "--resume" in message) == (2, True)
    again = answer(*words, "--out", out, "--resume", "--exhaustive")
    assert again["best"] == result["best"]
    assert again["evaluated"] == again["fitting"]
    code, _, message = call(*words[:-1], "1,4", "--out", out, "--resume")
    assert (code, "another request" in message) == (2, True)
    monkeypatch.setenv("COLUMNS", "80")
    text, picture = tmp_path / "plan.csv", tmp_path / "plan.svg"
    _, shown, _ = call(*words, "--out", text, "--figure", picture, "--details")
    assert " per step" in shown.splitlines()[0]
    assert "all others are provably slower" in shown
    assert max(map(len, shown[shown.index("┏") : shown.index("└")].splitlines())) <= 80
    assert shown.count("Megatron-LM: CUDA_DEVICE_MAX_CONNECTIONS=1 --micro-batch-size") == 1
    drawn_texts = re.findall(">([^<>]+)</text>", picture.read_text())
    assert {"front", "best", "1f1b", "step time [s]"} <= {*drawn_texts}
    assert any(text.startswith("1f1b, TP 4") for text in drawn_texts)  # the front by names
    assert len(text.read_text().splitlines()) == 1 + again["enumerated"]


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v2"])
@pytest.mark.parametrize("launcher", [None, *LAUNCHERS])
def test_a_plan_tries_what_its_launcher_recomputes(name, launcher):
    """torchtitan's default policy recomputes every second product."""
    asked = {"choices": {"pipeline": (1,), "context": (1,)}, "launcher": launcher or ""}
    request = PlanRequest(pj.load_model(name), H100, 64, 64, **asked)
    layouts = enumerate_layouts(request)
    searched = {request.recomputations[place] for place in set(layouts.recompute.tolist())}
    assert ("half_products" in searched) == (launcher == "torchtitan")


@pytest.mark.parametrize("sequence", [8192, 16384, 32768])
def test_a_plan_for_torchtitan_finds_its_own_recomputation(answer, sequence):
    line = ["-m", "llama3-8b", "-y", "h100", "--gpus", 16, "--minibatch", 16]
    line += ["--sequence", sequence, "--launcher", "torchtitan", "--pipeline", 1]
    result = answer("plan", *line)["best"]
    seconds = {}
    for recompute in ("none", "half_products", "full"):
        best = answer("plan", *line, "--recompute", recompute)["best"]
        seconds[recompute] = best["step_time"]
    assert result["step_time"] == pytest.approx(min(seconds.values()), rel=1e-9)


@with_cases("name launcher gpus", *read_cases("layouts that tie"))
def test_details_mark_the_layouts_that_tie(call, name, launcher, gpus):
    result = pj.plan(name, "h100", gpus=gpus, minibatch=2 * gpus, launcher=launcher)
    rows = (result.best, *result.runners_up)
    ratios = [row.step_time / result.best.step_time - 1 for row in rows]
    ties = [k <= row.evidence.spread / 100 for k, row in zip(ratios, rows, strict=True)]
    line = ["-m", name, "-y", "h100", "--gpus", gpus, "--minibatch", 2 * gpus]
    line += ["--launcher", launcher]
    text = call("plan", *line, "--details", "--format", "csv")[1]
    lines = [line for line in text.splitlines() if line.endswith((",yes", ",no"))]
    marks = [line.rpartition(",")[2] for line in lines]
    assert marks == (["yes" if is_tied else "no" for is_tied in ties] if sum(ties) > 1 else [])


@pytest.mark.parametrize(("gpus", "sequence"), [(32, 4096), (16, 4096), (32, 8192), (64, 2048)])
def test_the_next_best_overtakes_the_first_but_need_not_be_the_fastest(
    answer, call, gpus, sequence
):
    """A third layout may be faster than two that tie, so the sentence is on these two."""
    line = ["-m", "mpt-7b", "-y", "a100-40gb", "--gpus", gpus, "--minibatch", 256]
    line += ["--sequence", sequence, "--launcher", "DeepSpeed"]
    result, text = answer("plan", *line), call("plan", *line)[1]
    assert "fastest" not in text
    (verb,) = re.findall(r"^it (overtakes|stays slower than) this layout if ", text, re.M)
    assert (verb == "overtakes") == bool(result["reversals"])
