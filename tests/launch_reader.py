"""Options of launchers read back into a run."""

import math
import re
from pathlib import Path

import numpy as np

import pipejax as pj
from pipejax.costs.measured.megatron_log import MegatronLog

TORCHTITAN = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "InterleavedZeroBubble": "interleaved-zb",
    "LoopedBFS": "looped-bfs",
}
SEVERAL = ("circular", "interleaved-1f1b", "interleaved-zb", "looped-bfs")
SCHEDULES = ("1f1b", "interleaved-1f1b")
NO_UNITS = {"embedding_units": 0, "loss_units": 0}
AXES = ("data", "fsdp", "tensor", "tensor_sequence", "context", "expert", "pipeline")


def read_launch(launch, begin, stage_layers=()):
    """Return the run that options start, on the machine and at the settings of another run."""
    options = dict(launch.options)
    options |= options.pop("comm_overlap", {})
    options = {name.rpartition(".")[2]: value for name, value in options.items()}
    workload = begin.source.workload
    read = {"Megatron-LM": _megatron, "torchtitan": _torchtitan, "DeepSpeed": _deepspeed}
    read |= {"Megatron-Bridge": _megatron, "MaxText": _maxtext}
    workers, schedule, per_worker, layout, fields = read[launch.launcher](options, launch, begin)
    stages = pj.costing.PipelineLayout.parse(layout).stages if layout else ()
    layers = [stage.count("t") for stage in stages]
    more = {"stages_per_worker": per_worker} if schedule in SEVERAL else {}
    run = begin.replace(schedule=schedule, num_workers=workers, options=more)
    if workload is None:
        run = _with_whole_ends(run, begin, stage_layers)
        return _moved(run, stage_layers, layers) if layers else run
    size = fields.pop("size")
    layout = {"pipeline_layout": layout} if layout is not None else {}
    workload = pj.Workload(**{**vars(workload), **fields, **layout})
    return run.replace(num_microbatches=workload.minibatch // size).with_workload(workload)


def _megatron(options, launch, begin):
    """Read the options as the reader of Megatron's logs reads its arguments."""
    workload = begin.source.workload
    arguments = {name.replace("-", "_"): str(value) for name, value in options.items()}
    arguments = {"world_size": "1", "tensor_model_parallel_size": "1"} | arguments
    arguments = {"micro_batch_size": "1"} | arguments  # options of the pipeline alone have none
    columns = MegatronLog(Path("options"), arguments, (), 0, math.nan).layout_columns()
    workers, per_worker = columns["pipeline"], columns["stages_per_worker"]
    schedule, layout = SCHEDULES[per_worker > 1], columns.get("pipeline_layout")
    if workload is None:
        return workers, schedule, per_worker, layout, {}
    overlaps = arguments.get("overlap_moe_expert_parallel_comm") == "True"
    fields = {name: columns[name] for name in ("zero", "overlap", "tensor_overlap", "recompute")}
    fields |= {
        "size": columns["microbatch_size"],
        "minibatch": int(arguments["global_batch_size"]) // workload.data_parallel,
        "tensor_parallel": columns["tensor"],
        "sequence_parallel": bool(columns["sequence_parallel"]),
        "context_parallel": columns["context"],
        "expert_overlap": float(overlaps),
        "expert_parallel": columns["expert"],
        "expert_tensor_parallel": int(arguments.get("expert_tensor_parallel_size", 0)),
    }
    return workers, schedule, per_worker, layout or "", fields | NO_UNITS


def _maxtext(options, launch, begin):
    ends = {place: f"{place}_{{}}_parallelism" for place in ("ici", "dcn")}
    axes = {k: math.prod([options.get(end.format(k), 1) for end in ends.values()]) for k in AXES}
    splits_sequences = axes["tensor_sequence"] > 1
    axes["tensor"] *= axes.pop("tensor_sequence")
    workers, workload = axes["pipeline"], begin.source.workload
    count = options.get("num_pipeline_microbatches", options.get("gradient_accumulation_steps", 1))
    data = axes["data"] * axes["fsdp"] * axes["expert"]
    sequences = options["per_device_batch_size"] * np.prod([*axes.values()])
    minibatch = round(sequences / data) * (1 if workers > 1 else count)
    per_worker = 1
    if workers > 1:
        on_stage = workers * options["num_layers_per_pipeline_stage"]
        per_worker = int(workload.model.layers) // on_stage
    fields = {
        "size": minibatch // count,
        "minibatch": minibatch,
        "tensor_parallel": axes["tensor"],
        "sequence_parallel": splits_sequences,
        "context_parallel": axes["context"],
        "data_parallel": data,
        "expert_parallel": axes["expert"],
        "zero": 0 if axes["fsdp"] == 1 else 1 if "pipeline_fsdp_ag_once" in options else 3,
        "recompute": options["remat_policy"],
        "overlap": float("latency_hiding" in launch.program),
    }
    schedule = "circular" if per_worker > 1 else "gpipe"
    return workers, schedule, per_worker, "", fields | NO_UNITS


def _torchtitan(options, launch, begin):
    workers, layout, per_worker = options.get("pipeline_parallel_degree", 1), None, None
    schedule = TORCHTITAN[options["pipeline_parallel_schedule"]]
    if file := options.get("pipeline_parallel_schedule_csv"):  # then the name only places stages
        schedule = file.removesuffix(".csv")
        assert schedule == begin.schedule, "an option names a table file that the run lacks"
    workload = begin.source.workload
    if modules := options.get("module_fqns_per_model_part"):
        counts = [sum(name.startswith("layers.") for name in names) for names in modules]
        words = ["t" * count for count in counts]
        words[0], words[-1] = "E" + words[0], words[-1] + "L"
        layout, per_worker = "|".join(words), len(modules) // workers
    per_worker = per_worker or (2 if schedule in SEVERAL else 1)
    if workload is None:
        return workers, schedule, per_worker, layout, {}
    less = "pipeline_parallel_{}_stage_less_layers"
    units = [options.get(less.format(end), 0) for end in ("first", "last")]
    if "pipeline_parallel_layers_per_stage" in options:
        total = int(workload.model.layers) + sum(units)
        per_worker = total // options["pipeline_parallel_layers_per_stage"] // workers
    replicate = options.get("data_parallel_replicate_degree", 1)
    shard = options["data_parallel_shard_degree"]
    never = 1 if workers > 1 else 2  # stages of a pipeline reduce gradients once
    reshard = {None: 0, "never": never, "always": 3}[options.get("fsdp_reshard_after_forward")]
    tensor = options.get("tensor_parallel_degree", 1)
    fields = {
        "size": options["pipeline_parallel_microbatch_size"],
        "minibatch": options["local_batch_size"],
        "tensor_parallel": tensor,
        "sequence_parallel": tensor > 1,
        "tensor_overlap": float("enable_async_tensor_parallel" in options),
        "data_parallel": replicate * shard,
        "zero": reshard,
        "recompute": {"selective": "half_products"}.get(options["mode"], options["mode"]),
        "embedding_units": 0 if layout else units[0],
        "loss_units": 0 if layout else units[1],
    }
    return workers, schedule, per_worker, layout or "", fields


def _deepspeed(options, launch, begin):
    axes = dict(re.findall(r"(num_\w+)=(\d+)", launch.program))
    interval = re.search(r"activation_checkpoint_interval=(\d+)", launch.program)
    group = 0 if interval is None else int(interval[1])
    exchanges = options["zero_optimization"]
    fields = {
        "size": options["train_micro_batch_size_per_gpu"],
        "minibatch": options["train_batch_size"] // int(axes["num_dp"]),
        "tensor_parallel": int(axes["num_mp"]),
        "data_parallel": int(axes["num_dp"]),
        "zero": exchanges["stage"],
        "recompute": "none" if not group else "full" if group == 1 else f"uniform:{group}",
    }
    if "overlap_comm" in exchanges:
        fields["overlap"] = float(exchanges["overlap_comm"])
    return int(axes["num_pp"]), "1f1b", 1, "", fields | NO_UNITS


def _with_whole_ends(run, begin, stage_layers):
    """Put what the first and last measured stage take beyond their layers on one stage each."""
    old, new = begin.table().num_stages, run.table().num_stages
    if new <= old or new % old:
        return run
    parts, table, costs, rules = new // old, run.table(), run.table_costs(), []
    for phase in ("F", "I", "W") if (table.phase == pj.Phase.W).any() else ("F", "B"):
        divided = np.broadcast_to(costs.time(pj.Phase[phase]), new)
        measured = [sum(divided[k * parts : (k + 1) * parts]) for k in range(old)]
        layers = stage_layers or [1] * old
        layer_times = sorted(time / n for time, n in zip(measured, layers, strict=True))
        layer = layer_times[(old - 1) // 2]
        for stage, holder in (0, 0), (old - 1, new - 1):
            head = measured[stage] - layer * layers[stage]
            if head > 0.02 * measured[stage]:
                for part in range(stage * parts, stage * parts + parts):
                    time = layer * layers[stage] / parts + head * (part == holder)
                    rules.append(f"{phase}@stage{part}*{time / divided[part]:.17g}")
    return run.with_edit(pj.costing.ScaledTimes(",".join(rules))) if rules else run


def _moved(run, stage_layers, layers):
    """Change the compute of stages as their layers say; a layer takes the median of all stages."""
    table, costs = run.table(), run.table_costs()
    split = np.repeat(stage_layers, table.num_stages // len(stage_layers))
    old = split * len(stage_layers) / table.num_stages
    if list(old) == list(layers):
        return run
    phases = ("F", "I", "W") if (table.phase == pj.Phase.W).any() else ("F", "B")
    seconds = sum(np.broadcast_to(costs.time(pj.Phase[name]), table.num_stages) for name in phases)
    factors = 1 + np.median(seconds / old) * (np.array(layers) - old) / seconds
    rules = ",".join(f"compute@stage{k}*{factor!r}" for k, factor in enumerate(factors.tolist()))
    return run.with_edit(pj.costing.ScaledTimes(rules))
