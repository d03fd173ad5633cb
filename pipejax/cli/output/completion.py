"""Scripts that complete a command line in bash, zsh and fish: words of the catalogue."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pipejax.cli.options.catalogue import FLAG, NAMES, OptionRecord, begun, flag

FILES = "FILE"  # in the metavar of what is a file
BASH = """\
_pipejax() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local words="" head=""
  if [[ $current == "=" ]]; then current=""; fi
  if [[ $before == "=" ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    words="{commands}"
  elif [[ $current != -* ]]; then
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    if [[ $current == *,* ]]; then head="${{current%,*}},"; fi
  fi
  if [[ -z $words && $current == -* ]]; then
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
  fi
  if [[ -z $words && $current != -* && $before != -* ]]; then
    case "${{COMP_WORDS[1]}}" in
{arguments}
    esac
  fi
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -P "$head" -W "$words" -- "${{current##*,}}"))
  fi
  if ((${{#COMPREPLY[@]}} == 0)); then
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _pipejax pipejax
"""
ZSH = """\
#compdef pipejax
autoload -U +X compinit bashcompinit
(($+functions[compdef])) || compinit
bashcompinit
"""


class Completable(NamedTuple):
    """What is completed.

    Attributes:
      commands: what each does, by name.
      options: of each command, by name.
      arguments: words that complete what stands beside options, by command.
      names: words that complete a value, by the name of their list.
    """

    commands: Mapping[str, str]
    options: Mapping[str, Mapping[str, OptionRecord]]
    arguments: Mapping[str, Iterable[str]]
    names: Mapping[str, Iterable[str]]

    def words(self, option: OptionRecord) -> str:
        """Words that complete the value of an option."""
        known = option.names
        return " ".join(self.names[known] if isinstance(known, str) else known)


def _written(name: str, option: OptionRecord) -> list[str]:
    return [flag(name), *([f"-{option.short}"] if option.short else [])]


def _bash(known: Completable) -> str:
    values = []
    for command, own in known.options.items():
        for name, option in own.items():
            if option.names:
                where = " | ".join(f'"{command} {each}"' for each in _written(name, option))
                values.append(f'{where}) words="{known.words(option)}" ;;')
    options = [
        f'{command}) words="{" ".join(map(flag, own))}" ;;'
        for command, own in known.options.items()
    ]
    return BASH.format(
        commands=" ".join(known.commands),
        arguments="\n".join(
            f'      {command}) words="{" ".join(words)}" ;;'
            for command, words in known.arguments.items()
        ),
        values="\n".join(f"      {line}" for line in values),
        options="\n".join(f"      {line}" for line in options),
    )


def _fish(known: Completable) -> str:
    lines = ["complete -c pipejax -f"]
    for command, words in known.arguments.items():
        where = f"-n '__fish_seen_subcommand_from {command}'"
        lines.append(f"complete -c pipejax {where} -a {_quoted(' '.join(words))}")
    lines += [
        f"complete -c pipejax -n __fish_use_subcommand -a {name} -d {_quoted(about)}"
        for name, about in known.commands.items()
    ]
    of: dict[tuple[str, OptionRecord], list[str]] = {}
    for command, options in known.options.items():
        for name, option in options.items():
            of.setdefault((name, option), []).append(command)
    for (name, option), commands in of.items():
        parts = [f"-n '__fish_seen_subcommand_from {' '.join(commands)}'", f"-l {flag(name)[2:]}"]
        parts += [f"-s {option.short}"] if option.short else []
        words = known.words(option) if option.names else ""
        if option.kind == NAMES:
            words = f"(__fish_append , {words})"
        if option.kind != FLAG:
            parts += ["-r", "-F"] if FILES in option.kind.metavar else ["-x"]
        parts += [f"-a {_quoted(words)}"] if words else []
        lines.append(f"complete -c pipejax {' '.join(parts)} -d {_quoted(begun(option.head))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: Mapping[str, Callable[[Completable], str]] = {
    "bash": _bash,
    "zsh": lambda known: ZSH + _bash(known),
    "fish": _fish,
}
