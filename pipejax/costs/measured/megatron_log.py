"""Training logs of Megatron: read the model's sizes and rows of measured step times.

`costs/data/arguments/megatron.json` lists the arguments of all versions with their older names. The
file also lists the arguments that the reader ignores, and what the reader assumes instead.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.checks import MAX_COUNT, whole_number
from pipejax.costs.measured.trainer_logs import (
    MEGATRON,
    TimedLine,
    TrainerLog,
    check_columns,
    find_settings,
    read_log_lines,
    rows_by_batch,
)
from pipejax.costs.model.arguments import NOTHING, load_arguments
from pipejax.costs.model.model import Model, read_model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload_fields import RECOMPUTE_METHODS, check_recompute

# dots pad names to 48 characters; GPT-NeoX adds `default` or `updated` after the value
_ARGUMENT = re.compile(r"(?:^|[\s:\]])(\w{48,} |\w+ \.+) (.*?)(?:\.+(?:default|updated))?\s*$")
_VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_MEMORY = {  # {form: bytes per unit}: Megatron-LM counts in 2^20, Megatron-Bridge in 10^9
    r"memory \(MB\) \|.*?max allocated:": 2**20,
    r"mem-max-allocated-gigabytes:": 1e9,
}
_UNSUPPORTED = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
# sizes that are compared between a log and the model of its rows
_COMPARED = (
    *("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocabulary", "gated_mlp", "biases"),
    *("learned_positions", "tied_embeddings", "mtp_layers", "moe", "mla"),
)
# {column of a row: (attribute of the model, arguments of Megatron that set it)}
_RUN_COLUMNS = {
    "sequence": ("sequence", ("seq_length",)),
    "gradient_bytes": ("accumulated_bytes", ("accumulate_allreduce_grads_in_fp32",)),
    "flash_attention": ("flash_attention", ("transformer_impl", "use_flash_attn")),
    "dropout": ("dropout", ("attention_dropout", "hidden_dropout")),
}


class MegatronLog(NamedTuple):
    """Contents of a log."""

    path: Path  # path of the log, for error messages
    arguments: Mapping[str, str]  # {name: text}
    times: Sequence[TimedLine]  # times of iterations
    vocabulary: int  # padded size; 0 if the log does not say it
    memory_bytes: float  # peak that a rank allocated, NaN if the log does not say it [B]
    skipped: int = 0  # iterations of earlier runs
    text_notes: Sequence[str] = ()  # notes on settings in other lines

    @classmethod
    def read(cls, path: str | Path) -> "MegatronLog":
        """Read a log file, gzipped or not; if it holds several runs, use the last run."""
        log = read_log(path)
        if isinstance(log, TrainerLog):
            raise ValueError(
                f"{path}: it lists no arguments such as `num_layers ..... 48`: it is a log of "
                f"{log.trainer.name}, which says no sizes of a model; give `pipejax init rows "
                f"--from {path} --model NAME` a NAME of `pipejax schedules --models`, or a file "
                "that `pipejax init model --from config.json` writes"
            )
        return log

    def text(self, name: str) -> str:
        """Return an argument's value as text, under its current or older names; empty if unset."""
        for alias in (name, *load_arguments("megatron").names.get(name, ())):
            if self.arguments.get(alias, "") not in NOTHING:
                return self.arguments[alias]
        return ""

    def is_on(self, name: str) -> bool:
        """Return whether an argument's value is True."""
        return self.text(name) == "True"

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an argument's value as a whole number; it is required if it has no default."""
        text = self.text(name)
        if not text and default is not None:
            return default
        if not text:
            raise ValueError(f"{self.path}: {name} is not among the arguments")
        text = text.removesuffix(".0")  # zero_stage 1.0
        value: Any = int(text) if text.isdecimal() else text
        return whole_number(value, f"{self.path}: {name}", minimum=minimum, maximum=MAX_COUNT)

    def model(self) -> dict[str, Any]:
        """Return the content of a model file (without its name) for the model in the log."""
        content: dict[str, Any] = {
            "source": f"Arguments of Megatron in {self.path.name}.",
            **{name: self.integer(key) for name, key in load_arguments("megatron").sizes.items()},
            "ffn_hidden": self.integer("ffn_hidden_size", 4 * self.integer("hidden_size")),
        }
        heads, is_latent = content["heads"], self.is_on("multi_latent_attention")
        has_groups = self.is_on("group_query_attention")
        kv_argument = "num_query_groups" if has_groups else "num_key_value_heads"
        multiple = self.integer("make_vocab_size_divisible_by", 1)
        multiple *= self.integer("tensor_model_parallel_size", 1)
        vocabulary = self.vocabulary or self.integer("padded_vocab_size", 0, minimum=0)
        content |= {
            "kv_heads": heads if is_latent else self.integer(kv_argument, heads),
            "vocabulary": vocabulary or -(-self.integer("vocab_size") // multiple) * multiple,
            "gated_mlp": self.is_on("swiglu") or "glu" in self.text("glu_activation"),
            "biases": self.arguments.get("add_bias_linear", "True") == "True",
            "learned_positions": self._has_positions,
            "tied_embeddings": not self.is_on("untie_embeddings_and_output_weights"),
            "dropout": any(  # Megatron's default is 0.1
                float(self.text(f"{name}_dropout") or 0.1) for name in ("attention", "hidden")
            ),
            "flash_attention": self._has_flash,
        }
        width = self.integer("kv_channels", 0, minimum=0)
        if is_latent:
            content |= self._latent_sizes()
        elif width and width * heads != content["hidden"]:
            content["head_width"] = width
        if self.text("num_experts"):
            content["moe"] = self._experts()
        if self.text("mtp_num_layers"):
            content["mtp_layers"] = self.integer("mtp_num_layers")
        if self.is_on("accumulate_allreduce_grads_in_fp32"):
            content["gradient_bytes"] = 4
        norm = self.text("normalization").lower()
        if norm and (norm == "layernorm") != content["biases"]:
            content["norm_biases"] = norm == "layernorm"
        if self.is_on("add_qkv_bias"):
            content["qkv_biases"] = True
        if self.is_on("qk_layernorm") and not is_latent:
            content["qk_norms"] = True
        fusions = {"activation": "bias_swiglu_fusion", "softmax": "masked_softmax_fusion"}
        unfused = [name for name, key in fusions.items() if self.arguments.get(key) == "False"]
        if unfused:
            content["unfused"] = "+".join(unfused)
        return content

    def notes(self) -> list[str]:
        """List the arguments that are ignored, each with the assumption made instead."""
        derived = {"has_learned_positions": str(self._has_positions)}
        return load_arguments("megatron").notes({**self.arguments, **derived}, str(self.path))

    def differences(self, model: Model) -> tuple[dict[str, Any], list[str]]:
        """Compare the log's model with the model that its rows name."""
        # Return (columns, notes): columns by which a row takes the log's values, such as its
        # sequence length, and notes on sizes that differ but that no column can set.
        try:
            trained = read_model({"name": model.name, **self.model()}, str(self.path))
        except ValueError as error:  # rows need no sizes of the log
            return {}, [f"{error}: the sizes of {model.name} are not compared with the log's"]
        columns = {
            name: int(getattr(trained, attribute))
            for name, (attribute, arguments) in _RUN_COLUMNS.items()
            if any(argument in self.arguments for argument in arguments)
            and getattr(trained, attribute) != getattr(model, attribute)
        }
        sizes = [
            f"{name} {getattr(trained, name)} ({getattr(model, name)})"
            for name in _COMPARED
            if getattr(trained, name) != getattr(model, name)
        ]
        if not sizes:
            return columns, []
        return columns, [
            f"{self.path}: the log has {', '.join(sizes)}; sizes in brackets are those of "
            f"{model.name}: pipejax init model --from {self.path} writes the log's model"
        ]

    def rows(
        self, model: str, trained: Model | None = None, cells: Mapping[str, str] | None = None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return a row of measured step times per batch size, and notes on what rows leave out."""
        # `model` and `cells` are columns of all rows. The sizes of the model `trained`, if it is
        # given, are compared with the log's.
        for name in _UNSUPPORTED:
            if self.text(name):
                raise ValueError(f"{self.path}: {name} {self.text(name)}: no column holds it")
        if {self.arguments.get(name) for name in ("bf16", "fp16")} == {"False"}:
            raise ValueError(f"{self.path}: bf16 and fp16 are False: rows have no 32 bits")
        if not self.times:
            raise ValueError(
                f"{self.path}: no line has `elapsed time per iteration (ms)`: the run must "
                "print iterations (--log-interval)"
            )
        times = [line._replace(batch=line.batch or self._global_batch) for line in self.times]
        timed_rows, notes = rows_by_batch(self.path, times)
        if self.skipped:
            notes.append(f"{self.path}: {self.skipped} iterations of earlier runs are left out")
        shared = {"model": model, **self.layout_columns()}
        memory = {} if math.isnan(self.memory_bytes) else {"memory_bytes": round(self.memory_bytes)}
        source = {"source": f"{self.path.name}, iterations timed by Megatron"}
        if trained is not None:
            columns, differences = self.differences(trained)
            shared, notes = shared | columns, notes + differences
        check_columns(self.path, [*(shared | timed_rows[0] | memory | source)], cells or {})
        shared |= cells or {}
        notes += [*self._dropped_layers(shared), *self.text_notes]
        return [shared | row | memory | source for row in timed_rows], notes + self.notes()

    def _dropped_layers(self, columns: Mapping[str, Any]) -> Iterator[str]:
        """Yield a note if layers do not divide over stages, which Megatron-LM refuses today."""
        stages, layers = columns["pipeline"] * columns["stages_per_worker"], self.text("num_layers")
        rest = (int(layers) + columns["embedding_units"] + columns["loss_units"]) % stages
        # DeepSpeed and layouts split layers unequally
        if rest and "pipeline_layout" not in columns and not self.is_on("deepspeed"):
            why = f"Megatron-LM until 2024 drops {rest} of them, rows predict all"
            yield f"{self.path}: {layers} layers do not divide over {stages} stages: {why}"

    @property
    def _global_batch(self) -> int:
        """Return the number of sequences per step; logs of 2020 give it per replica."""
        if not self.text("global_batch_size") and "batch_size" in self.arguments:
            sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
            replicas = self.integer("world_size") // math.prod(self.integer(n, 1) for n in sizes)
            return self.integer("batch_size") * replicas
        return self.integer("global_batch_size")

    def layout_columns(self) -> dict[str, Any]:
        """Return a row's columns for parallelism, schedule, precision and recomputation."""
        sizes = {
            "tensor": self.integer("tensor_model_parallel_size"),
            "context": self.integer("context_parallel_size", 1),
            "expert": self.integer("expert_model_parallel_size", 1),
            "pipeline": self.integer("pipeline_model_parallel_size"),
        }
        zero, overlap = self._zero(), float(self.is_on("overlap_grad_reduce"))
        if zero:  # half of the traffic is gradients, the other half weights
            overlap = (overlap + self.is_on("overlap_param_gather")) / 2
        columns: dict[str, Any] = {
            **sizes,
            "accelerators": self.integer("world_size"),
            "stages_per_worker": self._stages_per_worker(sizes["pipeline"]),
            "microbatch_size": self.integer("micro_batch_size"),
            "recompute": self._recompute(),
            "precision": self._precision(),
            "zero": zero,
            "sequence_parallel": int(self.is_on("sequence_parallel")),
            "overlap": overlap,
            "tensor_overlap": float(self.is_on("tp_comm_overlap")),
            "embedding_units": int(self.is_on("account_for_embedding_in_pipeline_split")),
            "loss_units": int(self.is_on("account_for_loss_in_pipeline_split")),
        }
        if "embedding" in self.text("pp_partition_method"):  # of DeepSpeed's pipeline
            columns["embedding_units"] = columns["loss_units"] = 1
        if self.text("num_experts"):  # DeepSpeed leaves experts whole unless a switch is on
            is_whole = self.arguments.get("enable_expert_tensor_parallelism") == "False"
            columns["expert_tensor"] = self.integer("expert_tensor_parallel_size", int(is_whole))
            if self.is_on("moe_enable_deepep") or self.text("moe_token_dispatcher_type") == "flex":
                columns["dispatcher"] = "per-node"
        if layout := self._pipeline_layout(sizes["pipeline"], columns["stages_per_worker"]):
            columns["pipeline_layout"] = layout
        # as in Megatron Core, one layer at each end by default
        ends = [
            self.integer(f"num_layers_at_{end}_in_bf16", 1, minimum=0) for end in ("start", "end")
        ]
        if self.is_on("first_last_layers_bf16"):
            columns["wide_first"], columns["wide_last"] = ends
        if self.is_on("enable_zbh1_pipeline"):
            columns["schedule"] = "zb-h1"
        if self.is_on("optimizer_cpu_offload") or self.is_on("cpu_optimizer"):
            columns["optimizer_offload"] = float(self.text("optimizer_offload_fraction") or 1)
        return columns

    def _zero(self) -> int:
        """Return the ZeRO stage, 0 to 3, that arguments of FSDP, DeepSpeed or Megatron set."""
        if self.is_on("use_torch_fsdp2"):
            return 3
        if self.is_on("use_megatron_fsdp"):
            strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
            strategy = self.text("data_parallel_sharding_strategy")
            return strategies.index(strategy) if strategy in strategies else 3
        has_deepspeed = self.arguments.get("deepspeed", "True") == "True"
        stage = self.integer("zero_stage", 0, minimum=0) if has_deepspeed else 0
        return max(stage, int(self.is_on("use_distributed_optimizer")))

    def _pipeline_layout(self, workers: int, stages_per_worker: int) -> str:
        """Return the pipeline layout in Megatron's letters, as Et|tL; empty for the default."""
        if self.text("pipeline_model_parallel_layout"):
            return str(PipelineLayout.parse(self.text("pipeline_model_parallel_layout")))
        first = self.integer("decoder_first_pipeline_num_layers", 0)
        last = self.integer("decoder_last_pipeline_num_layers", 0)
        if not (first or last):
            return ""
        # 12 layers on 4 workers, 2 first and 4 last: 6 on 2 workers in the middle, so 2 3 3 4
        middle = workers - (first > 0) - (last > 0)
        rest = self.integer("num_layers") - first - last
        counts = [rest // max(middle, 1)] * workers
        counts[0], counts[-1] = first or counts[0], last or counts[-1]
        is_divided = all(count % stages_per_worker == 0 for count in counts)
        if sum(counts) != self.integer("num_layers") or not is_divided:
            raise ValueError(
                f"{self.path}: {first} first and {last} last layers leave {rest}, which must "
                f"divide over {middle} workers of {stages_per_worker} stages"
            )
        layers = [count // stages_per_worker for count in counts] * stages_per_worker
        mtp = [0] * (len(layers) - 1) + [self.integer("mtp_num_layers", 0)]
        return str(PipelineLayout.with_layers(layers, mtp))

    def _stages_per_worker(self, pipeline: int) -> int:
        """Return the number of stages per worker, from whichever argument sets it."""
        if layout := self.text("pipeline_model_parallel_layout"):
            stages = len(PipelineLayout.parse(layout).stages)
            if stages % pipeline:
                raise ValueError(
                    f"{self.path}: pipeline_model_parallel_layout {layout}: its {stages} stages "
                    f"must be a multiple of {pipeline} workers"
                )
            return stages // pipeline
        virtual_size = "virtual_pipeline_model_parallel_size"
        for name in ("num_virtual_stages_per_pipeline_rank", virtual_size):
            if self.text(name):
                return self.integer(name)
        if not self.text("num_layers_per_virtual_pipeline_stage"):
            return 1
        per_stage = self.integer("num_layers_per_virtual_pipeline_stage")
        return self.integer("num_layers") // (pipeline * per_stage)

    def _recompute(self) -> str:
        """Return the recomputation as text: none, selective, full, block:N or names of parts."""
        kind, method = self.text("recompute_granularity"), self.text("recompute_method")
        count_argument = "recompute_num_layers"
        if not kind and self.is_on("checkpoint_activations"):  # until 2021, and in DeepSpeed
            kind, method, count_argument = "full", "uniform", "checkpoint_num_layers"
        elif not kind and method and "activations_checkpoint_method" in self.arguments:
            kind = "full"
        elif not kind:
            kind = "selective" if self.is_on("recompute_activations") else "none"
        if kind == "full" and method in RECOMPUTE_METHODS and self.text(count_argument):
            return check_recompute(f"{method}:{self.integer(count_argument)}")
        modules = self.text("recompute_modules")
        if kind != "selective" or not modules:
            return kind
        # a Python list, as in ['core_attn', 'mlp'], or names separated by blanks
        try:
            names = ast.literal_eval(modules)
        except (ValueError, SyntaxError):
            names = modules.split()
        return "+".join(names)

    def _precision(self) -> str:
        if self.text("fp4"):
            return "nvfp4"
        if not self.text("fp8"):
            return "bf16"
        return "mxfp8" if self.text("fp8_recipe") == "mxfp8" else "fp8"

    @property
    def _has_positions(self) -> bool:
        """Return whether positions are learned parameters, by arguments of any Megatron version."""
        kind = self.text("position_embedding_type") or "learned_absolute"
        is_off = self.arguments.get("add_position_embedding") == "False"
        rotary = self.is_on("use_rotary_position_embeddings")
        name = kind.rpartition(".")[2]  # some logs have the class before it
        return name in ("learned_absolute", "absolute") and not (is_off or rotary)

    @property
    def _has_flash(self) -> bool:
        """Return whether attention is one fused kernel, by argument or by Transformer Engine."""
        backend = self.text("attention_backend")
        unfused = "unfused" in backend or "local" in backend
        engine = self.text("transformer_impl") == "transformer_engine"
        return not unfused and (engine or self.is_on("use_flash_attn"))

    def _latent_sizes(self) -> dict[str, Any]:
        """Return the sizes of latent attention as a model file holds them."""
        ranks = {
            "kv_rank": self.integer("kv_lora_rank"),
            "rope_width": self.integer("qk_pos_emb_head_dim"),
            "value_width": self.integer("v_head_dim"),
        }
        if self.text("q_lora_rank"):
            ranks["query_rank"] = self.integer("q_lora_rank")
        return {"head_width": self.integer("qk_head_dim"), "mla": ranks}

    def _experts(self) -> dict[str, Any]:
        """Return the sizes of a mixture of experts as a model file holds them."""
        width = self.integer("moe_ffn_hidden_size", self.integer("ffn_hidden_size"))
        shared = self.integer("moe_shared_expert_intermediate_size", 0)
        if shared % width:
            raise ValueError(
                f"{self.path}: moe_shared_expert_intermediate_size must be a multiple of {width}, "
                f"got {shared}"
            )
        experts: dict[str, Any] = {
            "experts": self.integer("num_experts"),
            "top_k": self.integer("moe_router_topk"),
            "expert_hidden": width,
            "shared_experts": shared // width,
            "dense_layers": self._dense_layers(),
        }
        capacity = self.text("moe_expert_capacity_factor")
        if not capacity and self.arguments.get("moe_token_dropping", "True") == "True":
            capacity = self.text("moe_train_capacity_factor")
        return experts | ({"capacity_factor": float(capacity)} if capacity else {})

    def _dense_layers(self) -> int:
        """Return the number of dense layers that precede all layers with experts."""
        # moe_layer_freq is 1 if all layers have experts, or has a 0 for each dense layer: [0, 1, 1]
        text = self.text("moe_layer_freq") or "1"
        if self.integer("expert_interval", 1) > 1 and "moe_layer_freq" not in self.arguments:
            text = f"of every {self.text('expert_interval')} (expert_interval)"
        if text == "1":
            return 0
        digits = re.findall(r"[01]", text) if re.fullmatch(r"\[[01, ]+\]", text) else []
        dense = digits.index("1") if "1" in digits else 0
        if not digits or "0" in digits[dense:]:
            raise ValueError(
                f"{self.path}: moe_layer_freq {text}: dense layers after layers with experts are "
                "not supported"
            )
        return dense


def read_log(path: str | Path) -> MegatronLog | TrainerLog:
    """Read the last run of a Megatron log; if it lists no arguments, read only iterations."""
    arguments: dict[str, str] = {}
    times: list[TimedLine] = []
    vocabulary, memory, may_have_arguments, skipped = 0, 0.0, True, 0
    setting_lines: list[str] = []
    for line in read_log_lines(path):
        if "-- arguments --" in line:  # a run begins
            skipped += len(times)
            arguments, times, vocabulary, memory, may_have_arguments = {}, [], 0, 0.0, True
        elif "-- end of arguments --" in line:
            may_have_arguments = False  # later lines with this form are reports
        elif iteration := MEGATRON.read(line):
            may_have_arguments = False
            batch, seconds = int(iteration.get("batch", 0)), iteration["seconds"]
            times.append(TimedLine(batch, seconds, iteration.get("step", math.nan)))
            if len(times) > 1:
                continue  # all lines of iterations are alike, and there may be many
        elif padded := _VOCABULARY.search(line):
            vocabulary = int(padded[1])
        elif line_memory := _line_memory(line):
            memory = max(memory, line_memory)
        elif may_have_arguments and (argument := _ARGUMENT.search(line)):
            arguments.setdefault(argument[1].split()[0], argument[2])
        setting_lines.append(line)
    if "num_layers" not in arguments:
        return TrainerLog.read(path)._replace(memory_bytes=memory or math.nan)
    experts = arguments.get("num_experts", "")
    if experts in ("1", "[1]"):  # a dense model, as Megatron-DeepSpeed writes it
        arguments["num_experts"] = "None"
    elif counts := re.fullmatch(r"\[(\d+)(?:, \1)*\]", experts):  # equal in all layers: [8, 8]
        arguments["num_experts"] = counts[1]
    _, notes = find_settings(path, "\n".join(setting_lines))
    memory = memory or math.nan
    return MegatronLog(Path(path), arguments, times, vocabulary, memory, skipped, notes)


def _line_memory(line: str) -> float:
    """Return the most memory that ranks report in a log line [B]; 0 if none does."""
    sizes = [
        unit * size for form, unit in _MEMORY.items() for size in MEGATRON.find_numbers(form, line)
    ]
    return max(sizes, default=0.0)
