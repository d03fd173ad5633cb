"""Every option: kind of value, line of help, short letter, and its panel."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS, WorkloadField
from pipejax.runtimes.formats import FORMATS


class ValueKind(NamedTuple):
    """Kind of a value."""

    metavar: str  # stands for the value in help
    least: int | None = None  # smallest number, if there is one
    largest: int | None = None  # largest number
    note: str = ""  # how a value is written, where the metavar alone does not say it


FLAG = ValueKind("")
COUNT = ValueKind("N", 1)
WHOLE = ValueKind("N", 0)
NUMBER = ValueKind("X")
NUMBERS = ValueKind("X,..")
NAME = ValueKind("NAME")
NAMES = ValueKind("NAME,..")
FILE = ValueKind("FILE")
FOLDER = ValueKind("FOLDER")
FILE_OR_FOLDER = ValueKind("FILE|FOLDER")
NAME_OR_FILE = ValueKind("NAME|FILE")
RULES = ValueKind("TEXT")
SIZE = ValueKind("SIZE")
TIME = ValueKind("TIME", note="40us, 1ms, 2.5s, or a plain number of seconds")
TIMES = ValueKind("TIMES", note=TIME.note)
TIME_OF_STAGES = ValueKind("TIME,..", note=TIME.note)
SHARE = ValueKind("SHARE", note="0.1, or 10%")
LIMIT = ValueKind("LIMIT", note="activations (3), or bytes of a device with a model (40GB, 80GiB)")


class Option(NamedTuple):
    """An option of the catalogue, with the same meaning in every command."""

    kind: ValueKind  # of its value
    head: str  # its help in one line
    short: str = ""  # its letter, if it has one
    # words that complete its value, or the name of a list of `--completion`
    names: tuple[str, ...] | str = ()
    more: str = ""  # its help beyond the line, wherever it stands
    argument: str = ""  # what the library calls it, where that is something else
    frequent: bool = False  # whether `--help` gives it a line where it cannot give all of them one


_often = functools.partial(Option, frequent=True)


def _workload_option(field: WorkloadField) -> Option:
    kinds = {
        **{"whole": ValueKind("N", field.least, field.largest), "flag": FLAG, "name": NAME},
        **{"share": NUMBER, "seconds": TIME},
    }
    return Option(kinds.get(field.kind, RULES), field.head, names=field.names)


_LINKS = ("delay", "queued", "blocking", "rendezvous")
_QUEUES = ("worker", "pair", "direction")
_POSTINGS = ("early", "program")
_SEGMENTS = ("warmup", "steady", "cooldown")
_TIME_UNITS = ("s", "ms", "us", "ns")
_PLACES = ("under", "beside")
_RUNTIMES = ("jax", "torch")
_FORMATS = ("text", "markdown", "latex", "csv")

PANELS: Mapping[str, Mapping[str, Option]] = {
    "Schedule": {
        "schedule": _often(
            *(NAME, "schedule to build; `pipejax schedules` lists them", "s", "schedules"),
            more="A table or a function of your own (FILE.py:FUNCTION) is a schedule too.",
        ),
        "schedules": _often(
            *(NAMES, "schedules, as gpipe,1f1b,chimera", "S", "schedules"),
            more="names, tables (.csv, .json), folders of tables, functions as FILE.py:FUNCTION.",
        ),
        "tables": _often(FILE_OR_FOLDER, "table, or folder of tables, to add"),
        "table": _often(FILE, "schedule file: PyTorch's CSV, or JSON", "t"),
        "workers": _often(COUNT, "number of workers P", "P", argument="num_workers"),
        "microbatches": _often(COUNT, "number of microbatches M", "M", argument="num_microbatches"),
        "stages_per_worker": Option(COUNT, "stages per worker V of interleaved schedules", "V"),
        "waves": Option(COUNT, "number of waves (hanayo)"),
        "slices": Option(COUNT, "slices K of a microbatch (seq-1f1b, terapipe, slimpipe)"),
        "schedule_options": Option(RULES, "schedule options without a flag of their own, as a=1"),
        "prompt": _often(COUNT, "length of the prompt [tokens]", argument="tokens"),
        "num_chunks": Option(COUNT, "number of chunks of the prompt"),
        "multiple": Option(COUNT, "chunk sizes are multiples of this [tokens]"),
        "slots": Option(RULES, "length of each op in the table [slots], as F=1,B=2"),
        "planned_comm": Option(
            NUMBER, "message time assumed when the order is planned [slots]", argument="transfer"
        ),
        "planned_offload": Option(
            NUMBERS, "time of O assumed when the order is planned [slots]", argument="offload"
        ),
        "planned_load": Option(
            NUMBERS, "time of L assumed when the order is planned [slots]", argument="load"
        ),
        "offload_share": Option(NUMBER, "largest share of activations to offload (pipe-offload)"),
        "group_size": Option(COUNT, "microbatches of a group (interleaved-1f1b, pipe-offload)"),
        "pipes": Option(COUNT, "number of pipes 2f of chimera: f down and f up"),
        "stage_shares": Option(NUMBERS, "layers per stage of chimera-asymmetric, as 1,1,2,2"),
        "sharding_lane": Option(NAME, "lane of UNSHARD and REDUCE_GRAD: compute or net"),
        "lookahead": Option(NUMBERS, "number of uses by which weights are gathered ahead"),
        "residency": Option(NUMBERS, "largest number of gathered stages on a worker"),
        "accumulation": Option(COUNT, "microbatches per weight update (pipedream-2bw)"),
        "admission": Option(
            NAME, "limit of microbatches in flight (pipedream)", names=("each-stage", "first-stage")
        ),
        "runs": Option(COUNT, "number of models R trained side by side (local-sgd)"),
        "local_steps": Option(COUNT, "updates H between two averages (local-sgd)"),
        "repair": Option(NAME, "known error of a table to correct", names=("torch-1f1b",)),
    },
    "Times and costs": {
        "stage_times": _often(TIMES, "time of each op on a stage, as F=1ms,B=2ms", "T"),
        "worker_times": _often(TIMES, "time of one microbatch on one worker", "W"),
        "costs": _often(FILE, "measured costs: JSON, or CSV by stage", "C"),
        "comm": _often(TIME, "transmit time of a message, without latency", "c"),
        "latency": Option(TIME, "latency of a message"),
        "transmit": Option(TIME, "transmit time of a message"),
        "offload": Option(TIME_OF_STAGES, "time to offload one activation to the host (op O)"),
        "load": Option(TIME_OF_STAGES, "time to load one activation from the host (op L)"),
        "pair_factor": Option(NUMBER, "k of a fused pair's time max(F, B) + k min(F, B)"),
        "stragglers": Option(RULES, "slow workers and their factors, as 3=1.2,5=2"),
        "scale": Option(RULES, "factors on times, as compute@stage3*0.8,message*2"),
        "measured_stages": Option(COUNT, "number of stages that the measured times cover"),
    },
    "Model and system": {
        "model": _often(NAME_OR_FILE, "model: a name or a JSON file", "m", "models"),
        "system": _often(NAME_OR_FILE, "system: a name or a JSON file", "y", "systems"),
        "stack": Option(NAME_OR_FILE, "software stack: a name or a JSON file", names="stacks"),
        "gpus": _often(COUNT, "number of accelerators of the job; all are used"),
        "minibatch": Option(COUNT, "sequences per step of one pipeline"),
        "microbatch_size": Option(COUNT, "sequences per microbatch b"),
        "sequence": Option(COUNT, "sequence length [tokens]; default: the model's"),
        **{name: _workload_option(field) for name, field in WORKLOAD_FIELDS.items() if field.head},
        "workers_per_node": Option(RULES, "workers per node of the machine, as 8 or 4,8"),
        "worker_places": Option(RULES, "place of each worker on the machine, as 0,4,1,5"),
    },
    "Layouts to search": {
        "tensor": Option(COUNT, "degrees t of tensor parallelism, as 4,8"),
        "context": Option(COUNT, "degrees c of context parallelism"),
        "expert": Option(COUNT, "degrees e of expert parallelism"),
        "expert_tensor": Option(COUNT, "accelerators that split each expert, as 1,4"),
        "data": Option(COUNT, "replicas d of the pipeline"),
        "pipeline": Option(COUNT, "workers p of a pipeline"),
        "edge_units": Option(
            WHOLE, "weight of embedding and head, in layers, when layers are split"
        ),
        "exhaustive": Option(FLAG, "evaluate every layout exactly"),
        "runners_up": Option(WHOLE, "layouts to show after the best"),
    },
    "Microbatches that differ": {
        "lengths": Option(FILE, "file with the length of each microbatch [tokens]"),
        "microbatch_scale": Option(NUMBERS, "factor on the times of each microbatch, as 1,0.5,2"),
        "microbatch_order": Option(RULES, "order of the microbatches: 2,0,1 or a file"),
    },
    "Links": {
        "link": _often(NAME, "|".join(_LINKS), "l", _LINKS),
        "queues": Option(NAME, "unit that has one message queue (rendezvous only)", names=_QUEUES),
        "posting": Option(NAME, "when a worker posts transfers (rendezvous only)", names=_POSTINGS),
        "eager_below": Option(
            TIME, "messages shorter than this are sent eagerly (rendezvous only)"
        ),
        "pair_links": Option(RULES, "link models of single pairs, as 0-1=queued"),
        "shared_links": Option(RULES, "links that share one channel, as 0-1+1-2"),
        "host_links": Option(RULES, "workers that share a host link, as 0+1,2+3"),
    },
    "Memory": {
        "memory_limit": Option(LIMIT, "limit of activation memory on each worker"),
        "headroom": Option(SHARE, "share of device memory reserved for fragmentation and buffers"),
        "no_memory_limit": Option(FLAG, "allow layouts that do not fit in memory"),
        "weights_limit": Option(RULES, "limit of gathered weights on each worker"),
        "weight_share": Option(
            NUMBER,
            "share of an activation that is held between I and W",
            more="From 0 to 1. Default: as the layers of --model have it, else 1/3.",
        ),
        "activation_sizes": Option(
            NUMBERS, "size of an activation, one number or one per stage", argument="sizes"
        ),
        "memory": Option(FLAG, "show the activation memory of each worker over time"),
        "recompute_cells": Option(FLAG, "put R before every B or I"),
        "recompute_again": Option(FLAG, "W recomputes again, so it takes W + R"),
    },
    "Slack and paths": {
        "slack": Option(FLAG, "show the slack of every op"),
        "target": Option(TIME, "deadline of the step, for slack [s]"),
        "corner": Option(RULES, "second set of costs for slack, as slow:transmit*2"),
        "paths": Option(COUNT, "number of longest paths to show"),
        "distinct_counts": Option(FLAG, "show one path of those with equal op counts"),
    },
    "Closed form": {
        "parameters": Option(RULES, "parameters of the closed form, as F,B,c_F,c_B"),
        "family": Option(NAME, "fit the form over M or P, as M=8:80:8", names=("M", "P")),
        "versus": Option(NAMES, "schedules to compare: where each is fastest", names="schedules"),
        "per_worker": Option(FLAG, "read op times as times of workers, not of stages"),
        "box": Option(RULES, "ranges of parameters, as F=1ms:2ms,c_F=0:1ms"),
        "max_facets": Option(COUNT, "number of sums at which the search stops"),
    },
    "What varies": {
        "op": Option(RULES, "jitter of each op, as lognormal:0.1", argument="distribution"),
        "worker": Option(RULES, "jitter of each worker"),
        "message": Option(RULES, "jitter of each message"),
        "straggler": Option(RULES, "slow worker, as probability 0.01 and factor 2: 0.01:2"),
        "op_straggler": Option(RULES, "slow op, as probability 0.01 and factor 2: 0.01:2"),
        "quantile": Option(NUMBER, "quantile that ranks the schedules"),
        "ops": Option(FLAG, "show how often ops are on the critical path"),
        "factor": Option(NUMBER, "factor by which each parameter is divided and multiplied"),
    },
    "Fit and check": {
        "collectives": Option(FILE, "CSV file of collectives and messages that were timed alone"),
        "fit": Option(RULES, "parameters to fit to the runs"),
        "hold_out": Option(RULES, "rows to hold out and predict, as t=8, k-fold:5, model"),
        "layer_times": Option(RULES, "columns by whose values layer times differ"),
        "starts": Option(COUNT, "number of starting points"),
        "general": Option(FLAG, "use the priors of all machines"),
        "tolerance": Option(NUMBER, "largest mean error that passes [%]"),
        "predictions": Option(FILE, "CSV file of another simulator's predictions to judge"),
    },
    "Points of a sweep": {
        "best": _often(COUNT, "number of points to list"),
        "by": _often(NAME, "output that ranks the points"),
        "where": _often(RULES, "filter of points, as systems=h100 or step_time<3s"),
        "pareto": _often(FLAG, "list the Pareto front"),
        "axes": Option(NAMES, "two objectives of the front, as step_time,memory_bytes"),
        "knee": _often(NAME, "axis whose knee is searched: the value beyond which it gains little"),
        "within": Option(NUMBER, "distance from the best at the knee [%]"),
        "map": Option(NAMES, "two axes of a map of the best schedule"),
    },
    "Search and samples": {
        "method": Option(NAME, "method of tuning", names=("local", "exhaustive")),
        "minimize": Option(
            NAME, "quantity to minimize", names=("makespan", "span"), argument="objective"
        ),
        "time_limit": _often(TIME, "time limit of the search; Ctrl-C ends it sooner"),
        "effort": Option(NUMBER, "deterministic work limit of the search"),
        "gap": Option(SHARE, "stop when the bound proves that no more can be saved"),
        "iterations": Option(WHOLE, "largest number of batches of orders to try"),
        "samples": _often(COUNT, "number of sampled runs of each schedule"),
        "replicas": Option(COUNT, "replicas of the pipeline, of which the slowest ends the step"),
        "seed": Option(WHOLE, "seed of the random numbers"),
        "columns": Option(RULES, "names of columns, as replica=dp,start=begin"),
        "world": Option(COUNT, "ranks of the run that was traced"),
        "only_steps": Option(RULES, "steps of the trace to use, as 2:20"),
        "all_steps": Option(FLAG, "keep unusual steps, such as a warm-up, in means"),
        "against": _often(FILE_OR_FOLDER, "files of an earlier run to compare with"),
        "stage_layers": Option(NUMBERS, "layers of each measured stage"),
        "launcher": Option(NAME, "launcher of the run, as megatron-lm or torchtitan"),
        "search": Option(FLAG, "search orders and splits too (some seconds)"),
        "threads": Option(
            COUNT, "threads of the solver; default: one per processor", argument="num_threads"
        ),
        "store": Option(FOLDER, "folder that keeps solved problems"),
        "no_store": Option(FLAG, "neither read nor keep solved problems"),
        "scheduler": Option(RULES, "address of a Dask scheduler whose workers evaluate"),
    },
    "Runtime": {
        "runtime": _often(NAME, "|".join(_RUNTIMES), names=_RUNTIMES),
        "hidden": Option(COUNT, "width of the layers of a stage"),
        "batch_size": Option(COUNT, "examples of a microbatch"),
        "steps": Option(WHOLE, "steps to time"),
        "trace": Option(FOLDER, "new folder for traces of the timed steps"),
    },
    "Picture": {
        "from_": Option(TIME, "left end of the time axis", argument="start"),
        "to": Option(TIME, "right end of the time axis", argument="stop"),
        "part": Option(NAME, "segment to show: warmup, steady or cooldown", names=_SEGMENTS),
        "unit": Option(NAME, "unit of the time axis", names=_TIME_UNITS),
        "messages": Option(FLAG, "show messages as thin lines"),
        "transfers": Option(FLAG, "show messages as bars in a lane of their workers"),
        "choose": Option(FLAG, "let schedules and sizes be chosen on the page"),
        "no_critical": Option(FLAG, "leave the critical path unmarked"),
        "title": Option(NAME, "title of the picture"),
        "labels": Option(NAME, "names of the schedules in their order, as A,B"),
        "caption": Option(NAME, "position of the parameters", names=_PLACES),
        "width": Option(ValueKind("N", 20, 100_000), "columns of the terminal's timeline"),
        "size": Option(SIZE, "column, page or a width, as 8.5cm"),
        "font": Option(NAME, "font family"),
        "font_size": Option(NUMBER, "font size [points]"),
    },
    "Output": {
        "save": Option(FOLDER, "new folder for files that other commands read"),
        "write_tables": Option(FOLDER, "new folder for the tables"),
        "out": _often(FILE, "file to write", "o"),
        "figure": Option(FILE, "picture to write (.png, .pdf, .svg)"),
        "certificate": Option(FILE, "certificate to write (.json)"),
        "models": Option(FLAG, "list models and their sources"),
        "systems": Option(FLAG, "list systems and their sources"),
        "stacks": Option(FLAG, "list stacks of software and their sources"),
        "open": Option(FLAG, "open the written page in the browser"),
        "diff": Option(FLAG, "show how two tables differ, and the cost of each difference"),
        "exchange": Option(FLAG, "evaluate the first table with each row of the second"),
        "force": Option(FLAG, "replace existing files"),
        "resume": Option(FLAG, "continue an existing store"),
        "worst": Option(WHOLE, "number of blocked transfers to list"),
        "format": Option(NAME, "|".join(_FORMATS), "f", names=_FORMATS),
        "details": _often(FLAG, "print the whole report, not its first screen"),
        "json": _often(FLAG, "print one JSON object", "j"),
        "assert_": Option(RULES, "condition of success, as 'makespan<0.75s'; else exit code 3"),
        "config": Option(FILE, "options from a file (.toml or .json)"),
        "help": Option(FLAG, "show this screen", "h"),
        "help_all": Option(FLAG, "explain every option"),
    },
}
CATALOGUE: Mapping[str, Option] = {
    name: option for panel in PANELS.values() for name, option in panel.items()
}
_PANELS = {name: title for title, panel in PANELS.items() for name in panel}
OF_ARGUMENTS = {option.argument: name for name, option in CATALOGUE.items() if option.argument}
# options that mean something else in a command: export prints no table, and its format is that of
# the file it writes; a file to begin with is from another one; a plan says how many pipelines a job
# has; what a runtime trains has microbatches, and its gradients are equal or not
EXCEPTIONS = {
    ("chunks", "stage_times"): _often(TIMES, "times of a chunk, as a=2ms,b=5us,c=0.7ns,g=1ns", "T"),
    ("chunks", "transmit"): Option(TIME, "transmit time of a message [s per token]"),
    ("export", "format"): _often(NAME, "|".join(FORMATS), "f", (*FORMATS,)),
    ("init", "from_"): Option(FILE, "file to read: a config.json or a training log"),
    ("init", "columns"): Option(RULES, "columns that the log lacks, as model=llama3-8b"),
    ("plan", "minibatch"): Option(COUNT, "sequences per step of the whole job"),
    ("trace", "steps"): Option(COUNT, "number of steps in the files"),
    ("run", "tolerance"): Option(NUMBER, "largest error of a gradient that passes"),
}
# options that stand in another panel
PLACES = {
    ("trace", "steps"): "Schedule",
    ("init", "from_"): "Model and system",
    ("init", "columns"): "Model and system",
    ("compare", "labels"): "Schedule",
}


def flag(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.rstrip('_').replace('_', '-')}"  # from_: the word is Python's own


def begin_sentence(head: str) -> str:
    """Begin a sentence with a line of the catalogue, unless it begins with values."""
    return head if "|" in head.partition(" ")[0] else head[0].upper() + head[1:]


def record(name: str, command: str = "") -> Option:
    """Return the option of a name in a command."""
    try:
        return EXCEPTIONS.get((command.removeprefix("tune "), name)) or CATALOGUE[name]
    except KeyError:
        raise LookupError(f"option {name!r} has no record in {__name__}") from None


def option_panel(name: str, command: str) -> str:
    """Return the panel of help that an option of a command stands in."""
    return PLACES.get((command, name)) or _PANELS[name]
