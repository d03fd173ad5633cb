"""Optimal splits of a model into stages, against all splits of small models."""

import dataclasses
import itertools
import json
import re
import shlex

import numpy as np
import pytest

import pipejax as pj
from pipejax.search.partition.holdings import default_layouts
from pipejax.search.partition.integer_program import SLACK

H100 = pj.load_system("h100")
DENSE = dataclasses.replace(pj.load_model("llama3-8b"), layers=6)
SPARSE = pj.load_model("deepseek-v3-mtp")
SPARSE = dataclasses.replace(
    SPARSE, layers=5, moe=dataclasses.replace(SPARSE.moe, experts=16, dense_layers=2)
)


def every_layout(model, stages, workers):
    """All splits that Megatron knows: any stage may be empty, MTP is behind all layers."""
    layers = int(model.layers)
    for ends in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        split = np.diff([0, *ends, layers])
        if not model.mtp_layers:
            yield pj.costing.PipelineLayout.with_layers(split, 0 * split)
            continue
        for stage in range(max(stages - workers, 0), stages):
            if not split[stage + 1 :].any():
                mtp = np.arange(stages) == stage
                yield pj.costing.PipelineLayout.with_layers(split, mtp * int(model.mtp_layers))


SPREAD = {"tensor_parallel": 8, "expert_parallel": 8, "expert_tensor_parallel": 1}
CASES = {
    "1f1b": (DENSE, ("1f1b", 3, 6, {}), {}),
    "full recomputation": (DENSE, ("zb-h1", 3, 5, {}), {"recompute": "full", "data_parallel": 2}),
    "interleaved": (DENSE, ("interleaved-1f1b", 2, 4, {"stages_per_worker": 2}), {}),
    "two pipes": (DENSE, ("chimera", 4, 4, {}), {}),
    "stragglers": (DENSE, ("chimera", 4, 4, {}), {"stragglers": {1: 1.5}}),
    "overlapped pairs": (DENSE, ("dualpipe-v", 2, 6, {}), {"pair_factor": 0.3}),
    "experts and MTP": (SPARSE, ("1f1b", 4, 8, {}), SPREAD),
}


QUICK = ("1f1b", "stragglers", "experts and MTP")


def build_case(name):
    model, (schedule, workers, count, options), how = CASES[name]
    table = pj.schedules.build(schedule, num_workers=workers, num_microbatches=count, **options)
    return table, pj.Workload(model, minibatch=count, **how)


def get_all(table, workload, system, link="delay"):
    result = {}
    for layout in every_layout(workload.model, table.num_stages, table.num_workers):
        message = dataclasses.replace(workload, pipeline_layout=str(layout))
        run = pj.evaluate(table, pj.stage_costs(message, system, table), link=link)
        result[layout] = run.step_time, pj.memory_bytes(message, table).max()
    return result


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*CASES} - {*QUICK}))],
)
@pytest.mark.parametrize("link", ["delay", pytest.param("rendezvous", marks=pytest.mark.slow)])
def test_no_split_is_faster(name, link):
    table, workload = build_case(name)
    splits = get_all(table, workload, H100, link)
    result = pj.search.layers(table, workload, H100, link=link, no_memory_limit=True)
    least = min(step for step, _ in splits.values())
    assert result.stopped == "optimal"
    assert result.value == splits[result.best.layout][0]  # to the last bit what evaluate says
    assert result.value == pytest.approx(least, rel=3 * SLACK)
    assert result.lower_bound <= least
    assert result.evaluated < len(splits)
    assert result.gap <= 3 * SLACK
    needs = pj.memory_bytes(result.best.workload, table)
    np.testing.assert_array_equal(result.best.memory_bytes, needs)
    defaults = {name: split.step_time for name, split in result.best.defaults.items()}
    assert result.baselines == defaults


@pytest.mark.parametrize("name", ["1f1b", pytest.param("experts and MTP", marks=pytest.mark.slow)])
def test_of_those_that_fit_none_is_faster(name):
    table, workload = build_case(name)
    splits = get_all(table, workload, H100)
    needs = sorted(need for _, need in splits.values())
    fastest = min(splits.values())
    room = max(need for need in needs if need < fastest[1])  # the fastest does not fit
    system = dataclasses.replace(H100, memory_capacity=room + float(H100.memory_reserve))
    result = pj.search.layers(table, workload, system)
    least = min(step for step, need in splits.values() if need <= system.memory_available)
    assert fastest[0] < least
    assert (result.stopped, result.best.fits) == ("optimal", True)
    assert result.value == pytest.approx(least, rel=3 * SLACK)
    free = pj.search.layers(table, workload, system, no_memory_limit=True)
    assert (free.value, free.best.fits) == (pytest.approx(fastest[0], rel=3 * SLACK), False)
    small = dataclasses.replace(H100, memory_capacity=needs[0] / 2)
    with pytest.raises(ValueError, match=r"no split fits: the smallest need is .* GB"):
        pj.search.layers(table, workload, small)


def test_defaults_of_the_runtimes():
    def layouts(model, workers, **options):
        name = "interleaved-1f1b" if options else "1f1b"
        table = pj.schedules.build(name, num_workers=workers, num_microbatches=workers, **options)
        result = default_layouts(pj.Workload(model, minibatch=workers), table)
        return {name: str(layout) for name, layout in result.items()}

    llama = layouts(pj.load_model("llama3-405b"), 16)
    assert "megatron" not in llama  # 126 layers
    assert llama["megatron, embedding and loss counted"] == "Et*7|(t*8|)*14t*7L"
    assert llama["megatron, first and last set"] == llama["torchtitan"] == "Et*7|(t*8|)*14t*7L"
    small = layouts(dataclasses.replace(DENSE, layers=12), 4)
    assert small["megatron"] == small["by stage shares"] == "Ettt|ttt|ttt|tttL"
    assert small["torchtitan"] == "Ettt|t*4|ttt|ttL"  # 14 units: 4, 4, 3, 3
    assert "megatron, loss counted" not in small
    looped = layouts(dataclasses.replace(DENSE, layers=11), 3, stages_per_worker=2)
    assert looped["megatron, loss counted"] == "Ett|(tt|)*4tL"
    assert "megatron, first and last set" not in looped  # 11 layers on 2 stages of each worker
    both = layouts(dataclasses.replace(DENSE, layers=10), 3, stages_per_worker=2)
    assert both["megatron, first and last set"] == "Et|tt|tt|t|tt|ttL"
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
    counted = pj.Workload(dataclasses.replace(DENSE, layers=14), 4, embedding_units=1, loss_units=1)
    assert str(default_layouts(counted, table)["by stage shares"]) == "Ettt|t*4|t*4|tttL"
    deepseek = layouts(pj.load_model("deepseek-v3-mtp"), 16)
    assert deepseek["megatron, first and last set"] == "Ett|(t*4|)*14tttmL"


MODELS = ["gpt-22b", "gpt3-175b", "gpt-530b", "llama3-8b", "llama3-70b", "llama3-405b"]
MODELS += ["mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3", "deepseek-v3-mtp"]
SCHEDULES = {"1f1b": {}, "zb-h1": {}, "interleaved-1f1b": {"stages_per_worker": 2}}


def check_against_defaults(model, schedule, system, workers, count, seconds, tensor=8):
    options = SCHEDULES[schedule]
    sizes = {"num_workers": workers, "num_microbatches": count}
    table = pj.schedules.build(schedule, **sizes, **options)
    split = pj.load_model(model)
    spread = {} if split.moe is None else {"expert_parallel": tensor, "expert_tensor_parallel": 1}
    workload = pj.Workload(split, count, tensor_parallel=tensor, **spread)
    result = pj.search.layers(
        table, workload, pj.load_system(system), no_memory_limit=True, time_limit=seconds
    )
    assert "torchtitan" in result.baselines  # Megatron needs layers that divide
    assert all(result.value <= default for default in result.baselines.values())
    assert result.lower_bound <= result.value
    return result


def test_never_slower_than_the_defaults():
    result = check_against_defaults("llama3-8b", "1f1b", "h100", 4, 8, 20, tensor=2)
    assert result.stopped == "optimal"
    assert result.value < min(result.baselines.values())


@pytest.mark.slow
@pytest.mark.parametrize("system", ["h100", "b200"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_never_slower_than_the_defaults_on_any_model(model, schedule, system):
    check_against_defaults(model, schedule, system, 8, 16, 4)


ARGUMENTS = ("-s", "1f1b", "-P", 2, "-M", 4, "-m", "gpt-22b", "-y", "b200", "--minibatch", 4)
ARGUMENTS += ("--tensor-parallel", 8, "--stragglers", "1=1.2")


def test_the_command_writes_what_runtimes_read(call, answer, tmp_path):
    out, text = tmp_path / "split.json", tmp_path / "split.txt"
    code, shown, _ = call("tune", "layers", *ARGUMENTS, "--out", out, "--details")
    assert code == 0
    result = json.loads(out.read_text())
    message = result["best"]
    layout = pj.costing.PipelineLayout.parse(message["pipeline_layout"])
    assert f"--pipeline-model-parallel-layout '{layout}'" in shown
    words = [",".join(names) for names in message["module_fqns_per_model_part"]]
    assert shlex.join(words) in shown
    options = result["launch"]["Megatron-LM"]["options"]
    assert options["pipeline-model-parallel-layout"] == str(layout)
    assert "optimal: no other can be shorter" in shown
    assert f"{max(message['layers'])} layers" in shown
    assert layout.count("t").tolist() == message["layers"]
    parts = message["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [message["layers"][0] + 1, message["layers"][1] + 2]
    layers = [f"layers.{k}" for k in range(48)]
    assert [*itertools.chain(*parts)] == ["tok_embeddings", *layers, "norm", "output"]
    (page,) = re.findall(r"^next: pipejax (show .*) --out layers.html$", shown, re.M)
    assert call(*shlex.split(page), "--out", tmp_path / "layers.html")[0] == 0
    again = answer("tune", "layers", *ARGUMENTS, "--out", text)
    assert text.read_text() == message["pipeline_layout"] + "\n"
    run = answer("evaluate", *ARGUMENTS, "--pipeline-layout", layout)
    assert run["step_time"] == result["value"] == again["value"]
    assert run["memory_bytes"] == message["memory_bytes"]


def test_default_splits_that_do_not_fit_are_not_compared_by_time(call, answer):
    # stage 0 of 1F1B holds the most microbatches, so equal stages need too much there
    line = "-s 1f1b -P 8 -M 32 -m llama3-70b -y h100 --tensor-parallel 8 --minibatch 64"
    code, shown, _ = call("tune", "layers", *line.split())
    result = answer("tune", "layers", *line.split())
    assert code == 0
    assert not any(split["fits"] for split in result["defaults"].values())
    assert shown.splitlines()[0].endswith("no default split fits in memory")
    assert shown.count("does not fit in memory") == len(result["defaults"])


def test_a_search_that_is_out_of_time_says_what_it_knows():
    table, workload = build_case("interleaved")
    result = pj.search.layers(table, workload, H100, no_memory_limit=True, time_limit=0)
    assert result.stopped in ("time", "optimal")
    assert result.lower_bound <= result.value
    assert set(result.baselines)


def test_fewer_layers_than_any_runtime_splits():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
    workload = pj.Workload(dataclasses.replace(DENSE, layers=1), minibatch=4)
    result = pj.search.layers(table, workload, H100, no_memory_limit=True)
    assert (result.baselines, result.stopped) == ({}, "optimal")
    steps = [step for step, _ in get_all(table, workload, H100).values()]
    assert result.value == min(steps)
