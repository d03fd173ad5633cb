"""Training launchers, such as Megatron-LM, and the options with which they run a layout.

Names and defaults of options are data, in `costs/data/arguments/launchers.json`, and so are the
options for precisions.
"""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types, unknown
from pipejax.base.display import short_repr
from pipejax.costs.model.model import Model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.stack import Stack, fields_for, load_stack, machine_software
from pipejax.costs.model.workload import Workload, assign_layers
from pipejax.costs.model.workload_fields import DISPATCHERS, RANK_ORDERS
from pipejax.costs.system.system import System, read_named
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.registry import interleaved_groups, matching_name, schedule_name
from pipejax.schedules.table.table import ScheduleTable

PYTORCH: Mapping[str, str] = {  # schedules that PyTorch builds by these names
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "looped-bfs": "LoopedBFS",  # other order of backwards, with the same time and memory
}
GROUP_SIZE = "microbatch-group-size-per-virtual-pipeline-stage"  # option of Megatron-LM
COMBINED = "combined-1f1b"  # Megatron's order under --overlap-moe-expert-parallel-comm
PLAIN = r"[a-z][a-z0-9_+]*|[0-9.]+|megatron[.\w]+"  # values that need no quotes
Options = dict[str, Any]
HALF = 0.5  # overlap if gradients are exchanged beside compute, but weights are not
MEGATRON_SHARDS = {2: "optim_grads", 3: "optim_grads_params"}  # by ZeRO stage
FULL_GRADIENT = 4.0  # bytes in which Megatron accumulates a gradient by default


@short_repr
class Launch(NamedTuple):
    """Options of one launcher.

    Attributes:
      launcher: name of the launcher.
      options: {name: value}; True stands for a flag without a value, a list for several values.
      lacks: features of the layout that the launcher does not support; empty if it can run it.
      program: text for the user's program or environment, beside the options; may be empty.
    """

    launcher: str
    options: Mapping[str, Any]
    lacks: tuple[str, ...]
    program: str = ""

    @property
    def refusal(self) -> str:
        """List the features that the launcher lacks; empty if it can run the layout."""
        return f"{self.launcher} lacks {'; '.join(self.lacks)}" if self.lacks else ""

    @property
    def text(self) -> str:
        """Return the command line to type; for DeepSpeed, its configuration file, and code."""
        style = LAUNCHERS[self.launcher].style
        if style == "file":
            code = self.program and f"\nin code: {self.program}"
            return f"{json.dumps(dict(self.options))}{code}"
        if style == "pairs":
            pairs = (f"{name}={_yaml(value)}" for name, value in self.options.items())
            return " ".join(filter(None, (self.program, shlex.join(pairs))))
        words = []
        for name, value in self.options.items():
            items = value if isinstance(value, list) else [value]
            if isinstance(items[0], list):  # lists of module names: a word for each stage
                items = [",".join(names) for names in items]
            words.append(f"--{name}")
            words += [str(item) for item in items if item is not True]  # a flag has no value
        return " ".join(filter(None, (self.program, shlex.join(words))))


def _yaml(value: Any) -> str:
    """Write a value for Megatron-Bridge: a layout of stages, E|(t|)*2, is text only in quotes."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_yaml(item)}' for key, item in value.items())}}}"
    return str(value) if re.fullmatch(PLAIN, str(value)) else json.dumps(value)


def launches(
    workload: Workload,
    table: ScheduleTable,
    launcher: str | None = None,
    per_node: float = math.inf,
    *,
    is_compiled: bool = False,
) -> tuple[Launch, ...]:
    """Return each launcher's options that run a workload on a schedule.

    Args:
      workload: the job; its minibatch is that of one pipeline.
      table: the schedule.
      launcher: name of a launcher; default: all launchers.
      per_node: accelerators of a node, for launchers that divide mesh axes among nodes.
      is_compiled: whether a compiler fuses kernels, which some launchers need as an option.

    Returns:
      One record for each launcher: its options, and what it lacks.

    Raises:
      ValueError: if layers or microbatches do not fit the table, or the name is unknown.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> workload = pj.Workload(pj.load_model("llama3-8b"), minibatch=16, tensor_parallel=2,
      ...                        sequence_parallel=True, data_parallel=2, zero=1)
      >>> megatron, bridge, torchtitan, *others = pj.costing.launches(workload, table)
      >>> print(megatron.text)
      CUDA_DEVICE_MAX_CONNECTIONS=1 --micro-batch-size 2 --global-batch-size 32
      --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
      --use-distributed-optimizer --grad-reduce-in-bf16 --seq-length 8192
      >>> others[0].lacks
      ('sequence parallelism beside tensor parallelism',)

    References:
      NVIDIA/Megatron-LM, NVIDIA-NeMo/Megatron-Bridge, pytorch/torchtitan v0.2.2,
      deepspeedai/DeepSpeed, AI-Hypercomputer/maxtext.
    """
    check_types(workload=(workload, Workload), table=(table, ScheduleTable))
    check_types(is_compiled=(is_compiled, bool))
    return _launch(_Job(workload, table, per_node, is_compiled), launcher)


def _launch(job: "_Job", launcher: str | None) -> tuple[Launch, ...]:
    launchers = LAUNCHERS.values() if launcher is None else (find_launcher(launcher),)
    return tuple(record.launch(job) for record in launchers)


def machine_launches(
    workload: Workload, table: ScheduleTable, system: System, stack: str, launcher: str | None
) -> tuple[Launch, ...]:
    """Return launcher options that run a workload on a system with a software stack."""
    # a compiler fuses norms and activation functions, which then move no more bytes than needed
    is_compiled = bool(stack) and bool(np.all(np.asarray(system.kernels.elementwise) == 1))
    per_node = float(np.max(system.gpus_per_node))  # the largest of a batch of systems
    job = _Job(workload, table, per_node, is_compiled)
    job.stack = stack
    job.is_before_blackwell = not np.all(np.asarray(system.narrow_peaks.nvfp4) > 0)
    return _launch(job, launcher)


def pipeline_launches(
    table: ScheduleTable, layers: Sequence[int] | None = None
) -> tuple[Launch, ...]:
    """Return launcher options that set up only the pipeline, whatever the model.

    Args:
      table: the schedule.
      layers: (stages) layers of each stage; None for the launcher's default.

    Returns:
      Records of Megatron-LM, Megatron-Bridge and torchtitan, with the options for stages and
      schedule.

    Raises:
      ValueError: if there are not as many numbers of layers as stages.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=8)
      >>> for launch in pj.costing.pipeline_launches(table, layers=[5, 3]):
      ...     print(launch.text)
      --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*5|tttL'
      model.pipeline_model_parallel_size=2 'model.pipeline_model_parallel_layout="Et*5|tttL"'
      --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B
      --parallelism.module_fqns_per_model_part
      tok_embeddings,layers.0,layers.1,layers.2,layers.3,layers.4
      layers.5,layers.6,layers.7,norm,output
    """
    check_types(table=(table, ScheduleTable))
    pipeline, layout = _Pipeline(table), None
    if layers is not None:
        if len(layers) != table.num_stages:
            raise MismatchError(
                f"layers has {len(layers)} stages, the table has {table.num_stages}", "layers"
            )
        layout = PipelineLayout.with_layers(layers, [0] * len(layers))
    parallelism = {"pipeline_parallel_degree": pipeline.workers, **_order_of_torchtitan(pipeline)}
    if layout is not None:
        parallelism["module_fqns_per_model_part"] = layout.module_fqns()
    megatron = _stages_of_megatron(pipeline, layout)
    lacks = tuple(_unsupported_orders_of_megatron(pipeline))
    bridge = LAUNCHERS["Megatron-Bridge"].renamed(megatron | _undone_overlaps(pipeline))
    return (
        Launch("Megatron-LM", megatron, lacks),
        Launch("Megatron-Bridge", bridge, lacks),
        Launch(
            "torchtitan",
            {f"parallelism.{name}": value for name, value in parallelism.items()},
            tuple(_unsupported_orders_of_torchtitan(pipeline)),
        ),
    )


class _Pipeline:
    """A schedule's stages and order, in the numbers and names that launchers' options use."""

    def __init__(self, table: ScheduleTable) -> None:
        self.table = table
        self.workers = table.num_workers
        self.has_several_pipes = table.num_pipes > 1  # then stages have copies on several workers
        self.stages_per_worker = 0 if self.has_several_pipes else table.num_stages // self.workers
        self.schedule = schedule_name(table) if self.workers > 1 else "1f1b"
        self.group_size = interleaved_groups(table) if self.workers > 1 else 0
        self.has_w = bool((table.phase == Phase.W).any())
        # fused pairs, in which experts exchange tokens while another microbatch computes
        self.overlaps_experts = not table.grammar.is_usual and self.schedule == COMBINED
        is_supported = table.grammar.is_usual or self.overlaps_experts
        self.unsupported_rules = [] if is_supported else [table.grammar.first_difference]

    def order(self, *names: str) -> str:
        """Return the first of these schedules with the table's order; "" if none has it."""
        # at some sizes schedules coincide, as all schedules of one microbatch do
        return self.schedule if self.schedule in names else matching_name(self.table, names)


class _Job(_Pipeline):
    """A workload on a schedule, in the numbers and names that launchers' options use."""

    def __init__(
        self, workload: Workload, table: ScheduleTable, per_node: float, is_compiled: bool
    ) -> None:
        super().__init__(table)
        self.workload, self.per_node = workload, per_node
        self.stack = ""  # the software of the run, if it is known
        self.is_before_blackwell = False  # True if the system is known to lack 4-bit products
        self.overlaps_tensor = workload.tensor_parallel > 1 and workload.tensor_overlap > 0
        # torchtitan's tensor parallelism beside compute needs its compiler
        self.is_compiled = is_compiled or self.overlaps_tensor
        self.microbatch_size = workload.microbatch_size(table)
        self.global_batch = workload.minibatch * workload.data_parallel
        assigned = np.asarray(assign_layers(workload, table).layers)
        self.layers: Int[NumpyArray, " stages"] = assigned.astype(int)
        # layers (units) that embedding and loss replace on the first and the last stage
        self.end_units = workload.embedding_units, workload.loss_units
        stage_units = self.layers.copy()
        stage_units[0] += self.end_units[0]
        stage_units[-1] += self.end_units[1]
        self.units_per_stage = int(stage_units[0])
        is_even = bool((stage_units == self.units_per_stage).all())
        self.is_even = is_even and not workload.pipeline_layout
        spreads_experts = workload.has_experts and workload.expert_parallel > 1
        self.overlaps_experts |= spreads_experts and workload.expert_overlap > 0

    @property
    def layer_kinds(self) -> int:
        """Return the number of kinds of layers: 2 if only some have a window."""
        model = self.workload.model
        return 1 if int(model.windowed_layers) in (0, int(model.layers)) else 2

    @property
    def has_equal_layers(self) -> bool:
        return self.is_even and self.end_units == (0, 0)

    @property
    def layout(self) -> PipelineLayout:
        if self.workload.pipeline_layout:
            return PipelineLayout.parse(self.workload.pipeline_layout)
        mtp = np.zeros_like(self.layers)
        mtp[-1] = int(self.workload.model.mtp_layers)
        return PipelineLayout.with_layers(self.layers, mtp)


def _megatron(job: _Job) -> Options:
    """Return the options with which Megatron-LM runs a job."""
    # `layers` of a stage are recomputed (all: infinite), in groups of `group` layers
    workload, (layers, group, _) = job.workload, job.workload.recomputation
    has_expert_groups = workload.expert_parallel > 1
    dispatcher = "flex" if workload.dispatcher == DISPATCHERS[1] else "alltoall"
    has_parts = workload.tensor_parallel > 1 or workload.expert_tensor > 1
    has_replicas = workload.data_parallel * workload.context_parallel > 1
    has_modules = not layers and workload.recompute != "none"
    parts = "core_attn" if workload.recompute == "selective" else workload.recompute
    options: Options = {
        "micro-batch-size": job.microbatch_size,
        "global-batch-size": job.global_batch,
        "tensor-model-parallel-size": workload.tensor_parallel,
        "sequence-parallel": workload.sequence_parallel,
        "context-parallel-size": workload.context_parallel > 1 and workload.context_parallel,
        "expert-model-parallel-size": has_expert_groups and workload.expert_parallel,
        "moe-token-dispatcher-type": has_expert_groups and dispatcher,
        "expert-tensor-parallel-size": workload.has_experts
        and has_parts
        and workload.expert_tensor,
        **_stages_of_megatron(job, None if job.has_equal_layers else job.layout),
        "use-distributed-optimizer": workload.zero > 0,
        "use-megatron-fsdp": workload.zero > 1,
        "data-parallel-sharding-strategy": MEGATRON_SHARDS.get(workload.zero),
        "ckpt-format": workload.zero > 1 and "fsdp_dtensor",  # FSDP refuses other formats
        "overlap-grad-reduce": has_replicas and workload.overlap > 0,
        "overlap-param-gather": has_replicas and workload.zero > 0 and workload.overlap > HALF,
        "tp-comm-overlap": workload.tensor_parallel > 1 and workload.tensor_overlap > 0,
        "grad-reduce-in-bf16": float(workload.model.accumulated_bytes) < FULL_GRADIENT,
        "recompute-granularity": "full" if layers else has_modules and "selective",
        "recompute-method": layers > 0 and ("block" if layers < math.inf else "uniform"),
        "recompute-num-layers": int(layers) if layers < math.inf else group,
        "recompute-modules": has_modules and parts.split("+"),
        "cuda-graph-impl": workload.graphs and "transformer_engine",  # layer by layer
        "use-tp-pp-dp-mapping": workload.rank_order != RANK_ORDERS[0],
    }
    return {name: value for name, value in options.items() if value}


def _stages_of_megatron(pipeline: _Pipeline, layout: PipelineLayout | None) -> Options:
    """Return Megatron-LM's options for the number of stages, and for unequal layers."""
    options: Options = {"pipeline-model-parallel-size": pipeline.workers}
    if pipeline.workers > 1 and layout is not None:
        options["pipeline-model-parallel-layout"] = str(layout)
    elif pipeline.workers > 1 and pipeline.stages_per_worker > 1:
        options["num-virtual-stages-per-pipeline-rank"] = pipeline.stages_per_worker
    if pipeline.group_size not in (0, pipeline.workers):
        options[GROUP_SIZE] = pipeline.group_size
    if pipeline.overlaps_experts:
        options["overlap-moe-expert-parallel-comm"] = True
    return options


def _bridge(job: _Job) -> Options:
    """Return Megatron-LM's options, and those that undo a recipe's overlap of shared experts."""
    model = job.workload.model
    is_shared = model.moe is not None and model.moe.shared_experts > 0
    return _megatron(job) | (_undone_overlaps(job) if is_shared else {})


def _undone_overlaps(pipeline: _Pipeline) -> Options:
    # Megatron-Bridge turns this on for models such as DeepSeek; it excludes the overlap of experts
    return {"moe-shared-expert-overlap": False} if pipeline.overlaps_experts else {}


def _unsupported_orders_of_megatron(pipeline: _Pipeline) -> Iterator[str]:
    """Yield what Megatron-LM lacks for the order of ops, in brackets what it has instead."""
    yield from pipeline.unsupported_rules
    name = "interleaved-1f1b" if pipeline.stages_per_worker > 1 else "1f1b"
    if pipeline.schedule != COMBINED and not pipeline.order(name):
        yield f"schedule {pipeline.schedule} (it has 1f1b and interleaved-1f1b)"
    elif pipeline.workers > 1 and pipeline.stages_per_worker > 1 and not pipeline.group_size:
        workers, microbatches = pipeline.workers, pipeline.table.num_microbatches
        # no group may be smaller than the workers, not even the last
        sizes = (n for n in range(workers, microbatches + 1) if not 0 < microbatches % n < workers)
        hint = next((f"with --group-size {size}" for size in sizes), f"from {workers} on")
        yield f"these groups of {microbatches} microbatches (it works {hint})"
    if pipeline.overlaps_experts and pipeline.workers > 1 and pipeline.stages_per_worker < 2:
        yield "experts beside compute with one stage for each worker (it needs several)"


def _unsupported_by_megatron(job: _Job) -> Iterator[str]:
    """Yield the features of a job that Megatron-LM lacks, in brackets those that it has instead."""
    yield from _unsupported_orders_of_megatron(job)
    workload = job.workload
    if "half_products" in workload.recompute:
        yield "recomputation of every second product"
    if workload.tensor_parallel > 1 and not workload.sequence_parallel:
        if workload.tensor_overlap > 0:
            yield "tensor parallelism beside compute without sequence parallelism"
        if workload.has_experts:
            yield "experts beside tensor parallelism without sequence parallelism"
    if job.is_before_blackwell and job.overlaps_tensor:  # needs 1 connection, other overlaps more
        others = {"experts beside compute": job.overlaps_experts, "FSDP": workload.zero > 1}
        for name in (name for name, is_used in others.items() if is_used):
            pair = f"{name} and tensor parallelism beside compute"
            yield f"{pair} before Blackwell (CUDA_DEVICE_MAX_CONNECTIONS serves one)"
    if job.overlaps_experts:
        if workload.expert_parallel == 1:
            yield "experts beside compute without expert parallelism"
        if workload.recomputation.layers or "moe" in workload.recompute.split("+"):
            yield "experts beside compute with recomputation of layers or of moe"
        if workload.model.mtp_layers > 1:
            yield "experts beside compute with several layers for further tokens"


def _connections(job: _Job) -> str:
    """Return Megatron-LM's environment variable for the number of CUDA queues, if needed."""
    workload = job.workload
    if job.overlaps_experts:
        return "CUDA_DEVICE_MAX_CONNECTIONS=32"
    if workload.zero < 2 and workload.tensor_parallel * workload.context_parallel > 1:
        return "CUDA_DEVICE_MAX_CONNECTIONS=1"
    return ""


def _torchtitan(job: _Job) -> Options:
    """Return the options with which torchtitan runs a job."""
    workload, has_pipeline = job.workload, job.workers > 1
    shards = workload.data_parallel if workload.zero else 1
    degrees = {
        "data_parallel_replicate_degree": workload.data_parallel // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": workload.tensor_parallel,
        "context_parallel_degree": workload.context_parallel,
        "expert_parallel_degree": workload.expert_parallel,
        "expert_tensor_parallel_degree": workload.expert_tensor if workload.has_experts else 1,
        "pipeline_parallel_degree": job.workers,
    }
    # without the option of shards, torchtitan splits weights over all remaining accelerators
    parallelism: Options = {
        name: degree for name, degree in degrees.items() if degree > 1 or "shard" in name
    }
    if job.overlaps_tensor:
        parallelism["enable_async_tensor_parallel"] = True
    if workload.zero:
        parallelism["fsdp_reshard_after_forward"] = "always" if workload.zero == 3 else "never"
    if has_pipeline:
        parallelism["pipeline_parallel_microbatch_size"] = job.microbatch_size
        parallelism |= _order_of_torchtitan(job)
        if job.is_even:
            parallelism["pipeline_parallel_first_stage_less_layers"] = job.end_units[0]
            parallelism["pipeline_parallel_last_stage_less_layers"] = job.end_units[1]
            parallelism["pipeline_parallel_layers_per_stage"] = job.units_per_stage
        elif not workload.model.mtp_layers:
            parallelism["module_fqns_per_model_part"] = job.layout.module_fqns()
    modes = {"half_products": "selective", "full": "full"}
    options: Options = {
        "training.local_batch_size": workload.minibatch if has_pipeline else job.microbatch_size,
        "training.global_batch_size": job.global_batch,
        **{f"parallelism.{name}": value for name, value in parallelism.items()},
        "activation_checkpoint.mode": modes.get(workload.recompute, "none"),
    }
    if workload.recompute == "half_products":
        options["activation_checkpoint.selective_ac_option"] = "op"
    if job.is_compiled:
        options["compile.enable"] = True
    return options


def _order_of_torchtitan(pipeline: _Pipeline) -> Options:
    """Return torchtitan's options for the schedule: a name in PyTorch, or a file of the table."""
    microbatches = pipeline.table.num_microbatches
    rounds = max(1, microbatches // pipeline.workers)  # number of equal groups in PyTorch
    order = pipeline.order(*PYTORCH)
    has_rounds = order in ("interleaved-1f1b", "interleaved-zb")
    is_even = microbatches % rounds == 0 and pipeline.group_size in (0, microbatches // rounds)
    if order and (is_even or not has_rounds):
        return {"pipeline_parallel_schedule": PYTORCH[order]}
    options: Options = {"pipeline_parallel_schedule_csv": f"{pipeline.schedule}.csv"}
    if name := _named_placement(pipeline):  # with a file, the name only places stages on ranks
        options = {"pipeline_parallel_schedule": name, **options}
    return options


def _named_placement(pipeline: _Pipeline) -> str | None:
    """Name a PyTorch schedule that places stages on the same ranks; None if there is none."""
    if pipeline.has_several_pipes:
        return None
    # workers of the stages: 1F1B 0 1 2, Interleaved1F1B 0 1 2 0 1 2, ZBVZeroBubble 0 1 2 2 1 0
    loop = np.tile(np.arange(pipeline.workers), pipeline.stages_per_worker)
    placement = pipeline.table.placement[0]
    if np.array_equal(placement, loop):
        return "1F1B" if pipeline.stages_per_worker == 1 else "Interleaved1F1B"
    v_shape = [*range(pipeline.workers), *reversed(range(pipeline.workers))]
    return "ZBVZeroBubble" if np.array_equal(placement, v_shape) else None


def _unsupported_orders_of_torchtitan(pipeline: _Pipeline) -> Iterator[str]:
    """Yield what torchtitan lacks for the order of ops, in brackets what it has instead."""
    yield from pipeline.unsupported_rules
    if pipeline.has_several_pipes:
        yield "schedules of several pipes"
    elif _named_placement(pipeline) is None:
        yield "these places of stages (it has a loop and, with two stages per worker, a V)"
    if pipeline.table.has_communication:
        yield "tables with SEND and RECV (it reads compute alone)"


def _unsupported_by_torchtitan(job: _Job) -> Iterator[str]:
    """Yield the features of a job that torchtitan lacks, in brackets those that it has instead."""
    workload = job.workload
    is_parallel = workload.tensor_parallel * job.workers > 1
    if workload.data_parallel > 1 and not workload.zero and is_parallel:
        yield "replicas that split nothing beside other parallelism (it has ZeRO 1 in a pipeline)"
    # stages of a pipeline keep whole weights and gradients between microbatches, as in ZeRO 1
    if job.workers > 1 and workload.zero > 1:
        yield f"ZeRO {workload.zero} in a pipeline (it has 0 and 1)"
    if job.workers == 1 and workload.zero == 1:
        yield "ZeRO 1 without a pipeline (it has 0, 2 and 3)"
    if workload.zero == 0 and workload.context_parallel > 1:
        yield "context parallelism of weights that are not split (it needs ZeRO 1 to 3)"
    if workload.tensor_parallel > 1 and not workload.sequence_parallel:
        yield "tensor parallelism without sequence parallelism"
    if (heads := workload.model.kv_heads) % workload.tensor_parallel:
        yield f"copies of {heads} heads of keys and values (tensor parallelism must divide them)"
    if workload.has_experts and workload.expert_tensor not in (1, workload.tensor_parallel):
        yield f"experts in {workload.expert_tensor} parts (it has 1 and as many as of a layer)"
    if workload.recompute not in ("none", "full", "half_products"):
        yield f"recomputation {workload.recompute} (it has none, full and half_products)"
    if job.has_w and workload.recompute != "none" and not workload.recompute_again:
        yield "W without recomputation of its own (--recompute-again)"
    if workload.rank_order != RANK_ORDERS[0]:
        yield f"rank order {workload.rank_order}"
    yield from _unsupported_experts(workload)
    if job.workers > 1 and workload.model.mtp_layers:
        yield "layers for further tokens in a pipeline"
    yield from _unsupported_orders_of_torchtitan(job)


def _unsupported_experts(workload: Workload) -> Iterator[str]:
    if workload.has_experts and workload.expert_overlap > 0:
        yield "experts beside compute"


def _deepspeed(job: _Job) -> Options:
    """Return the content of the configuration file with which DeepSpeed runs a job."""
    workload = job.workload
    options: Options = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": job.microbatch_size,
        "gradient_accumulation_steps": job.table.num_microbatches,
        "zero_optimization": {"stage": workload.zero},
    }
    if workload.zero:  # by default only stage 3 overlaps
        options["zero_optimization"]["overlap_comm"] = workload.overlap > 0
    if workload.tensor_parallel > 1 and job.workers == 1:
        options["tensor_parallel"] = {"autotp_size": workload.tensor_parallel}
    if workload.expert_parallel > 1:
        options["expert_parallel"] = {"enabled": True, "autoep_size": workload.expert_parallel}
    return options


def _pipeline_module(job: _Job) -> str:
    """Return the call that builds DeepSpeed's pipeline, or on one worker recomputes layers."""
    if job.workers == 1:
        if job.workload.recompute == "none":
            return ""
        return "deepspeed.checkpointing.checkpoint(layer, ..) around each layer"
    axes = f"num_pp={job.workers}, num_mp={job.workload.tensor_parallel}"
    layers, group, _ = job.workload.recomputation
    interval = f", activation_checkpoint_interval={group}" if layers == math.inf else ""
    return (
        f"PipelineModule(layers, topology=PipeModelDataParallelTopology({axes}, "
        f"num_dp={job.workload.data_parallel}), partition_method='type:LAYER'{interval}) "
        "(replace LAYER by the class of your layers)"
    )


def _unsupported_by_deepspeed(job: _Job) -> Iterator[str]:
    """Yield the features of a job that DeepSpeed lacks, in brackets those that it has instead."""
    workload, has_pipeline = job.workload, job.workers > 1
    if has_pipeline and not job.order("1f1b"):
        yield f"schedule {job.schedule} (it has 1f1b)"
    if has_pipeline and not job.has_equal_layers:
        yield "stages with unequal layers"
    if has_pipeline and workload.zero > 1:
        yield f"ZeRO {workload.zero} in a pipeline (it has 0 and 1)"
    # the engine turns `overlap_comm` off at ZeRO 1 and in a pipeline
    if workload.data_parallel > 1 and workload.overlap > 0 and (has_pipeline or workload.zero < 2):
        yield "gradients and weights beside compute (at ZeRO 2 and 3 without a pipeline)"
    if workload.tensor_parallel > 1 and workload.tensor_overlap > 0:
        yield "tensor parallelism beside compute"
    if workload.context_parallel > 1:
        yield "context parallelism"
    if workload.tensor_parallel > 1 and workload.expert_parallel > 1:
        yield "experts beside tensor parallelism"
    yield from _unsupported_experts(workload)
    if workload.recompute != "none" and workload.recomputation.layers < math.inf:
        yield f"recomputation {workload.recompute} (it has none, full and uniform:N)"


def _mesh_of_maxtext(degrees: Mapping[str, int], per_node: float) -> Options:
    """Return options for the parts of mesh axes inside nodes (ici) and between nodes (dcn)."""
    # Axes fill nodes in order: tensor 4 and data 4 on nodes of 8 accelerators are ici_tensor 4,
    # ici_data 2 and dcn_data 2. If the job does not fill its nodes, as 64 accelerators on a node
    # of 72, the part inside is the largest divisor of the degree that fits.
    options: Options = {}
    accelerators = math.prod(degrees.values())
    free_places = accelerators if per_node == math.inf else int(per_node)  # left in a node
    has_full_nodes = accelerators % free_places == 0
    for name, degree in degrees.items():
        if has_full_nodes:
            inside = math.gcd(degree, free_places)
        else:
            limit = min(degree, free_places)
            inside = max(count for count in range(1, limit + 1) if degree % count == 0)
        free_places //= inside
        for network, count in (("ici", inside), ("dcn", degree // inside)):
            if count > 1:
                options[f"{network}_{name}_parallelism"] = count
    return options


def _maxtext(job: _Job) -> Options:
    """Return the options with which MaxText runs a job."""
    workload = job.workload
    # replicas hold the experts; `_unsupported_by_maxtext` reports jobs in which they cannot
    replicas = max(1, workload.data_parallel // workload.expert_parallel)
    degrees = {
        "tensor_sequence" if workload.sequence_parallel else "tensor": workload.tensor_parallel,
        "context": workload.context_parallel,
        "expert": workload.expert_parallel,
        "fsdp" if workload.zero else "data": replicas,
        "pipeline": job.workers,
    }
    options = _mesh_of_maxtext(degrees, job.per_node)
    # a step has per_device_batch_size x devices sequences, times the steps of accumulation
    device_batch = workload.data_parallel * job.microbatch_size / math.prod(degrees.values())
    if job.workers > 1:
        device_batch *= job.table.num_microbatches
        options["num_pipeline_microbatches"] = job.table.num_microbatches
        # MaxText counts a layer with a window and one without it, in turn, as one layer
        options["num_layers_per_pipeline_stage"] = int(job.layers[0]) // job.layer_kinds
        if workload.zero == 1:  # gather weights once for all microbatches
            options["pipeline_fsdp_ag_once"] = True
    elif job.table.num_microbatches > 1:
        options["gradient_accumulation_steps"] = job.table.num_microbatches
    return {"per_device_batch_size": device_batch, **options, "remat_policy": "full"}


def _unsupported_by_maxtext(job: _Job) -> Iterator[str]:
    """Yield the features of a job that MaxText lacks, in brackets those that it has instead."""
    workload, has_pipeline = job.workload, job.workers > 1
    yield from job.unsupported_rules
    if has_pipeline and not job.order("circular", "gpipe"):
        yield f"schedule {job.schedule} (it has gpipe and circular)"
    if has_pipeline and len({*job.layers.tolist()}) > 1:
        yield "stages with unequal layers"
    # all stages are copies of one module; of Gemma 2, it is pairs of layers with and without window
    model, layers = workload.model, int(job.layers[0])
    is_paired = not workload.has_experts and 2 * int(model.windowed_layers) == int(model.layers)
    if has_pipeline and job.layer_kinds > 1 and not (is_paired and layers % 2 == 0):
        yield f"stages of {layers} layers with and without a window (it has pairs of both)"
    if has_pipeline and job.table.num_microbatches % job.workers:
        yield f"{job.table.num_microbatches} microbatches (it has multiples of {job.workers})"
    if workload.zero == 2 or (workload.zero == 1 and not has_pipeline):
        yield f"ZeRO {workload.zero} (it has 0 and 3, 1 in a pipeline)"
    splits_experts = workload.has_experts and workload.expert_tensor > 1
    if workload.data_parallel % workload.expert_parallel or splits_experts:
        yield "experts beyond the replicas"
    if workload.recompute != "full":
        near = "; its minimal, near none, has no price here"
        yield f"recomputation {workload.recompute} (it has full{near})"
    if workload.tensor_parallel > 1 and workload.tensor_overlap > 0:
        yield "tensor parallelism beside compute"
    yield from _unsupported_experts(workload)


NO_OVERLAP = {
    "_target_": "megatron.bridge.training.comm_overlap.CommOverlapConfig",
    "tp_comm_overlap": False,
}
COMM_OVERLAP = "comm_overlap"
DDP_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


class Launcher(NamedTuple):
    """A launcher of training: its options, defaults and unsupported features."""

    # Fields other than functions come from `costs/data/arguments/launchers.json`.

    name: str
    options: Callable[[_Job], Options]  # returns the options that run a job
    lacks: Callable[[_Job], Iterator[str]]  # yields the features of a job that it does not support
    program: Callable[[_Job], str]  # returns text for the user's program or environment
    source: str  # repository of the launcher
    schedules: Sequence[str]  # schedules that it builds by name
    precisions: Mapping[str, Options]  # options by precision of products
    recomputations: Sequence[str] = ()  # that a plan tries beside none and full
    style: str = "flags"  # how options are written: "flags", "pairs" of name=value, or a "file"
    groups: Mapping[str, Sequence[str]] = {}  # {configuration record: options}; rest: "model"
    gradient_bytes: float | None = None  # default bytes of an accumulated gradient, if known
    workload: Mapping[str, Any] = {}  # defaults of `Workload` fields that differ from ours
    alone: Mapping[str, Any] = {}  # further defaults for a job without a pipeline
    overlap_from_zero: float = math.inf  # ZeRO from which exchanges overlap with compute by default
    resets: Mapping[str, Any] = {}  # options that reset settings of the launcher's recipes
    uneven: str = ""  # rule for unequal stages
    length: str = ""  # name of the option for the sequence length, if there is one
    stack: str = ""  # stack of its default kernels, if known
    compiled: str = ""  # stack of its kernels with the option of a compiler
    measured: str = ""  # stack of its measured runs, if its default kernels are not known
    has_sequence_parallel: bool = True  # whether it combines it with tensor parallelism
    can_compile_w: bool = True  # whether compiled stages run weight gradients apart (op W)

    def launch(self, job: _Job) -> Launch:
        """Return the options with which the launcher runs a job, and the features that it lacks."""
        options = self.options(job)
        if self.length:
            options[self.length] = int(job.workload.model.sequence)
        options |= {name: value for name, value in self.resets.items() if name not in options}
        options = self.renamed(options) | self.precisions.get(job.workload.precision, {})
        return Launch(self.name, options, self.missing(job), self.program(job))

    def missing(self, job: _Job) -> tuple[str, ...]:
        """List the features of a job that the launcher lacks."""
        features = [*self.lacks(job)]
        if job.workload.sequence_parallel and not self.has_sequence_parallel:
            features.append("sequence parallelism beside tensor parallelism")
        if job.workload.precision not in self.precisions:
            names = " and ".join(self.precisions)
            features.append(f"precision {job.workload.precision} (it has {names})")
        if job.has_w and job.workers > 1 and job.is_compiled and not self.can_compile_w:
            eager = f"--stack {self.stack}{' --tensor-overlap 0' if job.overlaps_tensor else ''}"
            features.append(f"W in compiled stages (it needs {eager})")
        # this overlap needs the option of the compiler, which runs other kernels than the stack
        elif job.overlaps_tensor and self.stack and self.stack == job.stack:
            features.append(f"tensor parallelism beside eager kernels (--stack {self.compiled})")
        return tuple(features)

    def renamed(self, options: Options) -> Options:
        """Translate Megatron-LM's options to configuration fields, as "ddp.overlap_grad_reduce"."""
        if not self.groups:
            return options
        options = dict(options)
        if options.pop("grad-reduce-in-bf16", False):
            options["grad-reduce-in-fp32"] = False
        if "num-virtual-stages-per-pipeline-rank" in options:
            stages = options.pop("num-virtual-stages-per-pipeline-rank")
            options["virtual-pipeline-model-parallel-size"] = stages
        if GROUP_SIZE in options:
            options["microbatch-group-size-per-vp-stage"] = options.pop(GROUP_SIZE)
        group_of_name = {name: group for group, names in self.groups.items() for name in names}
        fields: Options = {}
        overlaps: Options = {}
        for name, value in options.items():
            group, field = group_of_name.get(name, "model"), name.replace("-", "_")
            if group == COMM_OVERLAP:
                overlaps[field] = value
            else:
                fields[f"{group}.{field}"] = value
        # most recipes have no record of overlaps; a new record overrides the overlaps of `ddp`
        if overlaps:
            for name in DDP_OVERLAPS:
                if f"ddp.{name}" in fields:
                    overlaps[name] = fields[f"ddp.{name}"]
            fields[COMM_OVERLAP] = {**NO_OVERLAP, **overlaps}
        return fields


def _latency_hiding(job: _Job) -> str:
    flag = "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true"
    return flag if job.workload.overlap > 0 else ""


_FUNCTIONS: Mapping[str, Sequence[Any]] = {  # `Launcher.options`, `lacks` and `program`
    "Megatron-LM": (_megatron, _unsupported_by_megatron, _connections),
    "Megatron-Bridge": (_bridge, _unsupported_by_megatron, lambda _: ""),
    "torchtitan": (_torchtitan, _unsupported_by_torchtitan, lambda _: ""),
    "DeepSpeed": (_deepspeed, _unsupported_by_deepspeed, _pipeline_module),
    "MaxText": (_maxtext, _unsupported_by_maxtext, _latency_hiding),
}
LAUNCHERS: Mapping[str, Launcher] = {
    name: Launcher(name, *_FUNCTIONS[name], **record)
    for name, record in read_named("arguments", "launchers", "file")[0]["launchers"].items()
}


def find_launcher(name: str) -> Launcher:
    """Return a launcher by name; case does not matter."""
    for key, launcher in LAUNCHERS.items():
        if key.lower() == name.lower():
            return launcher
    raise unknown("launcher", name, LAUNCHERS)


def launcher_defaults(
    name: str | None,
    model: Model,
    system: System,
    stack: Stack | str | Path | None = None,
    workers: int | None = None,
) -> tuple[Model, Stack, dict[str, Any]]:
    """Return (model, software stack, workload defaults) for a launcher, or without one."""
    # Defaults of `alone` (one pipeline worker) override those of the software, and these override
    # the launcher's. But the launcher's defaults override those of its own stacks, which may be of
    # an older version. A requested `stack` replaces that of the system's calibration. A model's own
    # gradient bytes override the launcher's. `workers` is the number of pipeline workers, if known.
    software = machine_software(system, stack)
    if name is None:
        return software.model(model), software, fields_for(model, software.workload)
    launcher = find_launcher(name)
    if launcher.gradient_bytes is not None and model.gradient_bytes is None:
        model = dataclasses.replace(model, gradient_bytes=launcher.gradient_bytes)
    if launcher.stack and stack is None and not software.name:
        default = load_stack(launcher.stack)
        software = default if default.is_known_on(system) else software
    if software.name in filter(None, (launcher.stack, launcher.compiled)):
        workload = {**software.workload, **launcher.workload}
        software = dataclasses.replace(software, workload=workload)
    alone = launcher.alone if workers == 1 else {}
    defaults = {**launcher.workload, **software.workload, **alone}
    return software.model(model), software, fields_for(model, defaults)


def default_overlap(name: str | None, zero: int) -> dict[str, Any]:
    """Return the field `overlap` that a launcher sets by default with a ZeRO; {} if it does not."""
    has_overlap = bool(name) and zero >= find_launcher(str(name)).overlap_from_zero
    return {"overlap": 1.0} if has_overlap else {}


def merge_fields(
    defaults: Mapping[str, Any], fields: Mapping[str, Any], launcher: str | None = None
) -> dict[str, Any]:
    """Merge fields into defaults; a pipeline layout resets embedding_units and loss_units."""
    units = {"embedding_units": 0, "loss_units": 0} if fields.get("pipeline_layout") else {}
    merged = {**defaults, **units, **fields}
    return default_overlap(launcher, merged.get("zero", 0)) | merged
