"""Settings of launchers for a layout: their names, and what they lack."""

import dataclasses
import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from daily import read_cases, with_cases
from launch_reader import read_launch
from legal_sizes import build

import pipejax as pj
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.plans import plan_view
from pipejax.costs.model import launchers
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.system import data_file
from pipejax.sweep import run_sweep
from pipejax.sweep.plan.layouts import PlanRequest, enumerate_layouts, layout_workload

LLAMA = pj.load_model("llama3-8b")  # 32 layers
# options of Megatron-LM core 0.20, of torchtitan 0.2.2 and of DeepSpeed that a layout can need
DATA = Path(__file__).parent / "data"
OPTIONS = json.loads((DATA / "launcher_options.json").read_text())
TEXTS = json.loads((DATA / "launcher_texts.json").read_text())  # of runs of Llama 3 8B
LINES = {name: " ".join(TEXTS[name]) for name in ("Megatron-LM", "Megatron-Bridge", "torchtitan")}
EIGHTS = {"expert_parallel": 8, "data_parallel": 4}
JOB = ("-y", "h100", "-s", "1f1b", "-P", 4, "-M", 8, "--minibatch", 8)
BESIDE = "experts beside compute"
ONE_STAGE = "one stage for each worker (it needs several)"
EAGER = ("--stack", "torchtitan-2024-eager")
TITAN = ("--sequence-parallel", "--zero", 1, "--embedding-units", 1, "--loss-units", 1)
SPLIT = (*JOB, "--tensor-parallel", 2, "--data-parallel", 2)
PLANNED = ("plan", "-m", "llama3-8b", "-y", "h100", "--gpus", 8, "--minibatch", 8, "--pipeline", 2)
NO_CONTEXT = "context above 1: DeepSpeed lacks context parallelism"
LONG = dataclasses.replace(LLAMA, sequence=32768)  # which only recomputation makes fit
HIDDEN_EXPERTS = ("1f1b", "interleaved-1f1b", "combined-1f1b")
SPREAD = {"expert_parallel": 8, "data_parallel": 8, "zero": 1}
WHOLE = ("1f1b", "interleaved-1f1b", "interleaved-zb")
FULL = {"recompute": "full"}
UNEVEN = ["-m", "llama3-70b", "-y", "h100", "--launcher", "torchtitan"]
ONE_PIPE = ["-s", "1f1b", "-P", 4, "-M", 16, "--minibatch", 16]
SHARDED = ["--data-parallel", 8, "--zero", 1, "--tensor-parallel", 8, "--sequence-parallel"]


def launcher_settings(schedule="1f1b", workers=4, model=LLAMA, **arguments):
    """Return the settings of three launchers."""
    options = {"stages_per_worker": arguments.pop("stages")} if "stages" in arguments else {}
    table = build(schedule, workers, 8, **options)
    result = pj.costing.launches(pj.Workload(model, minibatch=16, **arguments), table)
    assert [launch.launcher for launch in result] == [*launchers.LAUNCHERS]
    result = [result[k] for k in (0, 2, 3)]
    assert [launch.launcher for launch in result] == ["Megatron-LM", "torchtitan", "DeepSpeed"]
    assert all({*launch.options} <= {*OPTIONS[launch.launcher]} for launch in result)
    return result


def test_degrees_batches_and_stages():
    megatron, torchtitan, deepspeed = launcher_settings(data_parallel=2, zero=0)
    assert (megatron.text, torchtitan.text) == (LINES["Megatron-LM"], LINES["torchtitan"])
    text, program = deepspeed.text.split("\nin code: ")
    assert (json.loads(text), program) == (TEXTS["DeepSpeed"], TEXTS["PipelineModule"])
    assert megatron.lacks == deepspeed.lacks == ()
    why = "replicas that split nothing beside other parallelism (it has ZeRO 1 in a pipeline)"
    assert torchtitan.lacks == (why,)


@with_cases("arguments names", *read_cases("test_launchers_are_told_what_travels_beside_compute"))
def test_launchers_are_told_what_travels_beside_compute(arguments, names):
    megatron, torchtitan, deepspeed = launcher_settings(**arguments)
    flags = {"overlap-grad-reduce": "grad-reduce", "overlap-param-gather": "param-gather"}
    flags["tp-comm-overlap"] = "tp-comm"
    assert [short for name, short in flags.items() if name in megatron.options] == names.split()
    is_async = "parallelism.enable_async_tensor_parallel" in torchtitan.options
    lacks = "tensor parallelism beside compute" in deepspeed.lacks
    assert (is_async, lacks) == (("tp-comm" in names),) * 2


def test_megatron_is_told_of_gradients_that_it_would_accumulate_wider():
    wide = dataclasses.replace(LLAMA, gradient_bytes=4.0)
    result = [launcher_settings(model=model)[0].options for model in (LLAMA, wide)]
    assert ["grad-reduce-in-bf16" in options for options in result] == [True, False]


def test_layers_that_are_not_spread_evenly_are_named():
    model = dataclasses.replace(LLAMA, layers=30)
    megatron, torchtitan, deepspeed = launcher_settings(model=model, zero=3, data_parallel=2)
    layout = megatron.options["pipeline-model-parallel-layout"]
    assert pj.costing.PipelineLayout.parse(layout).count("t").tolist() == [7, 8, 8, 7]
    assert layout in shlex.split(megatron.text)
    names = torchtitan.options["parallelism.module_fqns_per_model_part"]
    assert [len(name) for name in names] == [8, 8, 8, 9]
    words = shlex.split(torchtitan.text)
    place = words.index("--parallelism.module_fqns_per_model_part")
    assert [word.split(",") for word in words[place + 1 : place + 5]] == names
    assert torchtitan.lacks == ("ZeRO 3 in a pipeline (it has 0 and 1)",)
    assert sorted(deepspeed.lacks) == [*torchtitan.lacks, "stages with unequal layers"]
    # embedding and head count as one layer each: torchtitan says so, Megatron takes the layout
    megatron, torchtitan, _ = launcher_settings(model=model, embedding_units=1, loss_units=1)
    assert "pipeline-model-parallel-layout" in megatron.options
    less = "parallelism.pipeline_parallel_{}_stage_less_layers"
    assert [torchtitan.options[less.format(end)] for end in ("first", "last")] == [1, 1]
    assert torchtitan.options["parallelism.pipeline_parallel_layers_per_stage"] == 8


@with_cases("zero megatron reshard", *read_cases("test_what_replicas_split"))
def test_what_replicas_split(zero, megatron, reshard):
    single, torchtitan, _ = launcher_settings(workers=1, zero=zero, data_parallel=4)
    assert single.options["data-parallel-sharding-strategy"] == megatron
    assert single.options["use-megatron-fsdp"] is True
    assert single.options["use-distributed-optimizer"] is True
    assert torchtitan.options["parallelism.data_parallel_shard_degree"] == 4
    assert torchtitan.options["parallelism.fsdp_reshard_after_forward"] == reshard
    assert not torchtitan.lacks
    lacking = launcher_settings(workers=1, zero=1, data_parallel=4)[1].lacks
    assert lacking == ("ZeRO 1 without a pipeline (it has 0, 2 and 3)",)


@with_cases(
    # heads of keys and values: Llama 3 8B has 8, Qwen3.5 with experts 2, Phi-4 10
    "kv_heads tensor runs",
    *[(8, 8, True), (8, 16, False), (2, 2, True), (2, 4, False), (10, 4, False), (10, 5, True)],
)
def test_torchtitan_copies_no_heads_of_keys_and_values(kv_heads, tensor, runs):
    model = dataclasses.replace(LLAMA, heads=4 * kv_heads, kv_heads=kv_heads, head_width=128)
    split = {"tensor_parallel": tensor, "sequence_parallel": True}
    megatron, torchtitan, _ = launcher_settings(model=model, **split)
    heads = f"copies of {kv_heads} heads of keys and values"
    lacks = [lack.partition(" (")[0] for lack in torchtitan.lacks]
    assert (megatron.lacks, lacks) == ((), [] if runs else [heads])


@with_cases("recompute words lacks", *read_cases("test_recomputation"))
def test_recomputation(recompute, words, lacks):
    result = launcher_settings(recompute=recompute)
    assert words in result[0].text
    assert [len(launch.lacks) for launch in result] == lacks
    mode = result[1].options["activation_checkpoint.mode"]
    assert mode == {"full": "full", "half_products": "selective"}.get(recompute, "none")


@with_cases(
    "schedule options name",
    *read_cases("test_torchtitan_places_stages_of_a_file_as_the_named_schedule"),
)
def test_torchtitan_places_stages_of_a_file_as_the_named_schedule(schedule, options, name):
    torchtitan = pj.costing.pipeline_launches(build(schedule, 4, 8, **options))[2]
    assert torchtitan.options.get("parallelism.pipeline_parallel_schedule") == name
    assert torchtitan.options["parallelism.pipeline_parallel_schedule_csv"] == f"{schedule}.csv"
    lacks = [lack.partition(" (")[0] for lack in torchtitan.lacks]
    assert lacks == ([] if name else ["these places of stages"])


def megatron_forwards(microbatches, chunks, size):
    """Return the forwards of a worker, as microbatch and chunk, as Megatron-LM orders them."""
    groups = [range(k, min(k + size, microbatches)) for k in range(0, microbatches, size)]
    return [(m, chunk) for group in groups for chunk in range(chunks) for m in group]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "combined-1f1b"])
@pytest.mark.parametrize("stages", [2, 3])
def test_megatron_has_the_groups_of_the_table_or_refuses_them(schedule, stages):
    workers, unequal = 4, {13: 7, 17: 6, 18: 6, 21: 7}  # 5 4 4; 5 4 4 4; 5 5 4 4; 5 4 4 4 4
    for microbatches in range(2, 22):
        table = build(schedule, workers, microbatches, stages_per_worker=stages)
        megatron, bridge, _ = pj.costing.pipeline_launches(table)
        flag = megatron.options.get("microbatch-group-size-per-virtual-pipeline-stage")
        assert bridge.options.get("model.microbatch_group_size_per_vp_stage") == flag
        assert megatron.lacks == bridge.lacks
        if microbatches in unequal or microbatches < workers:
            where = f"with --group-size {unequal.get(microbatches)}"
            where = where if microbatches in unequal else "from 4 on"
            why = f"these groups of {microbatches} microbatches (it works {where})"
            assert (flag, megatron.lacks) == (None, (why,))
            continue
        count = flag or workers  # Megatron-LM's default
        assert megatron.lacks == ()
        assert workers <= count <= microbatches
        assert not 0 < microbatches % count < workers
        names = "F" if table.grammar.is_usual else "Fa Fd Fm Fc"
        ops = [op for cell in next(iter(table.rows())) for op in cell if op.phase.name in names]
        order = dict.fromkeys((op.microbatch, op.stage // workers) for op in ops)
        assert [*order] == megatron_forwards(microbatches, stages, count)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "combined-1f1b"])
@pytest.mark.parametrize(("size", "flag"), [(4, None), (8, 8), (16, 16)])
def test_a_group_size_of_the_user_is_in_the_command(schedule, size, flag):
    table = build(schedule, 4, 16, stages_per_worker=2, group_size=size)
    megatron, _, torchtitan = pj.costing.pipeline_launches(table)
    name = "microbatch-group-size-per-virtual-pipeline-stage"
    assert (megatron.options.get(name), megatron.lacks) == (flag, ())
    if schedule == "interleaved-1f1b":  # PyTorch has groups of the workers alone
        assert ("parallelism.pipeline_parallel_schedule_csv" in torchtitan.options) == bool(flag)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zb"])
@with_cases(
    "microbatches is_named",
    *read_cases("test_torchtitan_names_interleaved_schedules_of_equal_groups"),
)
def test_torchtitan_names_interleaved_schedules_of_equal_groups(schedule, microbatches, is_named):
    table = build(schedule, 4, microbatches, stages_per_worker=2)
    torchtitan = pj.costing.pipeline_launches(table)[2]
    assert ("parallelism.pipeline_parallel_schedule_csv" in torchtitan.options) != is_named


def test_what_launchers_lack():
    fields = {"tensor_parallel": 2, "context_parallel": 2, "rank_order": "tp-pp-dp"}
    megatron, torchtitan, deepspeed = launcher_settings("zb-h1", **fields)
    assert megatron.lacks == ("schedule zb-h1 (it has 1f1b and interleaved-1f1b)",)
    assert torchtitan.options["parallelism.pipeline_parallel_schedule_csv"] == "zb-h1.csv"
    assert [re.match(r"[a-z ]+", lack)[0].strip() for lack in torchtitan.lacks] == [
        "context parallelism of weights that are not split",
        "tensor parallelism without sequence parallelism",
        "rank order tp",
    ]
    assert deepspeed.lacks == ("schedule zb-h1 (it has 1f1b)", "context parallelism")
    assert launcher_settings("chimera")[1].lacks == ("schedules of several pipes",)
    assert "parallelism.pipeline_parallel_schedule" not in launcher_settings("chimera")[1].options
    # one worker has no schedule
    assert launcher_settings("zb-h1", workers=1)[0].lacks == ()


@with_cases("degrees parts", *read_cases("test_the_parts_of_experts_are_always_in_the_command"))
def test_the_parts_of_experts_are_always_in_the_command(degrees, parts):
    how = {"model": pj.load_model("mixtral-8x7b"), "sequence_parallel": True}
    megatron, torchtitan, deepspeed = launcher_settings(**how, **degrees)
    assert megatron.options["expert-tensor-parallel-size"] == parts
    spread = degrees.get("expert_parallel", 1)
    assert megatron.options.get("expert-model-parallel-size", 1) == spread
    assert torchtitan.options.get("parallelism.expert_parallel_degree", 1) == spread
    assert deepspeed.options.get("expert_parallel", {}).get("autoep_size", 1) == spread
    assert torchtitan.options.get("parallelism.expert_tensor_parallel_degree", 1) == parts
    assert bool([text for text in torchtitan.lacks if "parts" in text]) == (parts == 2)
    dense = launcher_settings(model=pj.load_model("llama3-8b"), tensor_parallel=8)[0].options
    assert "expert-tensor-parallel-size" not in dense


def test_torchtitan_reads_tables_of_compute_alone():
    table = build("zb-h1", 2, 4)
    lacks = pj.costing.pipeline_launches(pj.links.insert_transfers(table))[2].lacks
    assert lacks == ("tables with SEND and RECV (it reads compute alone)",)
    assert pj.costing.pipeline_launches(table)[2].lacks == ()


def test_megatron_bridge_takes_the_options_of_megatron_as_fields_of_its_records():
    table = build("interleaved-1f1b", 4, 8)
    workload = pj.Workload(LLAMA, 16, tensor_parallel=2, sequence_parallel=True, data_parallel=2)
    workload = dataclasses.replace(workload, zero=1, overlap=1.0, tensor_overlap=1.0)
    (bridge,) = pj.costing.launches(workload, table, "megatron-bridge")
    assert bridge.lacks == ()
    assert bridge.text == LINES["Megatron-Bridge"]


# MaxText asserts stages x repeats x layers per stage = decoder layers, which it counts in pairs of a
# local and a global layer: 21 for gemma2-9b, 23 for gemma2-27b. Other turns are blocks of several
# layers only without a pipeline.
@with_cases(
    "layers windowed experts workers stages per_stage",
    *read_cases("test_maxtext_splits_layers_in_pairs"),
)
def test_maxtext_splits_layers_in_pairs(layers, windowed, experts, workers, stages, per_stage):
    base = pj.load_model("gpt-oss-120b") if experts else LLAMA
    window = 128 if windowed else None
    model = dataclasses.replace(base, layers=layers, windowed_layers=windowed, window=window)
    table = build("circular", workers, workers * 2, stages_per_worker=stages)
    workload = pj.Workload(model, workers * 2, recompute="full")
    (launch,) = pj.costing.launches(workload, table, "MaxText")
    assert bool(launch.lacks) == (per_stage is None), launch.lacks
    assert all("with and without a window" in text for text in launch.lacks)
    if per_stage is not None:
        assert launch.options.get("num_layers_per_pipeline_stage", 0) == per_stage
        pairs = layers // 2 if 2 * windowed == layers else layers
        assert per_stage == 0 or workers * stages * per_stage == pairs


def test_maxtext_has_two_schedules_and_full_recomputation():
    table = build("circular", 4, 8)
    workload = pj.Workload(LLAMA, 16, tensor_parallel=2, data_parallel=4, zero=3, recompute="full")
    (maxtext,) = pj.costing.launches(workload, table, "MaxText")
    assert maxtext.lacks == ()
    # 64 sequences on 32 accelerators, 32 layers in 8 stages
    assert maxtext.options == TEXTS["MaxText"]
    (once,) = pj.costing.launches(dataclasses.replace(workload, zero=1), table, "MaxText")
    assert once.lacks == ()
    assert once.options == maxtext.options | {"pipeline_fsdp_ag_once": True}
    other = dataclasses.replace(workload, zero=2, recompute="none")
    table = build("1f1b", 4, 6)
    other = dataclasses.replace(other, minibatch=6)
    (lacking,) = pj.costing.launches(other, table, "MaxText")
    assert [text.split()[0] for text in lacking.lacks] == ["schedule", "6", "ZeRO", "recomputation"]


@with_cases(
    "schedule microbatches options lacking",
    *read_cases("test_a_launcher_has_a_schedule_by_any_of_its_names"),
)
def test_a_launcher_has_a_schedule_by_any_of_its_names(schedule, microbatches, options, lacking):
    table = build(schedule, 2, microbatches, **options)
    launches = pj.costing.launches(pj.Workload(LLAMA, 8, recompute="full"), table)
    lacks = [x.launcher for x in launches if any(t.startswith("schedule ") for t in x.lacks)]
    assert lacks == lacking.split()
    named = launches[2].options["parallelism.pipeline_parallel_schedule"]
    names = {"1f1b": "1F1B", "seq-1f1b": "1F1B", "gpipe": "GPipe", "terapipe": "GPipe"}
    if schedule in names:
        assert named == names[schedule]


# on nodes of 8, or of others: axes inside a node and between nodes, by hand; 9 places beside tensor
# parallelism hold 8 of 16 replicas
@with_cases("fields axes", *TEXTS["axes of MaxText"])
def test_maxtext_has_axes_inside_nodes_and_between_them(fields, axes):
    fields = dict(fields)
    workers, per_node = fields.pop("workers", 1), fields.pop("per_node", 8)
    table = build("gpipe", workers, 8)
    workload = pj.Workload(LLAMA, minibatch=8, overlap=1.0, **fields)
    (launch,) = pj.costing.launches(workload, table, "maxtext", per_node=per_node)
    names = {k: v for k, v in launch.options.items() if k.endswith("_parallelism")}
    assert names == {f"{name}_parallelism": count for name, count in axes.items()}
    assert launch.text.startswith("XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true ")


def test_tune_splits_the_axes_of_maxtext_over_nodes(answer):
    job = ("-s", "gpipe", "-P", 1, "-m", "llama3-8b", "-y", "h100", "--minibatch", 2)
    job += ("--data-parallel", 32, "--zero", 3, "--recompute", "full", "--launcher", "maxtext")
    options = answer("tune", "size", *job)["launch"]["MaxText"]["options"]
    axes = {k: v for k, v in options.items() if k.endswith("_parallelism")}
    assert axes == {"ici_fsdp_parallelism": 8, "dcn_fsdp_parallelism": 4}


@with_cases("schedule fields lacks", *read_cases("test_experts_beside_compute"))
def test_experts_beside_compute(schedule, fields, lacks):
    options = {} if schedule == "1f1b" else {"stages_per_worker": 2}
    table = build(schedule, 2, 8, **options)
    spread = {"expert_parallel": 8, "data_parallel": 8, "expert_overlap": 1.0}
    workload = pj.Workload(pj.load_model("mixtral-8x7b"), minibatch=8, **spread | fields)
    megatron, bridge, *others = pj.costing.launches(workload, table)
    assert megatron.program == "CUDA_DEVICE_MAX_CONNECTIONS=32"
    assert megatron.options["moe-token-dispatcher-type"] == "alltoall"
    assert megatron.options["overlap-moe-expert-parallel-comm"] is True
    assert bridge.options["comm_overlap"]["overlap_moe_expert_parallel_comm"] is True
    assert len(megatron.lacks) == bool(lacks)
    assert all(text.startswith(f"experts beside {lacks}") for text in megatron.lacks)
    by_schedule = schedule == "combined-1f1b"
    assert all(("experts beside compute" in launch.lacks) != by_schedule for launch in others)
    assert all(launch.lacks for launch in others)


@with_cases(
    "schedule stages fields lacks",
    *read_cases("test_the_order_of_experts_beside_compute_has_needs"),
)
def test_the_order_of_experts_beside_compute_has_needs(schedule, stages, fields, lacks):
    table = build(schedule, 2, 8, stages_per_worker=stages)
    workload = pj.Workload(pj.load_model("mixtral-8x7b"), minibatch=8, **fields)
    (megatron,) = pj.costing.launches(workload, table, "Megatron-LM")
    has_flag = "overlap-moe-expert-parallel-comm" in megatron.options
    assert (has_flag, megatron.lacks) == ((True, (lacks,)) if lacks else (False, ()))
    alone = pj.costing.pipeline_launches(table)[0]
    assert ("overlap-moe-expert-parallel-comm" in alone.options) == (schedule == "combined-1f1b")


@with_cases("fields count", *read_cases("test_megatron_has_the_queues_that_it_asks_for"))
def test_megatron_has_the_queues_that_it_asks_for(fields, count):
    table = build("1f1b", 2, 8)
    workload = pj.Workload(LLAMA, minibatch=8, **fields)
    (megatron,) = pj.costing.launches(workload, table, "Megatron-LM")
    words = f"CUDA_DEVICE_MAX_CONNECTIONS={count} " if count else ""
    assert megatron.text.startswith(f"{words}--micro-batch-size 1 ")


@pytest.mark.parametrize("launcher", ["Megatron-LM", "Megatron-Bridge"])
@with_cases("schedule fields name", *read_cases("test_before_blackwell_tensor_overlap_goes_alone"))
def test_before_blackwell_tensor_overlap_goes_alone(launcher, schedule, fields, name):
    table = build(schedule, 2, 8, stages_per_worker=2)
    base = {"tensor_parallel": 2, "sequence_parallel": True, "tensor_overlap": 1.0}
    base |= {"expert_parallel": 8, "data_parallel": 8, "expert_tensor_parallel": 1}
    workload = pj.Workload(pj.load_model("mixtral-8x7b"), minibatch=8, **base | fields)
    why = f"{name} and tensor parallelism beside compute before Blackwell "
    why += "(CUDA_DEVICE_MAX_CONNECTIONS serves one)"
    for system, is_before in {"a100": True, "h100": True, "b200": False, "gb300": False}.items():
        machine = pj.load_system(system)
        (launch,) = launchers.machine_launches(workload, table, machine, "", launcher)
        assert launch.lacks == ((why,) if name and is_before else ())
        alone = dataclasses.replace(workload, tensor_overlap=0.0)
        assert launchers.machine_launches(alone, table, machine, "", launcher)[0].lacks == ()


@with_cases(
    "launcher options same", *read_cases("test_launcher_defaults_are_below_options_and_stacks")
)
def test_launcher_defaults_are_below_options_and_stacks(answer, tmp_path, launcher, options, same):
    wide = json.loads(data_file("models", "llama3-8b", "model").read_text())
    (tmp_path / "wide.json").write_text(json.dumps(wide | {"gradient_bytes": 4}))
    stack = options if "--stack" in options else ()
    expected = answer("evaluate", "-m", tmp_path / "wide.json", *SPLIT, *stack, *same)
    result = answer("evaluate", "-m", "llama3-8b", *SPLIT, "--launcher", launcher, *options)
    for key in ("makespan", "memory_bytes"):
        assert result[key] == expected[key]
    assert [*result["launch"]] == [launchers.find_launcher(launcher).name]


def test_torchtitan_counts_embedding_and_head_as_layers_unless_options_say_otherwise(answer):
    job = ("-s", "1f1b", "-M", 8, "-m", "llama3-8b", "-y", "h100", "--minibatch", 8)
    job += ("--launcher", "torchtitan")
    layout = "Et*4|t*5|(t*4|)*5tttL"  # 34 units on 8 stages as torchtitan's own rule has them
    for options, layers in (
        (("-P", 8), [3, 4, 4, 5, 5, 4, 4, 3]),
        (("-P", 8, "--loss-units", 0), [3, 4, 4, 5, 4, 4, 4, 4]),  # 33 units
        (("-P", 8, "--pipeline-layout", layout), [4, 5, 4, 4, 4, 4, 4, 3]),
        (("-P", 1), [32]),
    ):
        assert answer("evaluate", *job, *options)["layers_of_stages"] == layers
    rows = answer("compare", "-S", "1f1b", "-P", 8, *job[2:])["rows"]
    step = answer("evaluate", *job, "-P", 8)["makespan"]
    explained = answer("explain", *job, "-P", 8, "--schedules", "1f1b")
    assert rows[0]["makespan"] == step == explained["step_time"]


@with_cases(
    "stack is_compiled",
    *read_cases("test_torchtitan_is_told_to_compile_where_the_stack_fuses_kernels"),
)
def test_torchtitan_is_told_to_compile_where_the_stack_fuses_kernels(answer, stack, is_compiled):
    options = ("--stack", stack) if stack else ()
    run = ("-m", "llama3-8b", "-y", "h100", "--minibatch", 8, "--launcher", "torchtitan", *options)
    pipeline = ("-s", "1f1b", "-P", 2, "-M", 8)
    planned = ("--gpus", 8, "--pipeline", 2, "--tensor", 2, "--microbatch-size", 1)
    for command in (
        ("evaluate", *pipeline, *run),
        ("plan", *planned, *run),
        ("tune", "size", "-s", "1f1b", "-P", 2, *run),
    ):
        launch = answer(*command)["launch"]["torchtitan"]
        assert ("compile.enable" in launch["options"]) == is_compiled, command


@with_cases(
    "zero overlap option",
    *read_cases("test_deepspeed_is_told_whether_exchanges_are_beside_compute"),
)
def test_deepspeed_is_told_whether_exchanges_are_beside_compute(zero, overlap, option):
    # its default is true at stage 3 alone, so a price without overlap needs the option
    table = build("1f1b", 1, 4)
    workload = pj.Workload(LLAMA, minibatch=4, data_parallel=8, zero=zero, overlap=overlap)
    (launch,) = pj.costing.launches(workload, table, "DeepSpeed")
    assert launch.options["zero_optimization"].get("overlap_comm") is option


@pytest.mark.parametrize(("zero", "overlap"), [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0)])
@pytest.mark.parametrize("option", [None, 0.0, 1.0])
def test_deepspeed_overlaps_exchanges_by_default_at_zero_3(answer, tmp_path, zero, overlap, option):
    """DeepSpeed's zero/config.py sets overlap_comm to `stage == 3` where no file does."""
    table = build("1f1b", 1, 4)
    machine = pj.load_system("a100-40gb")
    priced = overlap if option is None else option
    fields = {"minibatch": 4, "data_parallel": 32, "zero": zero, "overlap": priced}
    expected = pj.Workload(pj.load_model("mpt-7b"), **fields)
    step = pj.evaluate(table, pj.stage_costs(expected, machine, table)).step_time
    job = ["-m", "mpt-7b", "-y", "a100-40gb", "--launcher", "DeepSpeed", "--zero", zero]
    job += [] if option is None else ["--overlap", option]
    layout = ["-s", "1f1b", "-P", 1, "-M", 4, "--minibatch", 4, "--data-parallel", 32]
    assert answer("evaluate", *layout, *job)["makespan"] == pytest.approx(step, rel=1e-9)
    grid = {"schedules": "1f1b", "workers": 1, "microbatches": 4, "models": "mpt-7b"}
    grid |= {"systems": "a100-40gb", "launcher": "DeepSpeed", "minibatch": 4}
    grid |= {"data_parallel": 32, "zero": zero} | ({} if option is None else {"overlap": option})
    point = run_sweep(grid, tmp_path / "sweep").load()
    if zero in (0, 1) and option == 1.0:  # which DeepSpeed lacks
        return
    assert point.step_time.item() == pytest.approx(step, rel=1e-9)
    plan = ["--gpus", 32, "--minibatch", 128, "--microbatch-size", 1, "--recompute", "none"]
    plan += ["--data", 32]
    if expected.zero == 3 or pj.memory_bytes(expected, table).max() < 36e9:
        result = answer("plan", *plan, *job)
        assert result["best"]["step_time"] == pytest.approx(step, rel=1e-9)
        again = answer(*shlex.split(result["next"][0].removeprefix("pipejax ")))
        assert again["makespan"] == pytest.approx(step, rel=1e-9)
        options = result["launch"]["DeepSpeed"]["options"]
        has_overlap = options["zero_optimization"].get("overlap_comm", False)
        assert has_overlap == bool(expected.overlap)


@with_cases(
    "workers data zero overlap is_lacked",
    *read_cases("test_deepspeed_overlaps_from_zero_2_without_a_pipeline"),
)
def test_deepspeed_overlaps_from_zero_2_without_a_pipeline(workers, data, zero, overlap, is_lacked):
    table = build("1f1b", workers, 8)
    workload = pj.Workload(LLAMA, 8, data_parallel=data, zero=zero, overlap=overlap)
    (launch,) = pj.costing.launches(workload, table, "DeepSpeed")
    assert any("beside compute" in feature for feature in launch.lacks) == is_lacked
    scenario = pj.Scenario(table, costs=pj.costing.ModelCosts(workload, pj.load_system("h100")))
    for remedy in pj.explain(scenario, schedules=["1f1b"], launcher="DeepSpeed").remedies:
        if remedy.launchers and (workers > 1 or remedy.scenario.source.workload.zero < 2):
            assert remedy.scenario.source.workload.overlap == 0 or data == 1, remedy.what


@with_cases(
    "launcher options says_eager",
    *read_cases("test_a_plan_says_that_kernels_are_eager_and_how_to_compile"),
)
def test_a_plan_says_that_kernels_are_eager_and_how_to_compile(call, launcher, options, says_eager):
    run = ("-m", "llama3-8b", "-y", "h100", "--gpus", 8, "--minibatch", 8, "--pipeline", 2)
    text = call("plan", *run, "--tensor", 2, "--launcher", launcher, *options)[1]
    (line,) = (line for line in text.splitlines() if line.startswith("assumes: "))
    assert ("eager kernels, not compiled (change: --stack torchtitan-2024)" in line) == says_eager


@with_cases(
    "workers overlap text", *read_cases("test_a_plan_says_that_other_stages_hide_exchanges")
)
def test_a_plan_says_that_other_stages_hide_exchanges(call, workers, overlap, text):
    run = ("-m", "llama3-8b", "-y", "h100", "--gpus", 8, "--minibatch", 8, "--tensor", 1)
    result = call("plan", *run, "--pipeline", workers, "--zero", 1, "--overlap", overlap)[1]
    (line,) = (line for line in result.splitlines() if line.startswith("assumes: "))
    text = text.format("the stage's own compute", "during backwards of other stages")
    assert f"exchanges of gradients and weights {text} (change: --overlap)" in line


# by launcher and precision, as its documentation names them; None if it has none
PRECISIONS = {(name, x): texts[x] for name, texts in TEXTS["precisions"].items() for x in texts}


@pytest.mark.parametrize(("launcher", "precision"), PRECISIONS)
def test_options_have_the_precision(launcher, precision):
    table = build("1f1b", 2, 4)
    words = PRECISIONS[launcher, precision]
    workloads = [pj.Workload(LLAMA, 8, precision=name) for name in ("bf16", precision)]
    wide, narrow = (pj.costing.launches(x, table, launcher)[0] for x in workloads)
    if words is None:
        assert any(text.startswith(f"precision {precision} (it has bf16") for text in narrow.lacks)
    else:
        assert words in narrow.text
        assert words not in wide.text
        assert narrow.lacks == wide.lacks


def test_megatrons_have_an_option_of_graphs():
    # full recomputation is refused beside graphs of layers, which some recipes of Bridge have
    table = build("1f1b", 2, 4)
    for graphs, (megatron, bridge) in ((0.0, (None, "none")), (1.0, ("transformer_engine",) * 2)):
        workload = pj.Workload(LLAMA, minibatch=4, graphs=graphs)
        (launch,) = pj.costing.launches(workload, table, "Megatron-LM")
        assert launch.options.get("cuda-graph-impl") == megatron
        (launch,) = pj.costing.launches(workload, table, "Megatron-Bridge")
        assert launch.options.get("model.cuda_graph_impl") == bridge


def test_options_have_the_sequence_length():
    names = {"Megatron-LM": "seq-length", "Megatron-Bridge": "model.seq_length"}
    names |= {"torchtitan": "training.seq_len", "MaxText": "max_target_length"}
    table = build("1f1b", 4, 8)
    # also where it is that of the model's file: torchtitan and MaxText take 2048 by default
    for model, length in ((LLAMA, 8192), (dataclasses.replace(LLAMA, sequence=4096), 4096)):
        for launch in pj.costing.launches(pj.Workload(model, minibatch=8), table):
            value = launch.options.get(names.get(launch.launcher))
            assert value == (length if launch.launcher in names else None)


def test_what_the_launcher_lacks_is_named_or_left_out(call, answer):
    times = ("-P", 4, "-M", 8, "-T", "F=1,I=1,W=1", "--launcher", "megatron-lm")
    why = "Megatron-LM lacks schedule zb-h1 (it has 1f1b and interleaved-1f1b)"
    assert why in " ".join(call("evaluate", "-s", "zb-h1", *times)[2].split())
    rows = answer("compare", "-S", "1f1b,zb-h1", *times)["rows"]
    assert [row.get("error") for row in rows] == [None, why]
    replicas = ("--zero", 2, "--data-parallel", 2, "--launcher", "torchtitan")
    shown = call("explain", "-m", "llama3-8b", *JOB, *replicas, "--schedules", "1f1b")
    why = "torchtitan lacks ZeRO 2 in a pipeline (it has 0 and 1)"
    assert why in " ".join(shown[2].split())


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
def test_a_plan_for_a_launcher_has_the_layouts_that_it_runs():
    names = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b")
    choices = {"pipeline": [2], "tensor": [1, 2], "stages_per_worker": [1, 2], "zero": [0, 1, 3]}
    choices |= {"microbatch_size": [1], "recompute": ["none", "full", "block:2"]}
    request = PlanRequest(LLAMA, pj.load_system("h100"), 8, 16, names, choices)
    layouts, runs = enumerate_layouts(request), []
    for row, (place, workers, stages) in enumerate(zip(*layouts[:3], strict=True)):
        options = {"stages_per_worker": int(stages)} if stages > 1 else {}
        size = {"num_workers": int(workers), "num_microbatches": int(layouts.microbatches[row])}
        table = pj.schedules.build(names[place], **size, **options)
        workload = layout_workload(request, layouts, row)
        # a plan for DeepSpeed has tensor parallelism without sequence parallelism
        jobs = dict.fromkeys(launchers.LAUNCHERS, workload)
        jobs["DeepSpeed"] = dataclasses.replace(workload, sequence_parallel=False)
        launches = [pj.costing.launches(job, table, name)[0] for name, job in jobs.items()]
        runs.append([not launch.lacks for launch in launches])
    for launcher, is_run in zip(launchers.LAUNCHERS, np.array(runs).T, strict=True):
        result = enumerate_layouts(dataclasses.replace(request, launcher=launcher))
        assert 0 < len(result) < len(layouts)
        for column, expected in zip(result, layouts.take(is_run), strict=True):
            np.testing.assert_array_equal(column, expected)


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
@with_cases(
    "launcher model system tensor is_split",
    *read_cases("test_plans_split_sequences_as_launchers_do"),
)
def test_plans_split_sequences_as_launchers_do(launcher, model, system, tensor, is_split, answer):
    choices = {"tensor": [tensor], "pipeline": [1, 2], "recompute": ["full"], "zero": [0, 1]}
    job = {"gpus": 16, "minibatch": 32, "schedules": "1f1b", "choices": choices}
    result = pj.plan(model, system, launcher=launcher, exhaustive=True, runners_up=20, **job)
    assert result.fitting > 0
    for layout in (result.best, *result.runners_up, *result.outside):
        assert layout.layout["sequence_parallel"] == is_split == layout.workload.sequence_parallel
        names = "tensor_parallel data_parallel expert_parallel zero recompute"
        fields = {name: getattr(layout.workload, name) for name in names.split()}
        fields = {f"--{name.replace('_', '-')}": value for name, value in fields.items()}
        fields |= {"--embedding-units": layout.layout["embedding_units"]}
        fields |= {"--loss-units": layout.layout["loss_units"]}
        words = [word for pair in fields.items() for word in pair]
        words += ["--minibatch", layout.workload.minibatch, "--launcher", launcher]
        words += ["--sequence-parallel"] if is_split else []
        run = ("-s", "1f1b", "-P", layout.layout["pipeline"], "-M", layout.layout["microbatches"])
        evaluated = answer("evaluate", *run, "-m", model, "-y", system, *words)
        assert layout.step_time == pytest.approx(evaluated["makespan"], rel=1e-9)
        assert evaluated["launch"][launcher]["lacks"] == []


@with_cases(
    "launcher options notices", *read_cases("test_a_plan_names_degrees_that_the_launcher_never_has")
)
def test_a_plan_names_degrees_that_the_launcher_never_has(launcher, options, notices, call):
    _, _, error = call(*PLANNED, "--launcher", launcher, *options)
    lines = error.splitlines()
    assert len(lines) == len(notices)
    for line, notice in zip(lines, notices, strict=True):
        assert line.startswith(f"warning: no layout has {notice}")


@with_cases("stack", "", "torchtitan-2024", "torchtitan-2024-eager")
def test_torchtitan_splits_sequences_from_both_ends(answer, stack):
    # attention of 131072 tokens takes most of the step; in order, the last of 8 accelerators has
    # 2 - 1/8 times the mean's pairs, so runs with and without the launcher would differ by half
    line = (
        "-s 1f1b -P 1 -M 2 -m llama3-8b -y a100 --minibatch 2 --sequence 131072 --data-parallel 4"
    )
    run = ("evaluate", *line.split(), "--context-parallel", 8, "--recompute", "half_products")
    kernels = ("--stack", stack) if stack else ()
    ours = answer(*run, *kernels, "--launcher", "torchtitan")["step_time"]
    assert ours == pytest.approx(answer(*run, "--zero", 3)["step_time"], rel=0.06)
    if stack:  # the runs of this stack were measured with sequences in order
        assert answer(*run, *kernels, "--zero", 3)["step_time"] > 1.5 * ours


def test_a_plan_says_what_other_defaults_change(answer, call):
    plan = answer(*PLANNED, "--tensor", 4, "-S", "1f1b")
    under = plan["under_launchers"]
    names = [entry["launchers"] for entry in under]
    assert names == [["Megatron-LM", "MaxText"], ["Megatron-Bridge"], ["torchtitan"]]
    for entry, (launcher, *_) in zip(under, names, strict=True):
        command = plan["next"][0].removeprefix("pipejax ").split()
        more = ("--zero", plan["best"]["layout"]["zero"], "--launcher", launcher)
        result = answer(*command, *more)
        assert entry["step_time"] == pytest.approx(result["makespan"], rel=1e-12)
        assert entry["memory_bytes"] == pytest.approx(max(result["memory_bytes"]), rel=1e-12)
        assert entry["fits"] == (entry["memory_bytes"] <= plan["room"])
    text = " ".join(call(*PLANNED, "--tensor", 4, "-S", "1f1b", "--launcher", "MaxText")[2].split())
    assert "MaxText lacks schedule 1f1b (it has gpipe and circular)" in text


@with_cases("launcher system options stack", *read_cases("test_a_plan_names_measured_stacks"))
def test_a_plan_names_measured_stacks(answer, answer_and_text, launcher, system, options, stack):
    job = ("plan", "-m", "llama3-8b", "-y", system, "--gpus", 16, "--minibatch", 32)
    line = (*job, "--tensor", 1, "--context", 1, "--launcher", launcher, *options)
    plan, text = answer_and_text(*line)
    text = " ".join(text.split())
    lead = f"with defaults of {launcher} and --stack {stack}, as in measured runs ("
    if stack is None:
        assert (plan["under_launchers"], lead in text) == ([], False)
        return
    (entry,) = plan["under_launchers"]
    assert (entry["launchers"], entry["stack"]) == ([launcher], stack)
    result = answer(*plan["next"][0].split()[1:], "--stack", stack)
    assert entry["step_time"] == pytest.approx(result["makespan"], rel=1e-12)
    assert entry["memory_bytes"] == pytest.approx(max(result["memory_bytes"]), rel=1e-12)
    bits = round(8 * entry["gradient_bytes"])
    assert f"{lead}{bits}-bit gradients): {seconds(entry['step_time'])}, " in text


def test_a_plan_says_what_memory_runs_of_the_launcher_took(answer, answer_and_text):
    rows = pj.validate(pj.files.DATA / "measured" / "torchtitan_h100.csv")
    are_wide = rows.measured.precision == "bf16"
    ratios = (rows.measured.memory_bytes / rows.predicted.memory_bytes)[are_wide]
    line = (*PLANNED, "--tensor", 2, "-S", "1f1b", "--recompute", "none", "--microbatch-size", 1)
    plan, text = answer_and_text(*line, "--launcher", "torchtitan")
    factors = plan["memory_factors"]
    # errors are stored in hundredths of a percent
    assert factors == pytest.approx(sorted(ratios), rel=2e-4)
    text = " ".join(text.split())
    assert f"took {factors[0]:.3g} to {factors[-1]:.3g} times the predicted memory (4" in text
    # no run in 16 bits has a pipeline, and those in 8 bits took more
    is_alike = (rows.measured.zero == 3) == (plan["best"]["layout"]["zero"] == 3)
    top = np.max((rows.measured.memory_bytes / rows.predicted.memory_bytes)[is_alike])
    zero = "ZeRO 3" if plan["best"]["layout"]["zero"] == 3 else "ZeRO 0 to 2"
    assert (f"with {zero} in other precisions up to {top:.3g} times" in text) == (top > factors[-1])
    assert answer(*line)["memory_factors"] == []


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
@with_cases(
    "launcher gpus sequence choices", *read_cases("test_a_plan_begins_with_what_fits_as_measured")
)
def test_a_plan_begins_with_what_fits_as_measured(launcher, gpus, sequence, choices):
    model, h100 = dataclasses.replace(LLAMA, sequence=sequence), pj.load_system("h100")

    def planned(limit=None):
        job = {"gpus": gpus, "minibatch": 64, "choices": choices, "launcher": launcher}
        return pj.plan(model, h100, **job, memory_limit=limit)

    plan = planned()
    factors = plan.request.memory_factors
    assert bool(factors) == (launcher == "torchtitan")
    sure = float(h100.memory_available) / max(factors, default=1.0)
    asked = planned(plan.request.usable_memory)  # a limit of the user's own: predictions decide
    assert asked.best.step_time <= plan.best.step_time
    is_sure = plan.best.memory_bytes <= sure
    faster = [entry for entry in plan.outside if is_sure and entry.memory_bytes > sure]
    fits = plan.estimates.memory_bytes <= sure
    if asked.best.memory_bytes <= sure or not fits.any():
        assert plan.best.layout == asked.best.layout
        assert not faster
    else:
        assert plan.best.layout == planned(sure).best.layout
        assert plan.best.memory_bytes <= sure
        assert faster[0].layout == asked.best.layout  # then those of other regimes
    text = "\n".join(str(line) for line in plan_view(plan))
    words = r"faster if it fits \((.*) GB at (.*) times the predicted memory\): (.*) with"
    named = re.findall(words, text)
    top = factors[-1] if factors else 1.0
    times = f"{top:.3g}"
    rows = [(f"{top * x.memory_bytes / 1e9:.3g}", times, seconds(x.step_time)) for x in faster]
    assert named == rows


@pytest.mark.parametrize("launcher", ["Megatron-LM", "torchtitan"])
def test_tune_keeps_to_the_recomputation_that_a_launcher_has(launcher):
    machine = pj.load_system("h100")
    workload = pj.Workload(LONG, minibatch=8, tensor_parallel=2, sequence_parallel=True)
    run = pj.Scenario("1f1b", 4, costs=pj.costing.ModelCosts(workload, machine))
    result = pj.tune(run, "recompute", microbatch_size=1, launcher=launcher)
    run, steps = run.replace(num_microbatches=8), {}
    for recompute in ("none", *(f"block:{count}" for count in range(1, 8)), "full"):
        changed = dataclasses.replace(workload, recompute=recompute)
        evaluation = run.with_workload(changed).evaluate()
        lacks = pj.costing.launches(changed, run.table(), launcher)[0].lacks
        needs = memory_bytes(changed, run.table()).max()
        if not lacks and needs <= machine.memory_available:
            steps[recompute] = evaluation.step_time
    best = min(steps, key=steps.get)
    assert result.best.workload.recompute == best
    assert result.value == pytest.approx(steps[best], rel=1e-9)
    assert best == {"Megatron-LM": "block:2", "torchtitan": "full"}[launcher]


def test_options_of_tuned_layers_give_their_step():
    costs = pj.costing.ModelCosts(pj.Workload(LLAMA, minibatch=8), pj.load_system("h100"))
    run = pj.Scenario("1f1b", 4, costs=costs)
    result = pj.tune(run, "size,layers", launcher="Megatron-LM", no_memory_limit=True)
    run, best = run.replace(num_microbatches=result.best.microbatches), result.best.workload
    assert best.pipeline_layout
    (megatron,) = pj.costing.launches(best, run.table(), "Megatron-LM")
    assert megatron.options["pipeline-model-parallel-layout"] == best.pipeline_layout
    assert read_launch(megatron, run).evaluate().step_time == pytest.approx(result.value, rel=1e-9)
    with pytest.raises(ValueError, match="DeepSpeed lacks schedule zb-h1"):
        pj.tune(run.replace(schedule="zb-h1"), launcher="DeepSpeed")


def test_a_launcher_of_a_sweep_has_its_defaults_and_lacks(tmp_path, answer):
    grid = {"schedules": ["1f1b", "zb-h1"], "workers": 4, "minibatch": 16, "microbatch_size": 1}
    grid |= {"models": "llama3-8b", "systems": "h100", "tensor_parallel": 2, "data_parallel": 2}

    def swept(**keys):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return run_sweep(grid | keys, path).load()

    run = ("-s", "1f1b", "-P", 4, "-M", 16, "-m", "llama3-8b", "-y", "h100", "--minibatch", 16)
    degrees = ("--tensor-parallel", 2, "--data-parallel", 2, "--launcher")
    data = swept(launcher=["megatron-bridge", "DeepSpeed"])
    assert data.launcher.values.tolist() == ["Megatron-Bridge", "DeepSpeed"]
    for point in (swept(launcher="torchtitan"), *(data.isel(launcher=k) for k in (0, 1))):
        single = answer("evaluate", *run, *degrees, point.launcher.item())
        point = point.sel(schedule="1f1b")
        assert point.step_time.item() == pytest.approx(single["makespan"], rel=1e-12)
        assert point.memory_bytes.item() == pytest.approx(max(single["memory_bytes"]), rel=1e-12)
    layout = "Et*8|t*8|t*8|t*8L"
    point = swept(launcher="torchtitan", pipeline_layout=layout).sel(schedule="1f1b")
    single = answer("evaluate", *run, *degrees, "torchtitan", "--pipeline-layout", layout)
    assert point.step_time.item() == pytest.approx(single["makespan"], rel=1e-12)
    lacks = (
        "Megatron-Bridge lacks schedule zb-h1 (it has 1f1b and interleaved-1f1b)",
        "DeepSpeed lacks schedule zb-h1 (it has 1f1b)",
    )
    assert data.reason.sel(schedule="zb-h1").values.tolist() == [*lacks]
    with pytest.raises(ValueError, match="h100 under Megatron-LM and h100 under torchtitan have"):
        swept(launcher=["Megatron-LM", "torchtitan"])


@pytest.mark.parametrize("recompute", ["full", "half_products"])
def test_checkpoints_of_pytorch_recompute_in_w_too(answer, tmp_path, recompute):
    # one autograd task for I and one for W: each unpacks the checkpoints
    job = ("-m", "llama3-8b", "-y", "h100", "--tensor-parallel", 2, "--data-parallel", 2)
    run = (*job, "--minibatch", 16, "--recompute", recompute, "--launcher", "torchtitan")
    split = ("-s", "interleaved-zb", "-P", 4, "-M", 16)
    single = answer("evaluate", *split, *run)
    table = build("interleaved-zb", 4, 16)
    record = launchers.find_launcher("torchtitan")
    llama, h100 = pj.load_model("llama3-8b"), pj.load_system("h100")
    model, stack, fields = launchers.launcher_defaults("torchtitan", llama, h100)
    assert fields["recompute_again"] is record.workload["recompute_again"] is True
    fields = fields | {"tensor_parallel": 2, "data_parallel": 2, "recompute": recompute}
    system = stack.on(pj.load_system("h100"))
    again = pj.Workload(model, 16, **fields)
    once = dataclasses.replace(again, recompute_again=False)
    expected = pj.evaluate(table, pj.stage_costs(again, system, table)).step_time
    assert expected > 1.03 * pj.evaluate(table, pj.stage_costs(once, system, table)).step_time
    assert single["makespan"] == pytest.approx(expected, rel=1e-9)
    (row,) = answer("compare", "-S", *split[1:], *run)["rows"]
    assert row["makespan"] == pytest.approx(expected, rel=1e-9)
    grid = {"schedules": ["interleaved-zb"], "workers": 4, "minibatch": 16, "microbatch_size": 1}
    grid |= {"models": "llama3-8b", "systems": "h100", "tensor_parallel": 2, "data_parallel": 2}
    swept = run_sweep(grid | {"launcher": "torchtitan", "recompute": recompute}, tmp_path / "s")
    assert swept.load().step_time.item() == pytest.approx(expected, rel=1e-9)
    schedules = ("--schedules", "1f1b,interleaved-zb")
    advice = answer("explain", "-s", "1f1b", *split[2:], *run, *schedules)
    for remedy in (row for row in advice["remedies"] if row["kind"] == "schedule"):
        name, _, count = remedy["what"].removeprefix("schedule ").rpartition(", stages per worker ")
        best = build(name, 4, 16, stages_per_worker=int(count))
        after = pj.evaluate(best, pj.stage_costs(again, system, best)).step_time
        assert remedy["step_time"] == pytest.approx(after, rel=1e-9)
    planned = ("--gpus", 16, "--pipeline", 4, "-V", 2, "--tensor", 2, "--microbatch-size", 1)
    plan = answer(
        *("plan", *planned, "-m", "llama3-8b", "-y", "h100", "--minibatch", 32, "--zero", 1),
        *("-S", "interleaved-zb", "--recompute", recompute, "--launcher", "torchtitan"),
    )
    assert plan["best"]["step_time"] == pytest.approx(expected, rel=1e-9)


def test_torchtitan_has_no_w_that_keeps_what_i_recomputed():
    workload = pj.Workload(LLAMA, 8, recompute="full", zero=1, data_parallel=2)
    table = build("interleaved-zb", 2, 8)
    again = dataclasses.replace(workload, recompute_again=True)
    no_w = "W without recomputation of its own (--recompute-again)"
    plain = dataclasses.replace(workload, recompute="none")
    for refused, lacks in ((workload, [no_w]), (again, []), (plain, [])):
        (launch,) = pj.costing.launches(refused, table, launcher="torchtitan")
        assert [lack for lack in launch.lacks if "W " in lack] == lacks


# PyTorch's schedules that split backwards check that no stage is compiled; others do not
COMPILED = "-m llama3-8b -y h200 --minibatch 16 --launcher torchtitan --stack torchtitan-2024"
NO_COMPILED_W = "torchtitan lacks W in compiled stages (it needs --stack torchtitan-2024-eager"
WITH_W = ("interleaved-zb", "zb-v", "zb-h1", "zb-h2")


@pytest.mark.parametrize("schedule", [*WITH_W, "1f1b", "gpipe", "interleaved-1f1b", "looped-bfs"])
@with_cases("options is_compiled", *read_cases("test_torchtitan_has_no_w_in_compiled_stages"))
def test_torchtitan_has_no_w_in_compiled_stages(call, schedule, options, is_compiled):
    line = COMPILED.partition(" --stack")[0].split()
    run = ("evaluate", "-s", schedule, "-P", 2, "-M", 8, *line, *options.split())
    _, text, warning = call(*run, "--json")
    assert ("compile.enable" in text) == is_compiled
    hint = " --tensor-overlap 0)" if "overlap" in options else ")"
    assert (f"{NO_COMPILED_W}{hint}" in warning) == (schedule in WITH_W and is_compiled)


def test_no_command_offers_w_in_compiled_stages(answer, call, tmp_path):
    line = COMPILED.split()
    plan = answer("plan", *line, "--gpus", 8, "--pipeline", 4, "--microbatch-size", 1)
    rows = [plan["best"], *plan["runners_up"], *plan["outside"]]
    assert {row["layout"]["schedule"] for row in rows}.isdisjoint({"interleaved-zb"})
    run = ("-P", 4, "-M", 16, *line)
    for eager in (False, True):  # then the compiler itself is a remedy
        begin = run[:-2] if eager else run
        names = ("--schedules", "interleaved-zb,interleaved-1f1b")
        result = answer("explain", "-s", "1f1b", *names, *begin)
        remedies = [row for row in result["remedies"] if row["launchers"]]
        assert any("interleaved-zb" in row["what"] for row in remedies) == eager
        assert any("compiled kernels" in row["what"] for row in remedies) == eager
        for row in remedies:
            is_compiled = "compile.enable" in str(row["launch"]["torchtitan"]["options"])
            assert not (is_compiled and "zb" in row["what"]), row["what"]
    assert f"{NO_COMPILED_W})" in str(answer("compare", "-S", "interleaved-zb,1f1b", *run))
    run = (*line, "-P", 4, "--data-parallel", 2)
    for job in (("size",), ("recompute", "-M", 16)):
        code, _, error = call("tune", *job, "-s", "zb-h1", *run)
        assert (code, f"{NO_COMPILED_W})" in error) == (2, True)
    export = ("export", "-s", "zb-v", "--format", "torch-csv", "--out", tmp_path / "v.csv")
    assert f"{NO_COMPILED_W})" in call(*export, "-M", 16, *run)[2]
    grid = {"schedules": ["1f1b", "zb-h1"], "workers": 4, "minibatch": 16, "microbatch_size": 1}
    grid |= {"models": "llama3-8b", "systems": "h200", "launcher": "torchtitan"}
    swept = run_sweep(grid | {"stack": "torchtitan-2024"}, tmp_path / "sweep").load()
    assert swept.reason.sel(schedule="zb-h1").item() == f"{NO_COMPILED_W})"
    assert swept.reason.sel(schedule="1f1b").item() == ""


@with_cases(
    "line", *read_cases("test_explain_offers_the_compiler_of_torchtitan_as_evaluate_prices_it")
)
def test_explain_offers_the_compiler_of_torchtitan_as_evaluate_prices_it(answer, line):
    run = (*line.split(), "--launcher", "torchtitan")
    bare = line.partition(" --stack")[0].split()
    compiled = (*bare, "--stack", "torchtitan-2024", "--launcher", "torchtitan")
    result = answer("explain", *run, "--schedules", "1f1b")
    (remedy,) = (row for row in result["remedies"] if row["what"] == "compiled kernels")
    after = answer("evaluate", *compiled)
    assert remedy["step_time"] == pytest.approx(after["makespan"], rel=1e-12)
    assert remedy["step_time"] < result["step_time"]
    assert answer(*shlex.split(remedy["command"])[1:])["makespan"] == remedy["step_time"]
    assert remedy["launchers"] == ["torchtitan"]
    options = remedy["launch"]["torchtitan"]
    assert options == after["launch"]["torchtitan"]
    assert "compile.enable" in str(options)
    # compiled kernels are no remedy of compiled kernels, nor of other launchers
    others = compiled, (*bare, "--launcher", "megatron-lm")
    for other in others:
        rows = answer("explain", *other, "--schedules", "1f1b")["remedies"]
        assert "compiled kernels" not in [row["what"] for row in rows]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_without_remedies_says_so_in_a_sentence(call, workers):
    line = f"explain -s 1f1b -P {workers} -M 64 -T F=1,B=2 --schedules 1f1b"
    lines = call(*line.split())[1].splitlines()
    assert "no change with the same number of workers makes the step shorter" in lines
    assert ("the step has no pipeline" in lines[0]) == (workers == 1)


@with_cases(
    "model launcher fields", *read_cases("test_options_that_hide_experts_have_one_prediction")
)
def test_options_that_hide_experts_have_one_prediction(model, launcher, fields):
    """Megatron runs combined-1f1b where experts exchange tokens beside compute."""
    system = pj.load_system("h200")
    short = dataclasses.replace(pj.load_model(model), sequence=4096)
    workload = pj.Workload(short, minibatch=8, **SPREAD | fields)
    table = build("1f1b", 4, 8)
    how = {"schedules": HIDDEN_EXPERTS, "launcher": launcher}
    result = pj.explain(table, workload, system=system, **how)
    steps = {}
    for remedy in result.remedies:
        if remedy.launchers:
            text = next(launch.text for launch in remedy.launches if launch.launcher == launcher)
            again = remedy.scenario.replace().evaluate().step_time
            assert steps.setdefault(text, again) == again == remedy.step_time
            is_hidden = "overlap-moe" in text or "overlap_moe" in text
            assert is_hidden == (remedy.scenario.schedule == "combined-1f1b")
    # the best of all numbers of stages with any other overlap
    seconds = []
    for count, overlap in itertools.product(range(2, 13), ({}, {"overlap": 1.0})):
        other = dataclasses.replace(workload, **overlap)
        combined = build("combined-1f1b", 4, 8, stages_per_worker=count)
        if count * 4 > workload.model.layers:
            break
        if pj.costing.launches(other, combined, launcher)[0].lacks:
            continue
        if pj.memory_bytes(other, combined).max() <= result.memory.limit:
            costs = pj.stage_costs(other, system, combined)
            seconds.append(pj.evaluate(combined, costs).step_time)
    steps = [remedy.step_time for remedy in result.remedies if remedy.launchers]
    assert len(seconds) > 2 or workload.recompute == "full"  # which Megatron lacks here
    assert min(steps) <= min([result.step_time, *seconds]) * (1 + 1e-9)


@with_cases(
    "model launcher fields",
    *read_cases("test_what_a_launcher_lacks_counts_for_a_combination_as_a_whole"),
)
def test_what_a_launcher_lacks_counts_for_a_combination_as_a_whole(model, launcher, fields):
    """A launcher may lack a schedule with this recomputation, and run it with less."""
    system = pj.load_system("h200")
    short = dataclasses.replace(pj.load_model(model), sequence=4096)
    workload = pj.Workload(short, minibatch=16, **fields)
    table = build("1f1b", 4, 16)
    names = [*WHOLE, *(["combined-1f1b"] if short.moe else [])]
    how = {"schedules": names, "launcher": launcher, "memory_limit": 130e9}
    result = pj.explain(table, workload, system=system, **how)
    seconds = []
    for count, recompute in itertools.product((1, 2, 3, 4), ("none", "full")):
        for name in names[:1] if count == 1 else names[1:]:
            options = {} if count == 1 else {"stages_per_worker": count}
            other = build(name, 4, 16, **options)
            changed = dataclasses.replace(workload, recompute=recompute)
            is_there = not pj.costing.launches(changed, other, launcher)[0].lacks
            if is_there and pj.memory_bytes(changed, other).max() <= 130e9:
                costs = pj.stage_costs(changed, system, other)
                seconds.append(pj.evaluate(other, costs).step_time)
    assert len(seconds) > 2
    best = min(remedy.step_time for remedy in result.remedies if remedy.launchers)
    assert best <= min(seconds) * (1 + 1e-9)
    for remedy in (row for row in result.remedies if row.kind == "combined"):
        (launch,) = [row for row in remedy.launches if row.launcher == launcher]
        assert bool(launch.lacks) == (remedy.shelf == "code"), remedy.what


@with_cases(
    "model schedule is_undone",
    *read_cases("test_bridge_undoes_overlap_of_shared_experts_where_it_refuses_it"),
)
def test_bridge_undoes_overlap_of_shared_experts_where_it_refuses_it(model, schedule, is_undone):
    """Megatron-Bridge's comm_overlap.py asserts `not moe_shared_expert_overlap`."""
    table = build(schedule, 2, 8, stages_per_worker=2)
    spread = {"expert_parallel": 8, "data_parallel": 8}
    workload = pj.Workload(pj.load_model(model), minibatch=8, **spread)
    texts = {launch.launcher: launch.text for launch in pj.costing.launches(workload, table)}
    assert ("model.moe_shared_expert_overlap=false" in texts["Megatron-Bridge"]) == is_undone
    assert "shared-expert" not in texts["Megatron-LM"]  # its flag turns the overlap on
    megatron, bridge, _ = pj.costing.pipeline_launches(table)  # of any model
    is_there = "model.moe_shared_expert_overlap=false" in bridge.text
    assert is_there == (schedule == "combined-1f1b")
    assert "shared-expert" not in megatron.text


@with_cases(
    "line",
    ["explain", *ONE_PIPE, *UNEVEN, *SHARDED, "--schedules", "1f1b"],
    ["tune", "layers", *ONE_PIPE, *UNEVEN, *SHARDED, "--recompute", "full"],
    ["plan", *UNEVEN, "--gpus", 32, "--minibatch", 64, "--pipeline", 4, "--tensor", 8],
    ids=lambda line: line[0],
)
def test_a_long_value_is_cut_on_the_first_screen_alone(answer_and_text, call, line):
    result, details = answer_and_text(*line, "--details")
    name = "parallelism.module_fqns_per_model_part"
    launches = [row["launch"]["torchtitan"] for row in result.get("remedies", [result])]
    values = [" ".join(map(",".join, launch["options"].get(name, ()))) for launch in launches]
    first, details = (" ".join(text.split()) for text in (call(*line)[1], details))
    cut = rf"--{name} (.*?)\.\.\. \((\d+) more characters; --details"
    head, rest = re.search(cut, first).groups()
    assert len(f"--{name} {head}") == 200
    (value,) = {value for value in values if value.startswith(head)}
    assert len(value) == len(head) + int(rest)
    assert value in details
    assert value not in first
    if line[0] == "explain":
        assert first.index(" next: ") < first.index(" torchtitan: ")


@with_cases(
    "precision launcher is_noted",
    ("fp8", None, True),
    ("fp8", "megatron-lm", True),
    ("bf16", None, False),
    ("fp8", "torchtitan", False),  # it casts weights anew for every product
    ("fp8", "Megatron-Bridge", False),  # its recipes gather weights in fp8
)
def test_copies_of_weights_in_fp8_are_said(precision, launcher, is_noted, answer):
    options = ["--launcher", launcher] if launcher else []
    result = answer("evaluate", *JOB, "-m", "llama3-8b", "--precision", precision, *options)
    assert any("--fp8-param-gather" in note for note in result.get("notes", ())) is is_noted
