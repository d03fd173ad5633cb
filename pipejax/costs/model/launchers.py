"""What launchers of training are told so that they run a layout: flags, and files of options.

Names are those of Megatron-LM core 0.20 (megatron/training/arguments.py and the records that it
makes flags of), torchtitan 0.2.2 (torchtitan/config/job_config.py) and DeepSpeed 0.19 (its page on
config-json, deepspeed/runtime/pipe). Number formats of products and kernels are said elsewhere:
here is who holds what, in which order it runs, and of Megatron, by whose defaults exchanges of
replicas wait and gradients have four bytes, where these are otherwise.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.display import short_repr
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload import Workload, assign_layers
from pipejax.costs.model.workload_fields import RANK_ORDERS
from pipejax.schedules.table.table import ScheduleTable

PYTORCH: Mapping[str, str] = {  # schedules that PyTorch builds by these names
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "looped-bfs": "LoopedBFS",  # backwards in the other order, which takes and holds as much
}
Options = dict[str, Any]
HALF = 0.5  # the overlap of a run in which gradients travel beside compute, and no weights
FULL_GRADIENT = 4.0  # bytes that Megatron accumulates a gradient in unless it is told otherwise


@short_repr
class Launch(NamedTuple):
    """What one launcher is told.

    Attributes:
      launcher: its name.
      options: by name; True is a flag without a value, a list several values.
      lacks: what the layout has and the launcher has not; it runs the layout where this is empty.
      program: what stands in the user's own program beside the options, if anything does.
    """

    launcher: str
    options: Mapping[str, Any]
    lacks: tuple[str, ...]
    program: str = ""

    @property
    def text(self) -> str:
        """What is typed; of DeepSpeed what is written to its file, and to the program."""
        if self.launcher == "DeepSpeed":
            return "; ".join(filter(None, (json.dumps(dict(self.options)), self.program)))
        words = []
        for name, value in self.options.items():
            several = value if isinstance(value, list) else [value]
            if isinstance(several[0], list):  # names of modules, as the file takes them
                several = [json.dumps(several)]
            words += [f"--{name}", *(str(each) for each in several if each is not True)]
        return shlex.join(words)


def launches(workload: Workload, table: ScheduleTable) -> tuple[Launch, ...]:
    """Say how Megatron-LM, torchtitan and DeepSpeed are told to run a workload under a schedule.

    Args:
      workload: degrees of parallelism, what replicas split, what is recomputed, and the layers of
        each stage; its minibatch is of one pipeline.
      table: the schedule.

    Returns:
      One record for each launcher: its options, and what it lacks.

    Raises:
      ValueError: if layers or microbatches do not go with the table.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> workload = pj.Workload(pj.load_model("llama3-8b"), minibatch=16, tensor_parallel=2,
      ...                        sequence_parallel=True, data_parallel=2, zero=1)
      >>> megatron, torchtitan, deepspeed = pj.costing.launches(workload, table)
      >>> print(megatron.text)
      --micro-batch-size 2 --global-batch-size 32 --tensor-model-parallel-size 2
      --sequence-parallel --pipeline-model-parallel-size 4 --use-distributed-optimizer
      --grad-reduce-in-bf16
      >>> torchtitan.lacks
      ('ZeRO 1 (0, 2 and 3 are there)',)

    References:
      NVIDIA/Megatron-LM, pytorch/torchtitan v0.2.2, deepspeedai/DeepSpeed.
    """
    check_types(workload=(workload, Workload), table=(table, ScheduleTable))
    job = _Job(workload, table)
    return (
        Launch("Megatron-LM", _megatron(job), tuple(_lacks_of_megatron(job))),
        Launch("torchtitan", _torchtitan(job), tuple(_lacks_of_torchtitan(job))),
        Launch(
            "DeepSpeed", _deepspeed(job), tuple(_lacks_of_deepspeed(job)), _pipeline_module(job)
        ),
    )


def pipeline_launches(
    table: ScheduleTable, layers: Sequence[int] | None = None
) -> tuple[Launch, ...]:
    """Say the same of the pipeline alone, of a model that is not known.

    Args:
      table: the schedule.
      layers: (stages) layers of each stage; as the launcher has them if None.

    Returns:
      Records of Megatron-LM and torchtitan, whose options say what runs in which order.

    Raises:
      ValueError: if layers are of another number of stages.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=8)
      >>> for launch in pj.costing.pipeline_launches(table, layers=[5, 3]):
      ...     print(launch.text)
      --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*5|tttL'
      --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B
      --parallelism.module_fqns_per_model_part '[["tok_embeddings", "layers.0", "layers.1",
      "layers.2", "layers.3", "layers.4"], ["layers.5", "layers.6", "layers.7", "norm", "output"]]'
    """
    check_types(table=(table, ScheduleTable))
    pipeline, layout = _Pipeline(table), None
    if layers is not None:
        if len(layers) != table.num_stages:
            raise MismatchError(
                f"layers are of {len(layers)} stages, the table has {table.num_stages}", "layers"
            )
        layout = PipelineLayout.with_layers(layers, [0] * len(layers))
    own = {"pipeline_parallel_degree": pipeline.workers, **_order_of_torchtitan(pipeline)}
    if layout is not None:
        own["module_fqns_per_model_part"] = layout.module_fqns()
    return (
        Launch(
            "Megatron-LM",
            _stages_of_megatron(pipeline, layout),
            tuple(_order_lacks_of_megatron(pipeline)),
        ),
        Launch(
            "torchtitan",
            {f"parallelism.{name}": value for name, value in own.items()},
            tuple(_order_lacks_of_torchtitan(pipeline)),
        ),
    )


class _Pipeline:
    """Which stages run in which order, in the words that launchers share."""

    def __init__(self, table: ScheduleTable) -> None:
        self.table = table
        self.workers = table.num_workers
        self.several = table.num_stages // self.workers if table.num_pipes == 1 else 0
        self.schedule = table.name if self.workers > 1 else "1f1b"
        self.unusual = [table.grammar.unusual] * (not table.grammar.is_usual)


class _Job(_Pipeline):
    """A layout in the words that launchers share."""

    def __init__(self, workload: Workload, table: ScheduleTable) -> None:
        super().__init__(table)
        self.workload = workload
        self.size = workload.microbatch_size(table)
        self.batch = workload.minibatch * workload.data_parallel
        assigned = np.asarray(assign_layers(workload, table).layers)
        self.layers: Int[NumpyArray, " stages"] = assigned.astype(int)
        self.units = workload.embedding_units, workload.loss_units
        counted = self.layers.copy()
        counted[[0, -1]] += self.units if len(counted) > 1 else sum(self.units)
        self.each = int(counted[0])  # layers of a stage, embedding and head counted as they are
        self.is_even = not workload.pipeline_layout and bool((counted == self.each).all())

    @property
    def layout(self) -> PipelineLayout:
        if self.workload.pipeline_layout:
            return PipelineLayout.of(self.workload.pipeline_layout)
        mtp = np.zeros_like(self.layers)
        mtp[-1] = int(self.workload.model.mtp_layers)
        return PipelineLayout.with_layers(self.layers, mtp)


def _megatron(job: _Job) -> Options:
    one = job.workload
    found: Options = {"micro-batch-size": job.size, "global-batch-size": job.batch}
    found["tensor-model-parallel-size"] = one.tensor_parallel
    if one.sequence_parallel:
        found["sequence-parallel"] = True
    if one.context_parallel > 1:
        found["context-parallel-size"] = one.context_parallel
    if one.expert_parallel > 1:
        found["expert-model-parallel-size"] = one.expert_parallel
    if one.has_experts and (one.tensor_parallel > 1 or one.expert_tensor > 1):
        found["expert-tensor-parallel-size"] = one.expert_tensor
    is_alike = job.is_even and job.units == (0, 0)
    found |= _stages_of_megatron(job, None if is_alike else job.layout)
    if one.zero:
        found["use-distributed-optimizer"] = True
    if one.zero > 1:
        found["use-megatron-fsdp"] = True
        found["data-parallel-sharding-strategy"] = ("optim_grads", "optim_grads_params")[
            one.zero - 2
        ]
    if one.data_parallel * one.context_parallel > 1 and one.overlap > 0:
        found["overlap-grad-reduce"] = True
        if one.zero and one.overlap > HALF:
            found["overlap-param-gather"] = True
    if float(one.model.accumulated_bytes) < FULL_GRADIENT:
        found["grad-reduce-in-bf16"] = True
    if layers := one.recomputation.layers:
        found["recompute-granularity"] = "full"
        found["recompute-method"] = "block" if layers < math.inf else "uniform"
        found["recompute-num-layers"] = (
            int(layers) if layers < math.inf else one.recomputation.group
        )
    elif one.recompute != "none":
        found["recompute-granularity"] = "selective"
        parts = "core_attn" if one.recompute == "selective" else one.recompute
        found["recompute-modules"] = parts.split("+")
    if one.rank_order != RANK_ORDERS[0]:
        found["use-tp-pp-dp-mapping"] = True
    return found


def _stages_of_megatron(pipeline: _Pipeline, layout: PipelineLayout | None) -> Options:
    """How many stages there are, and what each holds where they are not alike."""
    found: Options = {"pipeline-model-parallel-size": pipeline.workers}
    if pipeline.workers > 1 and layout is not None:
        found["pipeline-model-parallel-layout"] = str(layout)
    elif pipeline.workers > 1 and pipeline.several > 1:
        found["num-virtual-stages-per-pipeline-rank"] = pipeline.several
    return found


def _order_lacks_of_megatron(pipeline: _Pipeline) -> Iterator[str]:
    yield from pipeline.unusual
    if pipeline.schedule != ("interleaved-1f1b" if pipeline.several > 1 else "1f1b"):
        yield f"schedule {pipeline.schedule} (1f1b and interleaved-1f1b are there)"


def _lacks_of_megatron(job: _Job) -> Iterator[str]:
    yield from _order_lacks_of_megatron(job)
    if "half_products" in job.workload.recompute:
        yield "recomputation of every second product"


def _torchtitan(job: _Job) -> Options:
    one, many = job.workload, job.workers > 1
    splits = one.data_parallel if one.zero else 1
    degrees = {
        "data_parallel_replicate_degree": one.data_parallel // splits,
        "data_parallel_shard_degree": splits,
        "tensor_parallel_degree": one.tensor_parallel,
        "context_parallel_degree": one.context_parallel,
        "expert_parallel_degree": one.expert_parallel,
        "expert_tensor_parallel_degree": one.expert_tensor if one.has_experts else 1,
        "pipeline_parallel_degree": job.workers,
    }
    # what is left of the accelerators splits weights, if nothing is said
    own: Options = {name: n for name, n in degrees.items() if n > 1 or "shard" in name}
    if one.zero > 1:
        own["fsdp_reshard_after_forward"] = "always" if one.zero == 3 else "never"
    if many:
        own["pipeline_parallel_microbatch_size"] = job.size
        own |= _order_of_torchtitan(job)
        if job.is_even:
            own["pipeline_parallel_first_stage_less_layers"] = job.units[0]
            own["pipeline_parallel_last_stage_less_layers"] = job.units[1]
            own["pipeline_parallel_layers_per_stage"] = job.each
        elif not one.model.mtp_layers:
            own["module_fqns_per_model_part"] = job.layout.module_fqns()
    kinds = {"half_products": "selective", "full": "full"}
    found: Options = {
        "training.local_batch_size": one.minibatch if many else job.size,
        "training.global_batch_size": job.batch,
        **{f"parallelism.{name}": value for name, value in own.items()},
        "activation_checkpoint.mode": kinds.get(one.recompute, "none"),
    }
    if one.recompute == "half_products":
        found["activation_checkpoint.selective_ac_option"] = "op"
    return found


def _order_of_torchtitan(pipeline: _Pipeline) -> Options:
    if pipeline.schedule in PYTORCH:
        return {"pipeline_parallel_schedule": PYTORCH[pipeline.schedule]}
    return {"pipeline_parallel_schedule_csv": f"{pipeline.schedule}.csv"}


def _order_lacks_of_torchtitan(pipeline: _Pipeline) -> Iterator[str]:
    yield from pipeline.unusual
    if pipeline.several == 0:
        yield "schedules of several pipes"
    if pipeline.table.has_communication:
        yield "tables with SEND and RECV (it reads compute alone)"


def _lacks_of_torchtitan(job: _Job) -> Iterator[str]:
    one = job.workload
    if one.zero == 1:
        yield "ZeRO 1 (0, 2 and 3 are there)"
    if one.zero == 0 and one.context_parallel > 1:
        yield "context parallelism of weights that are not split (ZeRO 2 and 3 go with it)"
    if one.tensor_parallel > 1 and not one.sequence_parallel:
        yield "tensor parallelism without sequence parallelism"
    if one.has_experts and one.expert_tensor not in (1, one.tensor_parallel):
        yield f"experts in {one.expert_tensor} parts (1 and as many as of a layer are there)"
    if one.recompute not in ("none", "full", "half_products"):
        yield f"recomputation {one.recompute} (none, full and half_products are there)"
    if one.rank_order != RANK_ORDERS[0]:
        yield f"rank order {one.rank_order}"
    if job.workers > 1 and one.model.mtp_layers:
        yield "layers for further tokens in a pipeline"
    yield from _order_lacks_of_torchtitan(job)


def _deepspeed(job: _Job) -> Options:
    one = job.workload
    found: Options = {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": job.size,
        "gradient_accumulation_steps": job.table.num_microbatches,
        "zero_optimization": {"stage": one.zero},
    }
    if one.tensor_parallel > 1 and job.workers == 1:
        found["tensor_parallel"] = {"autotp_size": one.tensor_parallel}
    if one.expert_parallel > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": one.expert_parallel}
    return found


def _pipeline_module(job: _Job) -> str:
    """How the user's program makes the pipeline of DeepSpeed."""
    if job.workers == 1:
        return ""
    axes = f"num_pp={job.workers}, num_mp={job.workload.tensor_parallel}"
    layers, group, _ = job.workload.recomputation
    again = f", activation_checkpoint_interval={group}" * (layers == math.inf)
    return (
        f"PipelineModule(layers, topology=PipeModelDataParallelTopology({axes}, "
        f"num_dp={job.workload.data_parallel}), partition_method='type:transformer'{again})"
    )


def _lacks_of_deepspeed(job: _Job) -> Iterator[str]:
    one, many = job.workload, job.workers > 1
    if many and (job.schedule, job.several) != ("1f1b", 1):
        yield f"schedule {job.schedule} (1f1b is there)"
    if many and not (job.is_even and job.units == (0, 0)):
        yield "stages with unequal layers"
    if many and one.zero > 1:
        yield f"ZeRO {one.zero} in a pipeline (0 and 1 are there)"
    if one.sequence_parallel:
        yield "sequence parallelism beside tensor parallelism"
    if one.context_parallel > 1:
        yield "context parallelism"
    if one.tensor_parallel > 1 and one.expert_parallel > 1:
        yield "experts beside tensor parallelism"
    if one.recompute != "none" and one.recomputation.layers < math.inf:
        yield f"recomputation {one.recompute} (none, full and uniform:N are there)"
