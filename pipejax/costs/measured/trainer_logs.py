"""Training logs that lack the layout, as torchtitan, DeepSpeed, NeMo and MaxText write them.

A line of an iteration has its seconds, or a rate from which the seconds follow. Sizes that a log
lacks are never guessed: the user gives them as columns.
"""

import gzip
import itertools
import math
import re
import statistics
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.file_fields import read_cell, whole
from pipejax.base.files import read_file
from pipejax.base.progress import Notice
from pipejax.costs.model.model import Model
from pipejax.costs.system.system import read_named

# as torchtitan of 2024 prints it: device mesh with ['pp', 'tp'], [4, 8]
_MESH = re.compile(r"device mesh with \[([^\]]+)\], \[([^\]]+)\]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# a number with its unit, as any language writes it; then the numbers that the reader accepts
_NUMBER = (
    r"\s*((?i:nan|inf)|\d+(?:[.,'\u2019_]\d+|[ \xa0\u202f]\d{3}\b)*\.?(?:[eE][+-]?\d+)?[^\W\d_]*)"
)
_READABLE = r"(nan|inf|(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?(?:e[+-]?\d+)?)([KMB]?)"
_WHOLE = rf"(?!\d{{1,3}}\.\d{{3}}$){_READABLE}"  # 2.048 is 2,048 in another language
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
UNSTEADY = 1.1  # ratio of step times above which a note is due
MAX_BIAS = 0.02  # largest shift of a mean by odd steps, relative to the median
MIN_STEPS = 5  # least number of steps on each side of a lasting change
MAX_PARAMETER_ERROR = 0.01  # largest relative difference of a log's and a model's parameters
_REQUIRED = ("tensor", "pipeline", "accelerators", "microbatch_size", "recompute")
_CHECKS = ("parameters", "accumulation", "tokens")  # numbers of a log that no column has


class Trainer(NamedTuple):
    """Form in which a training program prints its iterations, to recognize and read them."""

    name: str  # name of the program
    marks: Mapping[str, str]  # text before the number of each quantity
    formula: str  # text on how the seconds follow from a line
    facts: Mapping[str, str] = {}  # {column: text before its number}, on lines without iterations
    note: str = ""  # text on what the reader ignores
    steps_of_run: str = ""  # text before the number of steps of a run, for exact step times
    resumed_at: str = ""  # text before the number of steps that earlier runs did
    digits: int = 0  # significant digits that the program prints; 0: all

    def read(self, line: str) -> dict[str, float]:
        """Read the named quantities of a log line; empty if it reports no iteration."""
        matches = {name: re.search(mark + _NUMBER, line) for name, mark in self.marks.items()}
        texts = {name: match[1] for name, match in matches.items() if match}
        if not texts.keys() - {"batch", "step", "runtime", "consumed", "consumed tokens"}:
            return {}
        quantities = {
            name: self._read_number(text, _WHOLE if name == "tokens" else _READABLE)
            for name, text in texts.items()
        }
        if "ms" in quantities:
            quantities["seconds"] = quantities.pop("ms") / 1e3
        return quantities

    def _read_number(self, text: str, form: str = _READABLE) -> float:
        if (number := re.fullmatch(form, text, re.IGNORECASE)) is None:
            allowed = "numbers are read as 1234.5, 1,234.5 or 1.23K"
            raise ValueError(f"a line of {self.name} has {text!r}: {allowed}")
        return float(number[1].replace(",", "")) * _FACTORS[number[2].upper()]

    def find_numbers(self, mark: str, text: str) -> set[float]:
        """Return the numbers that follow a mark in a text."""
        return {self._read_number(number) for number in re.findall(mark + _NUMBER, text)}

    def num_steps(self, text: str) -> int:
        """Return the number of steps of a run, without earlier runs; 0 if the log is not clear."""
        totals = self.find_numbers(self.steps_of_run, text)
        earlier_steps = self.find_numbers(self.resumed_at, text)
        if len(totals) != 1 or len(earlier_steps) > 1:
            return 0
        return int(totals.pop() - max(earlier_steps, default=0))


# "facts" of the libraries of trainers, as `Trainer.facts`, and "settings": {pattern of a text:
# (column, pattern of its values), or ("", assumption made instead)}
_DATA = read_named("arguments", "trainers", "file")[0]
TRAINERS = tuple(Trainer(**record) for record in _DATA["trainers"])
MEGATRON = TRAINERS[0]


def read_log_lines(path: str | Path) -> list[str]:
    """Read the lines of a log, gzipped or not, without colours and without a cut last line."""
    content = read_file(Path(path))
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path}: it cannot be unpacked: {error}") from None
    is_wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")  # UTF-16, as PowerShell redirects
    text = _COLOUR.sub("", content.decode("utf-16" if is_wide else "utf-8", errors="replace"))
    *lines, last = text.splitlines() or [""]
    last_form = _form(last)
    # "step 7 | ms: 61" is cut if other lines have the form "step 0 | ms: 0.0 |"
    longer_forms = {_form(line) for line in lines} - {last_form}
    is_part = any(form.startswith(last_form) for form in longer_forms)
    if is_part and last_form and text[-1:] not in ("\n", "\r"):
        warnings.warn(f"{path}: its last line is cut and left out: {last[-60:]!r}", Notice, 2)
        return lines
    return [*lines, last]


def _form(line: str) -> str:
    """Return a line with 0 for each number and a blank for each gap."""
    return re.sub(r"\d+", "0", re.sub(r"\s+", " ", line))


class TimedLine(NamedTuple):
    """Time of one iteration, as a log line of one rank reports it."""

    batch: int  # sequences; 0 if unknown
    seconds: float
    step: float = math.nan  # number of the iteration, NaN if unknown


def step_times(lines: Iterable[TimedLine]) -> list[list[float]]:
    """List each run's step times [s]; times of a step from several ranks are averaged."""
    runs: list[dict[float, list[float]]] = []  # times by step
    last = -math.inf
    for count, line in enumerate(lines):
        step = count if math.isnan(line.step) else line.step
        if step < last or not runs:  # a step number that goes back begins a run
            runs.append({})
        runs[-1].setdefault(step, []).append(line.seconds)
        last = step
    return [[statistics.fmean(times) for times in run.values()] for run in runs]


def rows_by_batch(path: Path, lines: Iterable[TimedLine]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row with the mean step time for each batch size, and notes on dropped lines."""
    # A mean leaves out lines without a time, and the first step of each run, its warm-up, if the
    # run has further steps. A spread of 0 only shows a coarse clock, so no row has it.
    batches: dict[int, list[TimedLine]] = {}
    for line in lines:
        batches.setdefault(line.batch, []).append(line)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for batch, batch_lines in batches.items():
        timed = [line for line in batch_lines if math.isfinite(line.seconds) and line.seconds > 0]
        if dropped := len(batch_lines) - len(timed):
            notes.append(f"{path}: {dropped} lines without a time are left out")
        if not timed:
            raise ValueError(f"{path}: no line of {batch} sequences has a time")
        runs = step_times(timed)
        if len(runs) > 1:
            notes.append(f"{path}: step numbers go back: {len(runs)} runs lose their first step")
        if not (steady := [seconds for run in runs for seconds in run[1:]]):
            steady = [run[0] for run in runs]
            lines_text = "one line" if len(runs) == 1 else "first lines"
            notes.append(f"{path}: only {lines_text} of {batch} sequences, with its warm-up")
        notes += [f"{path}: {text}" for text in _unsteady_steps(steady)]
        row: dict[str, Any] = {"global_batch": batch}
        row["seconds"] = float(f"{statistics.fmean(steady):.6g}")
        if len(steady) > 1:
            row["n"] = len(steady)
            if spread := float(f"{statistics.stdev(steady):.3g}"):
                row["spread"] = spread
        rows.append(row)
    return rows, notes


def _unsteady_steps(seconds: Sequence[float]) -> Iterator[str]:
    """Yield a note if step times [s] change lastingly, or else if single steps shift their mean."""
    count, mean = len(seconds), statistics.fmean(seconds)

    def squares_explained(cut: int) -> float:
        """Return `count` times the squared error that a mean on each side of a cut removes."""
        difference = statistics.fmean(seconds[cut:]) - statistics.fmean(seconds[:cut])
        return cut * (count - cut) * difference**2

    cuts = range(MIN_STEPS, count - MIN_STEPS + 1)
    if cuts:
        cut = max(cuts, key=squares_explained)
        before, after = statistics.median(seconds[:cut]), statistics.median(seconds[cut:])
        if max(before, after) > UNSTEADY * min(before, after):
            yield (
                f"the last {count - cut} of {count} steps take {after / before:.3g} times as long "
                f"as those before ({before:.4g} s, then {after:.4g} s): the row has the mean of all"
            )
            return
    median = statistics.median(seconds)
    odd = [value for value in seconds if not median / UNSTEADY < value < median * UNSTEADY]
    is_biased = abs(mean - median) > MAX_BIAS * median
    if odd and (2 * len(odd) > count or is_biased):  # most steps are odd, or the mean is off
        extreme = max(odd, key=lambda value: abs(value - median))
        yield (
            f"{len(odd)} of {count} steps take {'up' if extreme > median else 'down'} to "
            f"{extreme:.4g} s, the median is {median:.4g} s: the row has the mean of all, "
            f"{mean:.4g} s"
        )


def check_columns(
    path: Path, columns: Collection[str] | Mapping[str, str], cells: Mapping[str, str]
) -> None:
    """Refuse columns from the user that the log contains too, unless their values are equal."""
    # `columns` are names, with their values if the log has one value for all rows
    values = columns if isinstance(columns, Mapping) else {}
    for name in sorted({*cells} & {*columns}):
        if values.get(name) != cells[name]:
            value = f" ({values[name]})" if name in values else ""
            raise ValueError(f"{path}: the log has {name} itself: leave it out of --columns{value}")


def _steady_growth(iterations: Sequence[Mapping[str, float]], count: str) -> set[float]:
    """Return by how much a running count grows in a step; empty if steps differ."""
    counts = [line for line in iterations if {"step", count} <= line.keys()]
    sizes = {
        (later[count] - line[count]) / (later["step"] - line["step"])
        for line, later in itertools.pairwise(counts)
        if later["step"] > line["step"]
    }
    return sizes if len(sizes) == 1 and min(sizes) > 0 else set()


class TrainerLog(NamedTuple):
    """Log of iterations from a training program that does not print its arguments."""

    path: Path  # path of the log, for error messages
    trainer: Trainer  # the program that wrote it
    iterations: Sequence[Mapping[str, float]]  # {quantity: number} of each iteration
    facts: Mapping[str, str]  # {column: text} from lines without iterations
    settings: Mapping[str, tuple[str, str]] = {}  # see `find_settings`
    notes: Sequence[str] = ()  # on settings that no column holds
    memory_bytes: float = math.nan  # peak that a rank allocated, NaN if not in the log [B]

    @classmethod
    def read(cls, path: str | Path) -> "TrainerLog":
        """Read a log with the first reader in `TRAINERS` that recognizes an iteration in it."""
        lines = read_log_lines(path)
        for trainer in TRAINERS:
            quantities = [trainer.read(line) for line in lines]
            if iterations := [line for line in quantities if line]:
                break
        else:
            names = ", ".join(dict.fromkeys(trainer.name for trainer in TRAINERS))
            first = next((line.strip()[:60] for line in lines if line.strip()), "")
            raise ValueError(
                f"{path}: it must be a log of {names}: arguments as `num_layers ..... 48` or lines "
                f"of iterations, got {first!r}"
            )
        # all lines of iterations are alike, and there may be many: the first one is enough
        text = "\n".join(
            line
            for line, read in zip(lines, quantities, strict=True)
            if not read or read is iterations[0]
        )
        text = _MESH.sub(_mesh_as_settings, text)
        marks = {**_DATA["facts"], **trainer.facts}
        sizes = {name: trainer.find_numbers(mark, text) for name, mark in marks.items()}
        # some programs print the time of the whole run, perhaps repeated in a block of metrics
        runs = {line["runtime"] for line in iterations if "runtime" in line}
        for unit, values in {**sizes, "s": runs}.items():
            if len(values) > 1:
                listed = " and ".join(f"{value:.17g} {unit}" for value in sorted(values)[:2])
                why = f"it holds {len(values)} runs, such as {listed}: give the log of one run"
                raise ValueError(f"{path}: {why}")
        if not any("batch" in line for line in iterations):
            sizes = {"global_batch": _steady_growth(iterations, "consumed"), **sizes}
        sizes["tokens"] = _steady_growth(iterations, "consumed tokens")
        for line in iterations:
            line.pop("consumed", None)
            line.pop("consumed tokens", None)
        facts = {name: f"{min(values):.17g}" for name, values in sizes.items() if values}
        if runs:
            iterations = [line for line in iterations if "runtime" in line]
            if steps := trainer.num_steps(text):
                iterations = [{"seconds": line["runtime"] / steps} for line in iterations]
        settings, notes = find_settings(path, text)
        facts |= {name: value for name, (_, value) in settings.items() if value.isalnum()}
        return cls(Path(path), trainer, iterations, facts, settings, notes)

    def rows(
        self, model: str, trained: Model, columns: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return (rows, notes): a row of step times per batch size, with the user's columns."""
        # The sequence length of the model `trained` turns tokens per second into sequences.
        names = {name for line in self.iterations for name in line}
        # a line that was cut lacks a number that the other lines have
        lines = [line for line in self.iterations if line.keys() == names] or [*self.iterations]
        quantities = lines[-1].keys()
        has_batch = "batch" in quantities or {"seconds", "samples"} <= quantities
        memory = {} if math.isnan(self.memory_bytes) else {"memory_bytes": round(self.memory_bytes)}
        is_rounded = self.trainer.digits > 0
        log_columns = {*memory, "seconds", "n", "spread", "source"}
        if has_batch and not is_rounded:
            log_columns.add("global_batch")
        check_columns(self.path, log_columns, columns)
        for name, (text, values) in self.settings.items():
            if name in columns and not re.fullmatch(values, columns[name]):
                why = f"the log has {text!r}: {name} must be {values}, got {columns[name]}"
                raise ValueError(f"{self.path}: {why}")
        facts = {name: value for name, value in self.facts.items() if name not in _CHECKS}
        check_columns(self.path, facts, columns)
        columns = {**facts, **columns}
        self._check_complete(columns, _REQUIRED if has_batch else (*_REQUIRED, "global_batch"))
        rows, notes = rows_by_batch(self.path, self._timed_lines(lines, trained, columns))
        if num_cut := len(self.iterations) - len(lines):
            why = "lines with fewer numbers than the others are left out"
            notes.append(f"{self.path}: {why}: {num_cut}")
        is_from_rate = "steps" in quantities and self.trainer.steps_of_run
        if is_from_rate and (error := 0.0005 * rows[-1]["seconds"]) > 0.01:
            notes.append(
                f"{self.path}: train_steps_per_second is rounded: seconds may be off by "
                f"{100 * error:.2g} %; exact times need a line `{self.trainer.steps_of_run} ..`"
            )
        if has_batch and is_rounded and "global_batch" not in columns:
            notes.append(
                f"{self.path}: the log rounds batch sizes to {self.trainer.digits} digits: "
                "--columns global_batch=.. sets the exact size"
            )
        source = {"source": f"{self.path.name}, iterations timed by {self.trainer.name}"}
        if "tokens" in quantities and "sequence" not in columns:
            notes.append(
                f"{self.path}: the log has no sequence length: rows have {trained.sequence}, the "
                "model's"
            )
        if self.trainer.note:
            notes = [*notes, f"{self.path}: {self.trainer.note}"]
        notes += [*self.notes, *self._contradictions(trained, rows, columns)]
        return [{"model": model, **columns, **row, **memory, **source} for row in rows], notes

    def _contradictions(
        self, model: Model, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield notes on numbers of the log that differ from those of its rows."""
        size, batch = float(model.parameters), rows[-1]["global_batch"]
        parameters = float(self.facts.get("parameters", size))
        if abs(parameters / size - 1) > MAX_PARAMETER_ERROR:
            counts = f"{parameters:,.0f} parameters, {model.name} has {size:,.0f}"
            yield f"{self.path}: the log counts {counts}: rows predict steps that train all"
        steps = int(self.facts.get("accumulation", 0))
        if steps and (count := steps * _sequences_at_once(columns)) != batch:
            where = f"{steps} accumulation steps on {columns['accelerators']} accelerators"
            yield f"{self.path}: {where} are {count} sequences, the log has {batch}"

    def _check_complete(self, columns: Mapping[str, str], required: Sequence[str]) -> None:
        """Refuse rows without a required column, which the user has to give."""
        values = dict.fromkeys(required, "..") | {k: v for k, (_, v) in self.settings.items()}
        if missing := [name for name in values if name not in columns]:
            cells = ",".join(f"{name}={values[name]}" for name in missing)
            kind = f"this log of {self.trainer.name}"
            if self.trainer is MEGATRON:
                kind = "the log lists no arguments such as `num_layers ..... 48`, and"
            raise ValueError(
                f"{self.path}: {kind} does not have {', '.join(missing)}: give --columns {cells}; "
                f"seconds are {self.trainer.formula}"
            )

    def _timed_lines(
        self, lines: Sequence[Mapping[str, float]], model: Model, columns: Mapping[str, str]
    ) -> Iterator[TimedLine]:
        """Yield batch size and time of each iteration; a line may have a rate instead of a time."""
        accelerators = read_cell(whole(), columns["accelerators"], "accelerators")
        sequence = read_cell(whole(), columns.get("sequence", str(model.sequence)), "sequence")
        run_batch = read_cell(whole(0), columns.get("global_batch", "0"), "global_batch")
        tokens = float(self.facts.get("tokens", run_batch * sequence))
        if tokens != run_batch * sequence:
            why = f"global_batch x sequence must be as many, got {run_batch} x {sequence}"
            raise ValueError(f"{self.path}: the log counts {tokens:,.0f} tokens a step: {why}")
        if not run_batch and "samples" in lines[-1]:  # each line rounds the batch differently
            sizes = [line["seconds"] * line["samples"] for line in lines]
            finite_sizes = [size for size in sizes if math.isfinite(size)]  # NaN: 0 s at rate inf
            run_batch = round(statistics.median(finite_sizes or [0]))
            if max(finite_sizes, default=0) > 1.25 * min(finite_sizes, default=0):
                sizes_text = f"{min(finite_sizes):.3g} to {max(finite_sizes):.3g} sequences"
                raise ValueError(f"{self.path}: steps have {sizes_text}: give steps of one size")
        for line in lines:
            batch = self._whole_batch(line["batch"], columns) if "batch" in line else run_batch
            tokens = line.get("tokens", 0) * accelerators
            sequences_per_second = line.get("samples") or tokens / sequence
            if "seconds" in line:
                seconds = line["seconds"]
            elif line.get("steps"):  # steps per second
                seconds = 1 / line["steps"]
            else:
                seconds = batch / sequences_per_second if sequences_per_second else 0.0
            yield TimedLine(batch, seconds, line.get("step", math.nan))

    def _whole_batch(self, batch: float, columns: Mapping[str, str]) -> int:
        """Correct a rounded batch size to the user's, or to whole microbatches of replicas."""
        unit = _sequences_at_once(columns) or 1
        # 1.02K of 3 digits stands for 1,015 to 1,025: its last digit is worth 10
        last_digit = 10 ** (math.floor(math.log10(batch or 1)) + 1 - self.trainer.digits)
        has_exact = "global_batch" in columns
        nearest = _cell(columns, "global_batch") if has_exact else round(batch / unit) * unit
        is_rounded = self.trainer.digits and 2 * abs(nearest - batch) <= last_digit
        if has_exact and not is_rounded:
            check_columns(self.path, {"global_batch": f"{batch:g}"}, columns)
        return nearest if is_rounded else round(batch)


def _mesh_as_settings(mesh: re.Match[str]) -> str:
    """Write the degrees of a mesh as "pp=4, tp=8,"."""
    names, sizes = (re.findall(r"\w+", part) for part in mesh.groups())
    return " ".join(f"{name}={size}," for name, size in zip(names, sizes, strict=False))


def find_settings(path: str | Path, text: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return {column: (text, pattern of its values)} of settings in a log, and notes on others."""
    columns: dict[str, tuple[str, str]] = {}
    notes = []
    for mark, (column, meaning) in _DATA["settings"].items():
        if (match := re.search(mark, text)) and column:
            columns[column] = match[0], meaning
        elif match:
            notes.append(f"{path}: {match[0][:50]!r} is not read: {meaning}")
    return columns, notes


def _cell(columns: Mapping[str, str], name: str) -> int:
    return read_cell(whole(1), columns.get(name, "1"), name)


def _sequences_at_once(columns: Mapping[str, str]) -> int:
    """Return the number of sequences in one microbatch of all replicas."""
    workers = math.prod(_cell(columns, name) for name in ("tensor", "context", "pipeline"))
    return _cell(columns, "microbatch_size") * _cell(columns, "accelerators") // workers
