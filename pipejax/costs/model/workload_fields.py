"""Table of the fields of a workload, which Python, files and commands share.

Who adds a field to `Workload` adds a line here: the checks of `Workload`, the options of the
command line, the declaration of sweeps, the cells of measured rows and the request of a plan are
made from it.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipejax.base.checks import MAX_COUNT, resolve_name, wrong
from pipejax.base.file_fields import FLAG, NUMBER, SHARE, TEXT, FieldKind, choice, whole

PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
WIDE = PRECISIONS[:2]  # in which products take activations as they are
RANK_ORDERS = ("tp-cp-ep-dp-pp", "tp-pp-dp")
RECOMPUTE = ("none", "selective", "full")
# forms of full recomputation: N layers of a stage, or all of them with a checkpoint every N layers
RECOMPUTE_METHODS = ("block", "uniform")
RECOMPUTE_FORMS = "block:N (N layers of a stage), uniform:N (a checkpoint every N layers)"
# parts of a layer that selective recomputation may run again, as Megatron Core names them; and
# torchtitan's policy: all but attention and every second product
MODULES = (
    *("core_attn", "half_products", "layernorm", "mla_up_proj"),
    *("mlp", "moe", "moe_act", "shared_experts"),
)
# kernels of a model that may be separate, and so keep more
UNFUSED = ("activation", "attention", "gather", "logits", "loss", "norm", "softmax")
DISPATCHERS = ("all-to-all", "per-node")  # how tokens travel to their experts
OF_EXPERTS: Mapping[str, tuple[Any, ...]] = {  # values that models without experts may have
    "expert_parallel": (1,),
    "expert_tensor_parallel": (0, 1),
    "expert_overlap": (0,),
    "dispatcher": DISPATCHERS[:1],
}


class Recomputation(NamedTuple):
    """Layers, or parts of layers, that the backward recomputes."""

    layers: float  # whole layers of a stage, at most; infinity for all
    group: int  # layers that share a checkpoint
    in_layer: str  # parts of every other layer: "none", "selective", or names joined by +

    @property
    def num_layers(self) -> int:
        """Return N of block:N and uniform:N, which is 1 for full and 0 for parts of layers."""
        return self.group if self.layers == math.inf else int(self.layers)


def parse_recompute(recompute: str) -> Recomputation:
    """Parse a recomputation: none, selective, full, block:N, uniform:N, or parts joined by +."""
    method, colon, count = str(recompute).partition(":")
    if colon and method in RECOMPUTE_METHODS:
        if not (count.isdecimal() and 0 < int(count) <= MAX_COUNT):
            allowed = f"must be {method}:N, N from 1 to {MAX_COUNT}"
            raise wrong("recompute", f"{allowed}, got {recompute!r}")
        layers, group = (int(count), 1) if method == "block" else (math.inf, int(count))
        return Recomputation(layers, group, "none")
    parts = str(recompute).split("+")
    if set(parts) <= set(MODULES):
        if len({*parts}) < len(parts):
            raise wrong("recompute", f"must name a part of layers once, got {recompute!r}")
        return Recomputation(0, 1, "+".join(sorted(set(parts))))
    more = f", {RECOMPUTE_FORMS}, or parts of layers joined by +: {', '.join(MODULES)}"
    name = str(resolve_name(recompute, RECOMPUTE, "recompute", more))
    return Recomputation(math.inf, 1, "none") if name == "full" else Recomputation(0, 1, name)


def check_recompute(recompute: str) -> str:
    """Return a recomputation in canonical form, with sorted parts; refuse invalid text."""
    layers, group, in_layer = parse_recompute(recompute)
    if not layers:
        return in_layer
    if layers < math.inf:
        return f"block:{layers}"
    return "full" if group == 1 else f"uniform:{group}"


class WorkloadField(NamedTuple):
    """A field of `Workload`."""

    # "whole", "flag", "name", "number", "seconds", "share" (0 to 1), "text", or "recompute"
    kind: str
    head: str = ""  # its help in one line, or empty where no option of models has its name
    detail: str = ""  # its help beyond the line
    least: int = 1  # smallest whole number
    largest: int | None = None  # largest whole number, or None for what can be counted
    names: tuple[str, ...] = ()  # names that it may have
    form: str = ""  # how a text is written in a sweep
    in_plan: bool = False  # whether all layouts of a plan have it in common

    @property
    def values(self) -> FieldKind:
        """Return the kind of value that files may have for this field."""
        kinds = {"flag": FLAG, "number": NUMBER, "seconds": NUMBER, "share": SHARE, "text": TEXT}
        kinds["recompute"] = FieldKind(lambda value, _: check_recompute(value), TEXT.schema)
        if self.kind == "whole":
            return whole(self.least, self.largest or MAX_COUNT)
        return choice(self.names) if self.kind == "name" else kinds[self.kind]


# in the order in which help lists them
WORKLOAD_FIELDS: Mapping[str, WorkloadField] = {
    "tensor_parallel": WorkloadField(
        "whole", "tensor parallelism: accelerators that split each product"
    ),
    "sequence_parallel": WorkloadField(
        "flag", "sequence parallelism: split norms and messages too"
    ),
    "scatter_gather": WorkloadField(
        "flag", "each accelerator of a worker sends a part of the message", in_plan=True
    ),
    "context_parallel": WorkloadField(
        "whole", "context parallelism: accelerators that split a sequence"
    ),
    "expert_parallel": WorkloadField(
        "whole", "expert parallelism: accelerators that share the experts"
    ),
    "expert_tensor_parallel": WorkloadField(
        "whole",
        "accelerators that split each expert",
        "Default: as --tensor-parallel, as in Megatron-LM.",
        least=0,
    ),
    "data_parallel": WorkloadField("whole", "replicas of the pipeline"),
    "zero": WorkloadField(
        "whole",
        "ZeRO stage: tensors that the replicas split",
        "Stages: 0 (none), 1 (optimizer state), 2 (gradients too), 3 (weights too).",
        least=0,
        largest=3,
    ),
    "overlap": WorkloadField(
        "share",
        "share of the exchange of gradients and weights hidden by compute",
        "From 0 (none) to 1 (all that fits).",
        in_plan=True,
    ),
    "tensor_overlap": WorkloadField(
        "share",
        "share of the exchange of tensor parallelism hidden by compute",
        "From 0 (none) to 1 (all that fits beside the products of a backward).",
        in_plan=True,
    ),
    "expert_overlap": WorkloadField(
        "share",
        "share of the exchange of experts hidden by compute",
        "From 0 (none) to 1 (all that fits beside a layer of another microbatch).",
        in_plan=True,
    ),
    # on the command line these come with a stack
    "dispatcher": WorkloadField("name", names=DISPATCHERS, in_plan=True),
    "contiguous_context": WorkloadField("flag", in_plan=True),
    "graphs": WorkloadField("share", in_plan=True),
    "optimizer_offload": WorkloadField("share", in_plan=True),
    "attention_precision": WorkloadField("name", names=("", *PRECISIONS), in_plan=True),
    "head_precision": WorkloadField("name", names=("", *PRECISIONS), in_plan=True),
    "wide_first": WorkloadField("whole", least=0, in_plan=True),
    "wide_last": WorkloadField("whole", least=0, in_plan=True),
    "recompute": WorkloadField(
        "recompute",
        "activations to recompute",
        f"none, selective, full, {RECOMPUTE_FORMS}, or parts of layers joined by +: "
        + ", ".join(MODULES)
        + ".",
    ),
    # in Python and sweeps: block:N of recompute as a number of its own
    "recompute_layers": WorkloadField("whole", least=0),
    # on the command line an option of any costs
    "recompute_again": WorkloadField("flag", in_plan=True),
    # in Python and sweeps: fine-tuning
    "frozen": WorkloadField("flag"),
    "lora_rank": WorkloadField("whole", least=0),
    "precision": WorkloadField(
        "name",
        "number format of matrix products",
        "bf16, fp16, fp8, mxfp8 or nvfp4.",
        names=PRECISIONS,
        in_plan=True,
    ),
    "rank_order": WorkloadField(
        "name",
        "order of ranks: the first are neighbours",
        "Either tp-cp-ep-dp-pp or tp-pp-dp.",
        names=RANK_ORDERS,
        in_plan=True,
    ),
    "embedding_units": WorkloadField(
        "whole", "weight of the embedding, in layers, when layers are split", least=0
    ),
    "loss_units": WorkloadField(
        "whole", "weight of head and loss, in layers, when layers are split", least=0
    ),
    "pipeline_layout": WorkloadField(
        "text",
        "layers of each stage, as E|(t|)*30ttL",
        "E is the embedding, t a layer, m one for a further token (MTP), L head and loss, | ends a "
        "stage, x*n and (..)*n repeat, as in Megatron; or lists of embedding, decoder, mtp, loss, "
        "one for each stage, or for each rank and virtual stage.",
        form="a text, as E|(t|)*30ttL, or a list of words for each stage",
    ),
    # on the command line these are options of any costs, with or without a model
    "pair_factor": WorkloadField("number"),
    "stragglers": WorkloadField("text", form="a text, as 3=1.2,5=2"),
    "worker_places": WorkloadField("text", form="a text, as 0,4,1,5"),
}
