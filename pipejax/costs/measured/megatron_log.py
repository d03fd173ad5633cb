"""Megatron's training log: the model that it trained, and rows of what was measured.

A log holds the arguments of the run, each as `name ..... value`, and then lines of iterations with
their time. What the arguments say and a row cannot is an error that names the argument.
"""

import ast
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.checks import MAX_COUNT, whole_number
from pipejax.base.files import read_file

_ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{2,} (.*?)\s*$")
_ITERATION = re.compile(
    r"iteration\s+(\d+)\s*/\s*\d+ \|.*?elapsed time per iteration \(ms\): ([\d.]+)"
)
_BATCH = re.compile(r"global batch size:\s*(\d+)")
_VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_MEMORY = re.compile(r"memory \(MB\) \|.*?max allocated: ([\d.]+)")
_MEGABYTE = 2**20  # as Megatron counts
_SIZES = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_hidden": "ffn_hidden_size",
    "sequence_tokens": "seq_length",
}
# arguments that divide layers in ways that a row does not say
_UNSAID = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "moe_pad_expert_input_to_capacity",
    "heterogeneous_layers_config_path",
)
_NOTHING = ("None", "False", "[]", "")


class MegatronLog(NamedTuple):
    """What a log says.

    Attributes:
      path: of the log, for errors.
      arguments: texts by name.
      times: of iterations in order: number of the iteration, sequences of it, seconds.
      vocabulary: padded; 0 if the log does not say it.
      memory_bytes: most that a rank allocated, NaN if the log does not say it [B].
    """

    path: Path
    arguments: Mapping[str, str]
    times: Sequence[tuple[int, int, float]]
    vocabulary: int
    memory_bytes: float

    @classmethod
    def read(cls, path: str | Path) -> "MegatronLog":
        """Read a log; of several runs in it the last one counts.

        Raises:
          ValueError: if it holds no arguments.
          OSError: if it cannot be read.
        """
        arguments: dict[str, str] = {}
        times: list[tuple[int, int, float]] = []
        vocabulary, memory = 0, math.nan
        for line in read_file(Path(path)).decode(errors="replace").splitlines():
            if "-- arguments --" in line:
                arguments, times, vocabulary, memory = {}, [], 0, math.nan
            elif found := _ITERATION.search(line):
                batch = _BATCH.search(line)
                times.append((int(found[1]), int(batch[1]) if batch else 0, float(found[2]) / 1e3))
            elif found := _VOCABULARY.search(line):
                vocabulary = int(found[1])
            elif held := _MEMORY.findall(line):  # ranks may write into one line
                memory = max(0.0 if math.isnan(memory) else memory, *map(float, held))
            elif (found := _ARGUMENT.search(line)) and not times:
                arguments[found[1]] = found[2]
        if "num_layers" not in arguments:
            raise ValueError(
                f"{path}: it holds no arguments, as `num_layers ..... 48`: give the log from its "
                "start"
            )
        return cls(Path(path), arguments, times, vocabulary, memory * _MEGABYTE)

    def given(self, name: str) -> str:
        """Text of an argument that says something, or empty."""
        text = self.arguments.get(name, "")
        return "" if text in _NOTHING else text

    def is_on(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.arguments.get(name) == "True"

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Read a whole number, which has to be there if there is no default."""
        text = self.given(name)
        if not text and default is not None:
            return default
        if not text:
            raise ValueError(f"{self.path}: {name} is not among the arguments")
        value: Any = int(text) if text.isdecimal() else text
        return whole_number(value, f"{self.path}: {name}", least=least, most=MAX_COUNT)

    def model(self) -> dict[str, Any]:
        """Return the content of a model's file, without a name.

        Raises:
          ValueError: if an argument is missing, or says what a model's file cannot.
        """
        content: dict[str, Any] = {
            "source": f"Arguments of Megatron in {self.path.name}.",
            **{name: self.whole(key) for name, key in _SIZES.items()},
        }
        heads, latent = content["heads"], self.is_on("multi_latent_attention")
        grouped = self.is_on("group_query_attention") and not latent
        vocabulary = self.vocabulary or self.whole("padded_vocab_size", 0, least=0)
        positions = self.given("position_embedding_type") or "learned_absolute"
        content |= {
            "kv_heads": self.whole("num_query_groups") if grouped else heads,
            "vocabulary": vocabulary or self.whole("vocab_size"),
            "gated_mlp": self.is_on("swiglu"),
            "biases": self.arguments.get("add_bias_linear", "True") == "True",
            "learned_positions": positions == "learned_absolute",
            "tied_embeddings": not self.is_on("untie_embeddings_and_output_weights"),
            "dropout": any(self._dropout(name) for name in ("attention", "hidden")),
            "flash_attention": self._has_flash,
        }
        if latent:
            content |= self._latent()
        elif (width := self.whole("kv_channels", 0, least=0)) and width * heads != content[
            "hidden"
        ]:
            content["head_width"] = width
        if self.given("num_experts"):
            content["moe"] = self._experts()
        if self.given("mtp_num_layers"):
            content["mtp_layers"] = self.whole("mtp_num_layers")
        if self.is_on("accumulate_allreduce_grads_in_fp32"):
            content["gradient_bytes"] = 4
        return content

    def rows(self, model: str) -> tuple[list[dict[str, Any]], list[str]]:
        """Return rows of measured runs, one for each size of batch, and what they leave out.

        The first line of each is left out where there are several: it compiles and warms up.

        Args:
          model: name or file of the model.

        Raises:
          ValueError: if an argument is missing or says what a row cannot, or no time is there.
        """
        for name in _UNSAID:
            if self.given(name):
                raise ValueError(f"{self.path}: {name} {self.given(name)}: a row cannot say it")
        if not self.times:
            raise ValueError(
                f"{self.path}: no line says `elapsed time per iteration (ms)`: the run has to "
                "print iterations (--log-interval)"
            )
        batches: dict[int, list[float]] = {}
        for _, batch, time in self.times:
            batches.setdefault(batch or self.whole("global_batch_size"), []).append(time)
        shared, notes = self._layout(), []
        rows = []
        for batch, seconds in batches.items():
            kept = seconds[1:] or seconds
            if len(seconds) == 1:
                notes.append(f"{self.path}: only one line of {batch} sequences, with its warm-up")
            row = {"model": model, **shared, "global_batch": batch}
            row["seconds"] = float(f"{statistics.fmean(kept):.6g}")
            if len(kept) > 1:
                row |= {"n": len(kept), "spread": float(f"{statistics.stdev(kept):.3g}")}
            if not math.isnan(self.memory_bytes):
                row["memory_bytes"] = round(self.memory_bytes)
            rows.append(row | {"source": f"{self.path.name}, iterations timed by Megatron"})
        return rows, notes

    def _layout(self) -> dict[str, Any]:
        """Columns that all rows of a run share."""
        sizes = {
            "tensor": self.whole("tensor_model_parallel_size"),
            "context": self.whole("context_parallel_size", 1),
            "expert": self.whole("expert_model_parallel_size", 1),
            "expert_tensor": self.whole("expert_tensor_parallel_size", 0),
            "pipeline": self.whole("pipeline_model_parallel_size"),
        }
        fsdp = any(map(self.is_on, ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")))
        shards = 3 if fsdp else int(self.is_on("use_distributed_optimizer"))
        beside = self.is_on("overlap_grad_reduce"), self.is_on("overlap_param_gather")
        return {
            **sizes,
            "accelerators": self.whole("world_size"),
            "stages_per_worker": self._stages_per_worker(sizes["pipeline"]),
            "microbatch_size": self.whole("micro_batch_size"),
            "recompute": self._recompute(),
            "precision": self._precision(),
            "zero": shards,
            "sequence_parallel": int(self.is_on("sequence_parallel")),
            "overlap": sum(beside) / 2 if shards else float(beside[0]),
            "embedding_units": int(self.is_on("account_for_embedding_in_pipeline_split")),
            "loss_units": int(self.is_on("account_for_loss_in_pipeline_split")),
        }

    def _stages_per_worker(self, pipeline: int) -> int:
        if self.given("num_virtual_stages_per_pipeline_rank"):
            return self.whole("num_virtual_stages_per_pipeline_rank")
        if self.given("virtual_pipeline_model_parallel_size"):
            return self.whole("virtual_pipeline_model_parallel_size")
        if not self.given("num_layers_per_virtual_pipeline_stage"):
            return 1
        per_stage = self.whole("num_layers_per_virtual_pipeline_stage")
        return self.whole("num_layers") // (pipeline * per_stage)

    def _recompute(self) -> str:
        kind = self.given("recompute_granularity") or "none"
        if kind == "full" and self.given("recompute_method") == "block":
            count = self.whole("recompute_num_layers")
            raise ValueError(
                f"{self.path}: recompute_method block, {count} layers of a stage: a row says full "
                "or none"
            )
        modules = self.given("recompute_modules")
        if kind != "selective" or not modules:
            return kind
        try:
            names = ast.literal_eval(modules)
        except (ValueError, SyntaxError):
            names = modules.split()
        return "+".join(names)

    def _precision(self) -> str:
        if self.given("fp4"):
            return "nvfp4"
        if not self.given("fp8"):
            return "bf16"
        return "mxfp8" if self.given("fp8_recipe") == "mxfp8" else "fp8"

    @property
    def _has_flash(self) -> bool:
        """Whether attention is one kernel: asked for, or what Transformer Engine takes."""
        unfused = "unfused" in self.given("attention_backend") or "local" in self.given(
            "attention_backend"
        )
        engine = self.given("transformer_impl") == "transformer_engine"
        return not unfused and (engine or self.is_on("use_flash_attn"))

    def _dropout(self, name: str) -> float:
        return float(self.given(f"{name}_dropout") or 0.1)  # as Megatron has it if left out

    def _latent(self) -> dict[str, Any]:
        ranks = {
            "kv_rank": self.whole("kv_lora_rank"),
            "rope_width": self.whole("qk_pos_emb_head_dim"),
            "value_width": self.whole("v_head_dim"),
        }
        if self.given("q_lora_rank"):
            ranks["query_rank"] = self.whole("q_lora_rank")
        return {"head_width": self.whole("qk_head_dim"), "mla": ranks}

    def _experts(self) -> dict[str, Any]:
        width = self.whole("moe_ffn_hidden_size", self.whole("ffn_hidden_size"))
        shared = self.whole("moe_shared_expert_intermediate_size", 0)
        if shared % width:
            raise ValueError(
                f"{self.path}: moe_shared_expert_intermediate_size must be a multiple of {width}, "
                f"got {shared}"
            )
        found: dict[str, Any] = {
            "experts": self.whole("num_experts"),
            "top_k": self.whole("moe_router_topk"),
            "expert_hidden": width,
            "shared_experts": shared // width,
            "dense_layers": self._dense_layers(),
        }
        if self.given("moe_expert_capacity_factor"):
            found["capacity_factor"] = float(self.given("moe_expert_capacity_factor"))
        return found

    def _dense_layers(self) -> int:
        """First layers without experts: those with 0 in a list of all layers."""
        text = self.given("moe_layer_freq") or "1"
        if text == "1":
            return 0
        digits = re.findall(r"[01]", text) if re.fullmatch(r"\[[01, ]+\]", text) else []
        dense = digits.index("1") if "1" in digits else 0
        if not digits or "0" in digits[dense:]:
            raise ValueError(
                f"{self.path}: moe_layer_freq {text}: layers with and without experts in turn "
                "cannot be described"
            )
        return dense
