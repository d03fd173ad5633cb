"""Table of the fields of a workload, which Python, files and commands share.

A new field of `Workload` also needs an entry in the data, `costs/data/workload_fields.json`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.checks import MAX_COUNT, match_name, resolve_name, wrong
from pipejax.base.data_files import load_json
from pipejax.base.file_fields import FLAG, NUMBER, SHARE, TEXT, FieldKind, choice, whole

PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
WIDE = PRECISIONS[:2]  # precisions whose products need no cast of activations
RANK_ORDERS = ("tp-cp-ep-dp-pp", "tp-pp-dp")
RECOMPUTE = ("none", "selective", "full")
# forms of full recomputation: N layers of a stage, or all of them with a checkpoint every N layers
RECOMPUTE_METHODS = ("block", "uniform")
RECOMPUTE_FORMS = "block:N (N layers of a stage), uniform:N (a checkpoint every N layers)"
# parts of a layer that selective recomputation may repeat, as Megatron Core names them;
# `half_products` is torchtitan's policy: all but attention and every second product
MODULES = (
    *("core_attn", "half_products", "layernorm", "mla_up_proj"),
    *("mlp", "moe", "moe_act", "shared_experts"),
)
# kernels that a model may run unfused, which keeps more memory
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

    layers: float  # largest number of whole layers of a stage; infinity for all
    group: int  # layers that share a checkpoint
    in_layer: str  # recomputed parts of every other layer: "none", or names joined by +


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
    if name == "selective":  # as in Megatron Core, whatever the kernel of attention
        return Recomputation(0, 1, "core_attn")
    return Recomputation(math.inf if name == "full" else 0, 1, "none")


def check_recompute(recompute: str) -> str:
    """Return a recomputation in canonical form, with sorted parts; refuse invalid text."""
    layers, group, in_layer = parse_recompute(recompute)
    if not layers:
        return match_name(recompute, RECOMPUTE) or in_layer  # "selective" keeps its name
    if layers < math.inf:
        return f"block:{layers}"
    return "full" if group == 1 else f"uniform:{group}"


class WorkloadField(NamedTuple):
    """A field of `Workload`."""

    # "whole", "flag", "name", "number", "seconds", "share" (0 to 1), "text", or "recompute"
    kind: str
    head: str = ""  # help in one line; empty if the field is no option of models
    detail: str = ""  # help after this line
    least: int = 1  # smallest whole number
    largest: int | None = None  # largest whole number; None for `MAX_COUNT`
    names: tuple[str, ...] = ()  # names that the field may have
    form: str = ""  # how a text is written in a sweep
    in_plan: bool = False  # whether all layouts of a plan share its value

    @property
    def values(self) -> FieldKind:
        """Return the kind of value that files may have for this field."""
        kinds = {"flag": FLAG, "number": NUMBER, "seconds": NUMBER, "share": SHARE, "text": TEXT}
        kinds["recompute"] = FieldKind(lambda value, _: check_recompute(value), TEXT.schema)
        if self.kind == "whole":
            return whole(self.least, self.largest or MAX_COUNT)
        return choice(self.names) if self.kind == "name" else kinds[self.kind]


_NAMES = {
    "dispatcher": DISPATCHERS,
    "attention_precision": ("", *PRECISIONS),
    "head_precision": ("", *PRECISIONS),
    "precision": PRECISIONS,
    "rank_order": RANK_ORDERS,
}
# In the order of the help. A field without `head` is no option of models: it comes with a stack,
# is an option of all costs, or is for Python and sweeps only.
WORKLOAD_FIELDS: Mapping[str, WorkloadField] = {
    name: WorkloadField(**record, names=_NAMES.get(name, ()))
    for name, record in load_json(Path(__file__).parents[1] / "data/workload_fields.json").items()
}
