"""What every option is: kind of value, one line of help, short letter, and the panel it stands in.

An option has one record, so it means the same in every command that has it. What a command does
beyond that with an option, or what its values are in full, is said in the docstring of the command
or of the record of options that declares it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Kind(NamedTuple):
    """Kind of a value.

    Attributes:
      metavar: stands for the value in help.
      least: smallest number, if there is one.
      most: largest number, likewise.
      note: how a value is written, where the metavar alone does not say it.
    """

    metavar: str
    least: int | None = None
    most: int | None = None
    note: str = ""


FLAG = Kind("")
COUNT = Kind("N", 1)
WHOLE = Kind("N", 0)
DEGREE = Kind("N", 0, 3)
NUMBER = Kind("X")
NUMBERS = Kind("X,..")
NAME = Kind("NAME")
NAMES = Kind("NAME,..")
FILE = Kind("FILE")
FOLDER = Kind("FOLDER")
FILE_OR_FOLDER = Kind("FILE|FOLDER")
NAME_OR_FILE = Kind("NAME|FILE")
RULES = Kind("TEXT")
TIME = Kind("TIME", note="40us, 1ms, 2.5s, or a plain number of seconds")
TIMES = Kind("TIMES", note=TIME.note)
TIME_OF_STAGES = Kind("TIME,..", note=TIME.note)
LIMIT = Kind("LIMIT", note="activations (3), or bytes of a device with a model (40GB, 80GiB)")


class Option(NamedTuple):
    """What is known of an option wherever it stands.

    Attributes:
      kind: of its value.
      head: its help in one line.
      short: its letter, if it has one.
      frequent: whether `--help` gives it a line where it cannot give all of them one.
      names: what completes its value: words, or the name of a list of `completion`.
      more: its help beyond the line, wherever it stands.
    """

    kind: Kind
    head: str
    short: str = ""
    frequent: bool = False
    names: tuple[str, ...] | str = ()
    more: str = ""


def _often(kind: Kind, head: str, short: str = "", names: tuple[str, ...] | str = ()) -> Option:
    return Option(kind, head, short, True, names)


_PARALLEL = "accelerators that split"

_LINKS = ("delay", "queued", "blocking", "rendezvous")
_QUEUES = ("worker", "pair", "direction")
_FORMATS = ("text", "markdown", "latex", "csv")

PANELS: Mapping[str, Mapping[str, Option]] = {
    "Schedule": {
        "schedule": Option(
            NAME,
            "schedule to build, see `pipejax schedules`",
            "s",
            frequent=True,
            names="schedules",
            more="a name, a table, or a function of your own as FILE.py:FUNCTION.",
        ),
        "schedules": Option(
            NAMES,
            "schedules, as gpipe,1f1b,chimera",
            "S",
            frequent=True,
            names="schedules",
            more="names, tables (.csv, .json), folders of tables, functions as FILE.py:FUNCTION.",
        ),
        "tables": _often(FILE_OR_FOLDER, "a table, or a folder of tables, to look at too"),
        "table": _often(FILE, "table to read: PyTorch's CSV, or JSON", "t"),
        "workers": _often(COUNT, "workers P", "P"),
        "microbatches": _often(COUNT, "microbatches M", "M"),
        "stages_per_worker": _often(COUNT, "stages per worker V, where interleaved", "V"),
        "waves": Option(COUNT, "waves of hanayo"),
        "schedule_options": Option(RULES, "options of a schedule of your own, as depth=2"),
        "slots": Option(RULES, "slot durations the table is drawn with, as F=1,B=2"),
        "planned_comm": Option(NUMBER, "slots of a message that a schedule is planned for"),
        "planned_offload": Option(NUMBERS, "slots of O that a schedule is planned for"),
        "planned_load": Option(NUMBERS, "slots of L that a schedule is planned for"),
        "offload_share": Option(NUMBER, "share of activations that pipe-offload may offload"),
        "group_size": Option(COUNT, "microbatches of a group of pipe-offload"),
        "stage_shares": Option(NUMBERS, "layers per stage of chimera-asymmetric, as 1,1,2,2"),
        "accumulation": Option(COUNT, "microbatches of an update, of pipedream-2bw"),
        "admission": Option(
            NAME, "what limits pipedream in flight", names=("each-stage", "first-stage")
        ),
        "runs": Option(COUNT, "runs R that share the pipeline of local-sgd"),
        "local_steps": Option(COUNT, "local steps H between averages of local-sgd"),
        "repair": Option(NAME, "read a table known to be wrong", names=("torch-1f1b",)),
    },
    "Times and costs": {
        "stage_times": _often(TIMES, "time of each op of a stage, as F=1ms,B=2ms", "T"),
        "worker_times": _often(TIMES, "time of one microbatch on one worker", "W"),
        "costs": _often(FILE, "measured costs: a JSON file", "C"),
        "comm": _often(TIME, "time of a message: latency 0, this transmit", "c"),
        "latency": Option(TIME, "latency of a message"),
        "transmit": Option(TIME, "transmit time of a message"),
        "offload": Option(TIME_OF_STAGES, "time of O, an activation to the host"),
        "load": Option(TIME_OF_STAGES, "time of L, an activation back from the host"),
    },
    "Model and system": {
        "model": _often(NAME_OR_FILE, "model: a name, or a JSON file", "m", "models"),
        "system": _often(NAME_OR_FILE, "system: a name, or a JSON file", "y", "systems"),
        "gpus": _often(COUNT, "accelerators of the job, all of which are used"),
        "minibatch": _often(COUNT, "sequences per step"),
        "microbatch_size": Option(COUNT, "sequences of a microbatch b"),
        "sequence": Option(COUNT, "tokens of a sequence; the model's own if not given"),
        "tensor_parallel": Option(COUNT, f"{_PARALLEL} every product of a layer"),
        "sequence_parallel": Option(FLAG, "split norms and messages over them too"),
        "scatter_gather": Option(FLAG, "let each of them send its part of a message"),
        "context_parallel": Option(COUNT, f"{_PARALLEL} every sequence"),
        "expert_parallel": Option(COUNT, "accelerators that share the experts"),
        "data_parallel": Option(COUNT, "replicas of the pipeline"),
        "zero": Option(DEGREE, "what replicas split, as stages of ZeRO"),
        "overlap": Option(FLAG, "let gradients and weights travel beside compute"),
        "recompute": Option(NAME, "recomputation", names=("none", "selective", "full")),
        "precision": Option(
            NAME, "number format of the products", names=("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
        ),
        "rank_order": Option(
            NAME, "which ranks are neighbours", names=("tp-cp-ep-dp-pp", "tp-pp-dp")
        ),
        "embedding_units": Option(WHOLE, "layers that the embedding counts as"),
        "loss_units": Option(WHOLE, "layers that the head and its loss count as"),
    },
    "Layouts to search": {
        "tensor": Option(COUNT, "degrees t of tensor parallelism, as 4,8"),
        "context": Option(COUNT, "degrees c of context parallelism"),
        "expert": Option(COUNT, "degrees e of expert parallelism"),
        "data": Option(COUNT, "replicas d of the pipeline"),
        "pipeline": Option(COUNT, "workers p of a pipeline"),
        "edge_units": Option(WHOLE, "layers that embedding and head each count as"),
        "exhaustive": Option(FLAG, "evaluate every layout exactly"),
        "runners_up": Option(WHOLE, "layouts to show after the best"),
    },
    "Microbatches that differ": {
        "lengths": Option(FILE, "file of the tokens of each microbatch"),
        "microbatch_scale": Option(NUMBERS, "factors on the times of each, as 1,0.5,2"),
        "microbatch_order": Option(RULES, "their order, as 2,0,1, or a file"),
    },
    "Links": {
        "link": _often(NAME, "|".join(_LINKS), "l", _LINKS),
        "queues": Option(NAME, "what has a queue of its own under rendezvous", names=_QUEUES),
        "posting": Option(
            NAME, "when transfers are posted under rendezvous", names=("early", "program")
        ),
        "shared_links": Option(RULES, "links that carry one message at a time"),
        "host_links": Option(RULES, "workers that share a host link, as 0+1,2+3"),
    },
    "Memory": {
        "memory_limit": Option(LIMIT, "what a worker may hold"),
        "no_memory_limit": Option(FLAG, "let workers need more than they have"),
        "weight_share": Option(
            NUMBER,
            "share of an activation that W needs after I",
            more="from 0 to 1; if not given it follows from the layers of --model, else it is 1/3.",
        ),
        "activation_sizes": Option(NUMBERS, "size of an activation, of all stages or each"),
        "memory": Option(FLAG, "show the activation memory of each worker over time"),
    },
    "Slack and paths": {
        "slack": Option(FLAG, "show how much longer ops could take"),
        "target": Option(TIME, "when the step must end"),
        "corner": Option(RULES, "other costs, as slow:transmit*2"),
        "paths": Option(COUNT, "longest paths to show"),
        "distinct_counts": Option(FLAG, "of paths with equal counts only one"),
    },
    "Closed form": {
        "parameters": Option(RULES, "what it is a function of, as F,B,c_F,c_B"),
        "family": Option(NAME, "show how it depends on M, or on P", names=("M", "P")),
        "versus": Option(NAME, "another schedule: where is which faster?", names="schedules"),
        "per_worker": Option(FLAG, "phases take what --worker-times says"),
        "box": Option(RULES, "ranges of parameters, as F=1ms:2ms,c_F=0:1ms"),
        "max_facets": Option(COUNT, "sums at which the search ends"),
    },
    "What varies": {
        "op": Option(RULES, "jitter of each op, as lognormal:0.1"),
        "worker": Option(RULES, "jitter of each worker"),
        "message": Option(RULES, "jitter of each message"),
        "straggler": Option(RULES, "a worker is slow, as 0.01:2"),
        "op_straggler": Option(RULES, "an op is slow, as 0.01:2"),
        "quantile": Option(NUMBER, "quantile that ranks"),
        "ops": Option(FLAG, "show how often ops are on the critical path"),
        "factor": Option(NUMBER, "divide and multiply each parameter by this"),
    },
    "What is trained": {
        "objective": _often(
            NAME, "what is trained", names=("quadratic", "nesterov", "logistic", "language")
        ),
        "dimension": Option(COUNT, "coordinates, a multiple of the stages"),
        "condition_number": Option(NUMBER, "L / mu, of nesterov"),
        "strong_convexity": Option(NUMBER, "mu, of nesterov"),
        "minimiser": Option(NAME, "w* of nesterov", names=("solved", "normal")),
        "text": Option(FILE, "text to learn, of language"),
        "batches": Option(COUNT, "batches of the objective"),
        "batch_size": Option(COUNT, "examples of a batch"),
    },
    "Training": {
        "rpd": Option(FLAG, "Randomized PipeDream instead of the timeline"),
        "updates": Option(COUNT, "block updates, of --rpd"),
        "delta": Option(WHOLE, "largest delay in block updates, of --rpd"),
        "step_sizes": _often(NUMBERS, "step sizes, as 0.25,0.125"),
        "seeds": _often(COUNT, "runs of each step size"),
        "times": Option(COUNT, "equal parts of the time at whose ends to look"),
        "noise": Option(NUMBER._replace(least=0), "standard deviation of every gradient"),
        "batch_order": Option(NAME, "order of the batches", names=("epochs", "cyclic", "drawn")),
        "rule": Option(NAME, "what the best step size is", names=("final", "mean", "stable")),
        "report": Option(NAME, "what is shown and drawn", names=("gap", "value", "loss")),
    },
    "Fit and check": {
        "collectives": Option(FILE, "collectives and messages timed alone: a CSV file"),
        "fit": Option(RULES, "numbers to fit to the runs"),
        "hold_out": Option(RULES, "rows to predict without, as t=8, k-fold:5, model"),
        "layer_times": Option(RULES, "columns whose values have a layer time each"),
        "starts": Option(COUNT, "points to start from"),
        "tolerance": Option(NUMBER, "mean error that passes, in percent"),
        "predictions": Option(FILE, "predictions of any simulator to judge: a CSV file"),
    },
    "Search and samples": {
        "what": _often(RULES, "microbatch, layers, recompute, system, or several"),
        "method": Option(NAME, "how to tune", names=("gradient", "exhaustive", "both")),
        "budget": Option(NUMBER, "what a system may cost"),
        "prices": Option(RULES, "what the parts of a system cost"),
        "minimize": Option(NAME, "what is to be least", names=("makespan", "span")),
        "time_limit": _often(TIME, "when the search ends; Ctrl-C ends it sooner"),
        "iterations": Option(WHOLE, "most batches of orders to try"),
        "samples": _often(COUNT, "runs of each schedule to sample"),
        "seed": Option(WHOLE, "seed of what is drawn at random"),
        "threads": Option(COUNT, "threads of the solver; one per processor"),
        "store": Option(FOLDER, "folder of solved problems"),
        "no_store": Option(FLAG, "neither use nor keep solved problems"),
        "scheduler": Option(RULES, "Dask scheduler whose workers evaluate"),
    },
    "Output": {
        "out": _often(FILE, "write to this file", "o"),
        "save": Option(FILE, "write all runs to this store (.zarr)"),
        "figure": Option(FILE, "draw a picture to this file"),
        "certificate": Option(FILE, "write what is claimed to this file (.json)"),
        "open": Option(FLAG, "open what is written in the browser"),
        "exchange": Option(FLAG, "run A with the row of B on one worker"),
        "force": Option(FLAG, "replace files that are there"),
        "resume": Option(FLAG, "go on with a store that is there"),
        "messages": Option(FLAG, "show messages as thin lines"),
        "width": Option(Kind("N", 20, 100_000), "columns of the terminal's timeline"),
        "worst": Option(WHOLE, "waiting transfers to list"),
        "format": _often(NAME, "|".join(_FORMATS), "f", _FORMATS),
        "json": _often(FLAG, "print one JSON object and nothing else", "j"),
        "config": Option(FILE, "options from a file (.toml or .json)"),
        "help": Option(FLAG, "show this", "h"),
        "help_all": Option(FLAG, "explain every option"),
    },
}
CATALOGUE: Mapping[str, Option] = {
    name: option for panel in PANELS.values() for name, option in panel.items()
}
SHORT = {option.short: name for name, option in CATALOGUE.items() if option.short}
# options that mean something else in a command, and why that must be
EXCEPTIONS = {
    ("export", "format"): "export prints no table: its format is that of the file it writes",
}


def flag(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.replace('_', '-')}"


def begun(head: str) -> str:
    """Begin a sentence with a line of the catalogue, unless it begins with values."""
    return head if "|" in head.partition(" ")[0] else head[0].upper() + head[1:]


def record(name: str) -> Option:
    """Return what an option is.

    Raises:
      LookupError: if it is not declared here.
    """
    try:
        return CATALOGUE[name]
    except KeyError:
        raise LookupError(f"option {name!r} has no record in {__name__}") from None


def panels_of(names: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yield the panels that options stand in, each with those options, in order."""
    for title, options in PANELS.items():
        found = [name for name in options if name in names]
        if found:
            yield title, found
