"""Layers of each pipeline stage, as strings and lists in the notation of Megatron-LM.

E is the embedding, t a transformer layer, m a layer that predicts a further token (MTP), L the
head with its loss. | ends a stage, x*n repeats a letter or a |, (..)*n repeats a group. Stages are
in the order in which a microbatch passes them; the schedule decides which worker has which stage.
Lists hold words instead of letters, one list per stage, or one per rank and virtual stage.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import Any

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types, wrong
from pipejax.base.display import short_repr
from pipejax.costs.model.model import Model

LETTERS = {
    "E": "embedding",
    "t": "transformer layer",
    "m": "layer for a further token (MTP)",
    "L": "head and loss",
}
# words of lists, as Megatron-LM, Megatron-Bridge and verl write them
WORDS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L", "head": "L", "output": "L"}
FORMS = (
    "E, t, m, L, |, x*n and (..)*n, without groups in groups, or for each stage a list of "
    f"{', '.join(WORDS)}, as [['embedding', 'decoder'], ['decoder', 'loss']]"
)
LAYOUT = "pipeline_layout"  # name of the argument in error messages
MAX_LETTERS = 100_000  # most letters and stages; a short text may repeat many
TOO_MANY = f"at most {MAX_LETTERS} letters and stages can be read"
MAX_GROUP = 16  # stages of a repeated group that a written layout may use
Counts = Sequence[int] | Int[NumpyArray, " stages"]
_REPEATED = re.compile(r"\(([^()]+)\)\*(\d+)|([EtmL|])(?:\*(\d+))?")


@short_repr
@dataclasses.dataclass(frozen=True)
class PipelineLayout:
    """Layers of each stage, as in Megatron-LM's option `--pipeline-model-parallel-layout`.

    Attributes:
      stages: letters of each stage.
    """

    stages: tuple[str, ...]

    def __post_init__(self) -> None:
        for stage in self.stages:
            if not isinstance(stage, str) or set(stage) - set(LETTERS):
                raise ValueError(f"a stage must be a text of {', '.join(LETTERS)}, got {stage!r}")

    @classmethod
    def parse(cls, text: "str | Sequence[Any] | PipelineLayout") -> "PipelineLayout":
        """Parse a pipeline layout from text or lists; commas and blanks are ignored.

        A layout is a text of letters, "Et|tL"; a list of words for each stage, [["embedding",
        "decoder"], ["decoder", "loss"]]; such lists for each virtual stage of each rank; lists as
        a text; or a `PipelineLayout`, which is returned.

        Example:
          >>> import pipejax as pj
          >>> print(pj.costing.PipelineLayout.parse([["embedding", "decoder"], ["t", "loss"]]))
          Et|tL
          >>> pj.costing.PipelineLayout.parse("Ett|t*2|x")
          Traceback (most recent call last):
          ...
          pipejax.base.checks.ArgumentError: pipeline_layout 'Ett|t*2|x' cannot be read at 'x': ...
        """
        check_types(pipeline_layout=(text, str, list, tuple, PipelineLayout))
        if isinstance(text, PipelineLayout):
            return text
        label = f"pipeline_layout {text!r}"
        if isinstance(text, str):
            text = text.strip()
            while len(text) > 1 and text[0] == text[-1] in "'\"":  # quotes within quotes
                text = text[1:-1].strip()
            if not set(text) & set("['\""):
                return cls(tuple(_unroll(re.sub(r"[\s,]", "", text), label).split("|")))
            text = _parse_lists(text, label)
        return cls(tuple(_stage_letters(stage, label) for stage in _list_stages(text, label)))

    @classmethod
    def with_layers(cls, layers: Counts, mtp: Counts) -> "PipelineLayout":
        """Build a layout from numbers of layers and of multi-token prediction layers by stage."""
        stages = ["t" * int(t) + "m" * int(m) for t, m in zip(layers, mtp, strict=True)]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
        return cls(tuple(stages))

    def __str__(self) -> str:
        """Return the shortest text of the layout, which repeats stages as in (tt|)*3."""
        texts = [_stage_text(stage) for stage in self.stages]
        last = len(texts) - 1
        # shortest[k] is the shortest text of stage k and all later ones; from the last backwards
        shortest = [""] * last + [texts[-1]]
        for start in reversed(range(last)):
            candidates = [f"{texts[start]}|{shortest[start + 1]}"]
            for size, times in _repeated_groups(texts, start, last):
                block = "|".join(texts[start : start + size])
                candidates.append(f"({block}|)*{times}{shortest[start + size * times]}")
            shortest[start] = min(candidates, key=len)
        return shortest[0]

    def count(self, letter: str) -> Int[NumpyArray, " stages"]:
        """Count the layers of one kind, named by a letter, on each stage (stages)."""
        return np.array([stage.count(letter) for stage in self.stages])

    def module_fqns(self) -> list[list[str]]:
        """Return the names of each stage's modules, as torchtitan's `module_fqns_per_model_part`.

        Example:
          >>> import pipejax as pj
          >>> pj.costing.PipelineLayout.parse("Et|ttL").module_fqns()
          [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]
        """
        if self.count("m").any():
            raise wrong("pipeline_layout", f"{self}: torchtitan pipelines no layers m")
        names, layer = {"E": ["tok_embeddings"], "L": ["norm", "output"]}, count()
        modules: list[list[str]] = [[] for _ in self.stages]
        for stage, stage_modules in zip(self.stages, modules, strict=True):
            for letter in stage:
                stage_modules += names.get(letter) or [f"layers.{next(layer)}"]
        return modules

    def check(self, model: Model, num_stages: int) -> None:
        """Check that the layout has all layers of a model, in order, on `num_stages` stages.

        Raises:
          ValueError: if a layer is missing, repeated, out of order or on a wrong stage.
        """
        label, letters = f"{LAYOUT} {self}", "".join(self.stages)
        if len(self.stages) != num_stages:
            raise MismatchError(
                f"{label} has {len(self.stages)} stages, the schedule has {num_stages}", LAYOUT
            )
        mtp = int(model.mtp_layers)
        counts = {"E": 1, "t": int(model.layers), "m": mtp, "L": 1}
        for letter, minimum in counts.items():
            # each further token may name its head once more
            maximum = minimum + mtp if letter == "L" else minimum
            count = letters.count(letter)
            if not minimum <= count <= maximum:
                times = minimum if minimum == maximum else f"{minimum} to {maximum}"
                raise MismatchError(
                    f"{label}: {letter} ({LETTERS[letter]}) must stand {times} times for "
                    f"{model.name or 'the model'}, got {count}",
                    LAYOUT,
                )
        if list(letters) != sorted(letters, key="EtmL".index):
            raise MismatchError(f"{label}: the order must be E, all t, all m, L", LAYOUT)
        if "E" not in self.stages[0] or letters.count("L") > self.stages[-1].count("L"):
            raise MismatchError(f"{label}: E must be on the first stage and L on the last", LAYOUT)


def _unreadable(label: str, place: object) -> ValueError:
    return wrong(label, f"cannot be read at {place!r}: {FORMS}")


def _parse_lists(text: str, label: str) -> Any:
    """Parse text with lists in JSON or Python form, which + and * may combine; return lists."""

    def evaluate_node(node: ast.AST) -> Any:
        """Evaluate a node of the syntax tree to a word, a number or a list."""
        match node:
            case ast.Constant(value=str() | int()):
                return node.value
            case ast.Name():  # a word without quotes, as a shell or Hydra leaves it
                return node.id
            case ast.List() | ast.Tuple():
                return [evaluate_node(part) for part in node.elts]
            case ast.BinOp(op=ast.Add()):
                first, second = evaluate_node(node.left), evaluate_node(node.right)
                if isinstance(first, list) and isinstance(second, list):
                    return first + second
            case ast.BinOp(op=ast.Mult()):
                times, parts = evaluate_node(node.left), evaluate_node(node.right)
                if _is_list(times):  # the list may stand on either side
                    times, parts = parts, times
                if _is_list(parts) and isinstance(times, int):
                    if _num_words(parts) * times > MAX_LETTERS:
                        raise wrong(f"{label}:", TOO_MANY)
                    return parts * times
        raise _unreadable(label, ast.get_source_segment(text, node) or text)

    try:
        return evaluate_node(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        start = (getattr(error, "offset", None) or 1) - 1
        raise _unreadable(label, text[start : start + 9] or text[-9:]) from None


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _num_words(content: Any) -> int:
    return max(1, sum(map(_num_words, content))) if _is_list(content) else 1


def _list_stages(content: Any, label: str) -> list[Any]:
    """List each stage's content in pipeline order, from a list by stage or by rank."""
    # ranks [[a, c], [b, d]] of two virtual stages each -> stages a b c d
    if not _is_list(content) or not content:
        raise _unreadable(label, content)
    ranks = [rank for rank in content if _is_list(rank)]
    has_virtual_stages = any(_is_list(part) for rank in ranks for part in rank)
    if not has_virtual_stages:
        return list(content)
    if len(ranks) < len(content) or len({len(rank) for rank in ranks}) > 1:
        raise wrong(f"{label}:", "each rank must have as many virtual stages as the others")
    return [stage for virtual_stage in zip(*ranks, strict=True) for stage in virtual_stage]


def _stage_letters(stage: Any, label: str) -> str:
    """Convert a stage's words, or a text of letters, to letters; head and loss become one L."""
    # ["decoder", "head", "loss"] -> "tL"
    if not isinstance(stage, str | list | tuple):
        raise _unreadable(label, stage)
    words = [str(word) for word in stage]
    heads = [word for word in words if WORDS.get(word.lower(), word) == "L"]
    letters = ""
    for word in words:
        letter = WORDS.get(word.lower(), word)
        if set(letter) - set(LETTERS):
            raise _unreadable(label, word if _is_list(stage) else stage)
        if letter != "L" or word == heads[-1]:
            letters += letter
    return letters


def _unroll(bare: str, label: str) -> str:
    """Write out all repeats in a layout's bare text, such as ttt for t*3 and t|t| for (t|)*2."""
    parts: list[str] = []
    place = size = 0
    while place < len(bare):
        match = _REPEATED.match(bare, place)
        if match is None:
            raise _unreadable(label, bare[place : place + 9])
        group, group_times, letter, letter_times = match.groups()
        if group is None:
            part, times = letter, letter_times or "1"
        else:
            part, times = _unroll(group, label), group_times
        size += len(part) * (int(times) if len(times) < 9 else MAX_LETTERS + 1)
        if size > MAX_LETTERS:
            raise wrong(f"{label}:", TOO_MANY)
        parts.append(part * int(times))
        place = match.end()
    return "".join(parts)


def _stage_text(stage: str) -> str:
    """Write a stage's letters as ttt, or in a shorter form such as t*4."""
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(min(letter * n, f"{letter}*{n}", key=len) for letter, n in runs)


def _repeated_groups(texts: Sequence[str], start: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield (size, repetitions) of each repeated group of stages that begins at `start`."""
    # Stages a b a b c: from stage 0 on, a group of size 2 repeats 2 times. No group has the last
    # stage.
    for size in range(1, min(MAX_GROUP, (last - start) // 2) + 1):
        block, end = texts[start : start + size], start + size
        while texts[end : end + size] == block and end + size <= last:
            end += size
        if end > start + size:
            yield size, (end - start) // size
