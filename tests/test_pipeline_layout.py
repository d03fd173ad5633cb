"""Layout strings: Megatron's letters in and out, and what a model costs on such stages."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from daily import read_cases, with_cases
from hypothesis import given, strategies as st

import pipejax as pj
from pipejax.costs.model.workload import assign_layers
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import stage_bytes, stage_work
from pipejax.costs.system.parts import Host

DENSE = pj.load_model("gpt-22b")
H100 = dataclasses.replace(pj.load_system("h100"), host=Host())  # sums of layers, exactly
SPARSE = pj.load_model("deepseek-v3-mtp")  # 3 dense layers, 58 with experts, one for MTP
TABLE = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
SHARED = {"tensor_parallel": 8, "expert_parallel": 8, "expert_tensor_parallel": 1}
TENSOR = {"tensor_parallel": 8}


def written_out(text):
    """Stages of a layout string, repeats unrolled from the inside out."""
    text = re.sub(r"[\s,]", "", text)
    while match := re.search(r"(?:\(([^()]+)\)|([^()*]))\*(\d+)", text):
        repeated = (match[1] or match[2]) * int(match[3])
        text = text[: match.start()] + repeated + text[match.end() :]
    return tuple(text.split("|"))


PUBLISHED = {  # from Megatron-LM's documentation, help and tests
    "Et*3|(tt|)*29,m|L": ("Ettt", *["tt"] * 29, "m", "L"),
    "E|(t|)*3,m|m||L": ("E", "t", "t", "t", "m", "m", "", "L"),
    "E||t|L": ("E", "", "t", "L"),
    "E|(t|)*10m|m|LL": ("E", *["t"] * 10, "m", "m", "LL"),
    "E tt|*3 (|t*2)*2 L": ("Ett", "", "", "", "tt", "ttL"),
}


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_strings(text):
    assert pj.costing.PipelineLayout.parse(text).stages == PUBLISHED[text] == written_out(text)


BLOCKS = st.lists(st.text("EtmL", max_size=6), min_size=1, max_size=4)
STAGES = st.lists(st.tuples(BLOCKS, st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda parts: tuple(stage for block, times in parts for stage in block * times)
)


@given(STAGES)
def test_what_is_written_is_read_again(stages):
    text = str(pj.costing.PipelineLayout(stages))
    assert pj.costing.PipelineLayout.parse(text).stages == stages == written_out(text)
    assert len(text) <= len("|".join(stages))


TEXTS = st.recursive(
    st.sampled_from([*"EtmL|", "t*3", "|*2", "m*0", ",", " "]),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map("".join),
).flatmap(lambda inside: st.sampled_from([inside, f"{inside}({inside}t|)*3", f"({inside}|)*2E"]))


@given(TEXTS)
def test_what_is_read_is_written_alike(text):
    layout = pj.costing.PipelineLayout.parse(text)
    assert layout.stages == written_out(text)
    assert pj.costing.PipelineLayout.parse(str(layout)) == layout


# texts of lists, their stages and whose way of writing it is
ROWS = json.loads((Path(__file__).parent / "data" / "layouts_in_lists.json").read_text())
IN_LISTS = {text: tuple(stages) for text, stages, *_ in ROWS}


@pytest.mark.parametrize("text", IN_LISTS)
def test_lists_are_layouts(text):
    assert pj.costing.PipelineLayout.parse(text).stages == IN_LISTS[text]
    if text[0] == "[" and "*" not in text and "[[e" not in text:
        content = json.loads(text.replace("'", '"'))
        assert pj.costing.PipelineLayout.parse(content).stages == IN_LISTS[text]
        workload = pj.Workload(DENSE, minibatch=8, pipeline_layout=content)
        assert workload == pj.Workload(DENSE, minibatch=8, pipeline_layout="|".join(IN_LISTS[text]))


def test_heads_of_further_tokens_may_be_named():
    """One layer predicts a further token: its head is counted whether the layout names it or not."""
    costs = [at(f"Et*15|t*23|t*23|m{heads}", SPARSE) for heads in ("L", "LL")]
    for first, second in zip(*(vars(priced).values() for priced, _ in costs), strict=True):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(*(need for _, need in costs))


LISTS = (
    '[["embedding"] + ["decoder"] * 11] + [["decoder"] * 13] * 2 + [["decoder"] * 11 + ["loss"]]'
)
RUN = ("-s", "1f1b", "-P", 4, "-M", 8, "-m", "gpt-22b", "-y", "h100", "--minibatch", 8)


def test_lists_come_in_by_every_door(answer, tmp_path):
    content = [["embedding"] + ["decoder"] * 11, *[["decoder"] * 13] * 2]
    content += [["decoder"] * 11 + ["loss"]]
    expected = answer("evaluate", *RUN, "--pipeline-layout", "Et*11|t*13|t*13|t*11L")
    assert expected["layers_of_stages"] == [11, 13, 13, 11]
    assert expected["notes"] == ["layers of stages: 11 13 13 11 (as --pipeline-layout has them)"]
    assert answer("evaluate", *RUN, "--pipeline-layout", LISTS) == expected
    for suffix, text in {
        "json": json.dumps({"pipeline_layout": content}),
        "toml": f"pipeline_layout = {json.dumps(content)}",
    }.items():
        path = tmp_path / f"layout.{suffix}"
        path.write_text(text)
        assert answer("evaluate", *RUN, "--config", path)["makespan"] == expected["makespan"]


def test_a_sweep_takes_a_layout_in_lists_and_several():
    stages = [["embedding", *["decoder"] * 24], [*["decoder"] * 24, "loss"]]
    other = [["embedding"], [*["decoder"] * 48, "loss"]]
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 8, "microbatches": 8}
    grid |= {"models": "gpt-22b", "systems": "h100"}
    for text, values in {
        json.dumps(stages): ["Et*24|t*24L"],
        json.dumps([stages, other]): ["Et*24|t*24L", "E|t*48L"],
        json.dumps(["Et*24|t*24L", other]): ["Et*24|t*24L", "E|t*48L"],
        json.dumps([[stage] for stage in stages]): ["Et*24|t*24L"],  # ranks of one virtual stage
        '["", "Et*13 | t*13, t*0|t*13|t*9L"]': ["", "Et*13|(t*13|)*2t*9L"],
    }.items():
        sweep = pj.read_sweep(grid | {"pipeline_layout": json.loads(text)})
        (axis,) = (axis for axis in sweep.axes if axis.name == "pipeline_layout")
        assert list(axis.values) == values
        assert axis.is_listed == (len(values) > 1)


FOUR_EACH = "--stages-per-worker", 4
UNEVEN = {  # layers over stages, 30 on 4, on 3 + 2 units, 48 on 32, 4 on 3
    "7 8 8 7": (30, ("-s", "1f1b", "-P", 4)),
    "5 5 6 5 5 4": (30, ("-s", "gpipe", "-P", 6, "--loss-units", 1, "--embedding-units", 0)),
    " ".join("1" * 8 + "2" * 16 + "1" * 8): (48, ("-s", "interleaved-1f1b", "-P", 8, *FOUR_EACH)),
    "1 2 1": (4, ("-s", "zb-h1", "-P", 3)),
}


def own_model(name):
    return json.loads((Path(pj.__file__).parent / f"costs/data/models/{name}.json").read_text())


def small_file(path, layers):
    sizes = {"layers": layers, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn_hidden": 256}
    sizes |= {"vocabulary": 1000, "sequence_tokens": 128}
    path.write_text(json.dumps(own_model("gpt-22b") | sizes))
    return path


@pytest.mark.parametrize("layers", UNEVEN)
def test_layers_of_stages_are_said_where_they_differ(layers, answer, call, tmp_path):
    total, schedule = UNEVEN[layers]
    model = small_file(tmp_path / "small.json", total)
    line = (*schedule, "-M", 24, "-m", model, "-y", "h100", "--minibatch", 24)
    result = answer("evaluate", *line)
    assert result["layers_of_stages"] == [int(word) for word in layers.split()]
    why = "embedding and head count as layers" if "--loss-units" in line else "Megatron-LM needs"
    assert result["notes"][0].startswith(f"layers of stages: {layers} ({why}")
    assert f"layers of stages: {layers} (" in " ".join(call("evaluate", *line)[1].split())
    small_file(model, 96)
    if "--loss-units" not in line:
        assert "notes" not in answer("evaluate", *line)


UNITS = ("--embedding-units", 0, "--loss-units", 0)


@with_cases("stages_per_worker total units layers", *read_cases("layouts of many stages"))
def test_layers_of_many_stages_are_said_as_runs(
    stages_per_worker, total, units, layers, answer, tmp_path
):
    model = small_file(tmp_path / "small.json", total)
    line = ["-s", "interleaved-1f1b", "-P", 8, "-V", stages_per_worker, "-M", 8, "-m", model]
    line += ["-y", "h100", "--minibatch", 8]
    line += ["--embedding-units", units[0], "--loss-units", units[1]]
    result = answer("evaluate", *line)
    counts = []
    for run in layers.split(", "):
        count, _, layer = run.rpartition(" x ")
        counts += [int(layer)] * int(count or 1)
    assert result["layers_of_stages"] == counts
    text = layers if len(counts) > 32 else " ".join(map(str, counts))
    assert result["notes"][0].startswith(f"layers of stages: {text} (")


def test_comparing_and_explaining_say_it_too(answer, answer_and_text, tmp_path):
    model = small_file(tmp_path / "small.json", 30)
    line = ("-P", 4, "-M", 8, "-m", model, "-y", "h100", "--minibatch", 8)
    here = "(here --pipeline-layout)"
    why = f"Megatron-LM needs equal layers, or --pipeline-model-parallel-layout {here}"
    note = f"layers of stages: 7 8 8 7 ({why})"
    result, text = answer_and_text("compare", "-S", "1f1b,gpipe", *line)
    assert [row["notes"] for row in result["rows"]] == [[note]] * 2
    assert note in " ".join(text.split())
    assert answer("explain", "-s", "1f1b", *line, "--schedules", "1f1b")["notes"] == [note]
    field = f"model.pipeline_model_parallel_layout {here}"
    for launcher, options, why in (
        ("megatron-bridge", (), f"Megatron-Bridge needs equal layers, or {field}"),
        ("deepspeed", (), "DeepSpeed needs equal layers"),
        ("torchtitan", UNITS, "torchtitan takes them by names of modules"),
    ):
        run = (*line, "--launcher", launcher, *options)
        notes = answer("evaluate", "-s", "1f1b", *run)["notes"]
        assert notes == [f"layers of stages: 7 8 8 7 ({why})"]
    layout = ("--tensor", 1, "--microbatch-size", 1, "--zero", 0, "--recompute", "none")
    layout += ("-S", "1f1b")
    plan = answer("plan", "--gpus", 4, "--pipeline", 4, "--edge-units", 0, *layout, *line[4:])
    assert plan["best"]["layers_of_stages"] == [7, 8, 8, 7]
    assert plan["best"]["notes"] == [note]


@pytest.mark.parametrize(("model", "layers"), [(DENSE, [12] * 4), (SPARSE, [15, 16, 15, 15])])
def test_the_even_layout_is_the_default(model, layers):
    degrees = TENSOR if model.moe is None else SHARED
    plain = pj.Workload(model, minibatch=8, **degrees)
    mtp = [0, 0, 0, model.mtp_layers]
    layout = pj.costing.PipelineLayout.with_layers(layers, mtp)
    message = dataclasses.replace(plain, pipeline_layout=str(layout))
    assert assign_layers(plain, TABLE).layers.tolist() == layers
    costs = (pj.stage_costs(workload, H100, TABLE) for workload in (plain, message))
    for first, second in zip(*(vars(workload).values() for workload in costs), strict=True):
        np.testing.assert_array_equal(first, second)
    need = [pj.memory_bytes(workload, TABLE) for workload in (plain, message)]
    np.testing.assert_array_equal(*need)


def at(text, model=DENSE, **how):
    degrees = TENSOR if model.moe is None else SHARED
    workload = pj.Workload(model, minibatch=8, **degrees, pipeline_layout=text, **how)
    return pj.stage_costs(workload, H100, TABLE), pj.memory_bytes(workload, TABLE)


def test_a_stage_costs_what_its_layers_do():
    (few, need), (many, more) = at("Et*3|t*20|t*14|t*11L"), at("Et*4|t*18|t*14|t*12L")
    layer = (few.forward[1] - many.forward[1]) / 2
    moved = np.array([1, -2, 0, 1])
    np.testing.assert_allclose(many.forward - few.forward, layer * moved, rtol=1e-9, atol=1e-15)
    alone, _ = at("E|t*24|t*23|tL")
    assert few.forward[0] == pytest.approx(alone.forward[0] + 3 * layer, rel=1e-9)
    assert few.forward[3] == pytest.approx(alone.forward[3] + 10 * layer, rel=1e-9)
    # a layer's parameters, and its activation of each microbatch in flight there
    layer_times = np.linalg.lstsq(
        np.stack([moved, moved * [4, 3, 2, 1]], axis=1).astype(float), more - need, rcond=None
    )
    parameters, activation = layer_times[0]
    whole = DENSE.whole_parameters()
    rank_parameters = whole + (DENSE.layer_parameters - whole) / 8
    assert parameters == pytest.approx(16 * rank_parameters, rel=1e-9)
    np.testing.assert_allclose(more - need, moved * (parameters + activation * np.arange(4, 0, -1)))


def test_layers_for_further_tokens_lie_where_the_layout_says():
    apart, more = at("Et*15|t*23|t*23m|L", SPARSE)
    plain, less = at("Et*15|t*23|t*23|mL", SPARSE)
    layer = plain.forward[1] / 23
    grows, shrinks = apart.forward[2] - plain.forward[2], plain.forward[3] - apart.forward[3]
    assert grows == pytest.approx(shrinks, rel=1e-9)
    assert apart.forward[2] - plain.forward[2] == pytest.approx(layer, rel=0.05)
    # behind it, a message holds its output beside that of the layers
    np.testing.assert_allclose(apart.transmit[0, 0], plain.transmit[0, 0] * [1, 1, 2], rtol=1e-12)
    weights = [
        stage_bytes(pj.Workload(SPARSE, 8, **SHARED, pipeline_layout=text), TABLE).weights
        for text in ("Et*15|t*23|t*23m|L", "Et*15|t*23|t*23|mL")
    ]
    # by hand: h 7168, latent ranks 512 + 64 and 1536, 128 heads, 256 experts of width 2048, e 8 of
    # etp 1; the ways down, the norms and the router are whole; and a copy of the embedding
    h = 7168
    split = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * h + 3 * h * 2048 + 2 * h * h
    whole = h * (512 + 64 + 1536) + 2 * h + 512 + 1536 + 256 * h + 3 * h
    rank_parameters = split / 8 + whole + 256 * 3 * h * 2048 / 8 + 129280 * h / 8
    moved = np.array([0, 0, 1, -1]) * 2 * rank_parameters
    assert weights[0] - weights[1] == pytest.approx(moved, rel=1e-9)
    # 2 bytes each of weights and gradients, 12 of the optimizer, and two activations instead of one
    moved, static = more - less, 16 * rank_parameters
    assert moved[:2].tolist() == [0, 0]
    assert moved[2] - static > 0
    assert 0 < -moved[3] - static < moved[2] - static


def test_one_compilation_serves_all_layouts():
    """Layers are numbers: only where those for further tokens lie is part of the program."""
    from pipejax.costs.model.workload import PricingShape

    shapes = {
        PricingShape.from_workload(
            pj.Workload(SPARSE, 8, pipeline_layout=text, **SHARED), TABLE
        ).workload
        for text in ("Et*15|t*15|t*16|t*15mL", "E|t*31|t*30|mL", "")
    }
    assert len(shapes) == 1


def test_work_of_a_layout_is_priced_alike_from_its_distinct_stages():
    from pipejax.analysis.step.many_systems import distinct_stages

    workload = pj.Workload(SPARSE, 8, pipeline_layout="Et*2|t*30|t*29m|L", **SHARED)
    work = stage_work(workload, TABLE)
    few, places = distinct_stages(work)
    costs = work_costs(few, H100)
    expected = work_costs(work, H100)
    np.testing.assert_array_equal(costs.forward[places.stage], expected.forward)
    np.testing.assert_array_equal(costs.transmit[:, 0, places.boundary], expected.transmit)


@with_cases("model degrees cuts", *read_cases("degrees that cut unequal parts"))
def test_degrees_that_cut_unequal_parts_are_named(
    model, degrees, cuts, answer, call, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    grouped = {"heads": 96, "kv_heads": 12, "hidden": 12288, "ffn_hidden": 28688}
    Path("grouped.json").write_text(json.dumps(own_model("llama3-8b") | grouped))
    options = re.sub("([a-z]+)", r"--\1-parallel", degrees).split()
    line = ("-s", "1f1b", "-P", 4, "-M", 8, "-m", model, "-y", "h100", "--minibatch", 8, *options)
    notes = " ".join(answer("evaluate", *line).get("notes", ()))
    assert cuts in notes
    assert ("no launcher runs it" in notes) is bool(cuts)
    assert cuts in " ".join(call("evaluate", *line)[1].split())


@with_cases(
    "total launcher differs", *read_cases("test_a_split_that_torchtitan_itself_lacks_is_named")
)
def test_a_split_that_torchtitan_itself_lacks_is_named(total, launcher, differs, answer, tmp_path):
    model = small_file(tmp_path / "small.json", total)
    line = ("explain", "-s", "1f1b", "-P", 4, "-M", 8, "-m", model, "-y", "h100", "--minibatch", 8)
    run = (*line, "--schedules", "1f1b", "--launcher", launcher)
    notes = " ".join(answer(*run).get("notes", ()))
    assert ("torchtitan itself, without module names, gives the first" in notes) == differs
