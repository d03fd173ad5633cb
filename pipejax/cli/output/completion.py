"""Scripts that complete a command line in bash, zsh and fish."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pipejax.base.checks import resolve_choice
from pipejax.cli.commands.init import USED_BY
from pipejax.cli.commands.tune import SETTINGS
from pipejax.cli.options.catalogue import (
    CATALOGUE,
    FLAG,
    NAMES,
    Option,
    begin_sentence,
    flag,
    record,
)
from pipejax.costs.model.model import model_names
from pipejax.costs.model.stack import stack_names
from pipejax.costs.system.system import system_names
from pipejax.schedules import names

FILES = "FILE"  # part of the placeholder of every file
BASH = """\
_pipejax() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local words="" head="" command=${{COMP_WORDS[1]}}
  if ((COMP_CWORD > 2)); then
    case "$command ${{COMP_WORDS[2]}}" in
{pairs}
    esac
  fi
  if [[ $current == "=" ]]; then current=""; fi
  if [[ $before == "=" ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    words="{commands}"
  elif [[ $current != -* ]]; then
    case "$command $before" in
{values}
    esac
    if [[ $current == *,* ]]; then head="${{current%,*}},"; fi
  fi
  if [[ -z $words && $current == -* ]]; then
    case "$command" in
{options}
    esac
  fi
  if [[ -z $words && $current != -* && $before != -* ]]; then
    case "$command" in
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
    """Words that a script completes."""

    commands: Mapping[str, str]  # help by command
    options: Mapping[str, Mapping[str, Option]]  # options by command and name
    arguments: Mapping[str, Iterable[str]]  # words beside options, by command
    names: Mapping[str, Iterable[str]]  # values of options, by the name of their list

    @property
    def first_words(self) -> dict[str, str]:
        """Return the completions of the first word, with their help."""
        firsts: dict[str, str] = {}
        for command, about in self.commands.items():
            firsts.setdefault(command.partition(" ")[0], about)
        return firsts

    def words(self, option: Option) -> str:
        """Return the completions of an option's value."""
        names = option.names
        return " ".join(self.names[names] if isinstance(names, str) else names)


def _bash(completable: Completable) -> str:
    values = [f'"--completion --completion") words="{" ".join(SHELLS)}" ;;']
    for command, listed in completable.options.items():
        for name, option in listed.items():
            if option.names:
                spellings = [flag(name), *([f"-{option.short}"] if option.short else [])]
                where = " | ".join(f'"{command} {spelling}"' for spelling in spellings)
                values.append(f'{where}) words="{completable.words(option)}" ;;')
    pairs = " | ".join(f'"{command}"' for command in completable.commands if " " in command)
    options = [
        f'"{command}") words="{" ".join(map(flag, listed))}" ;;'
        for command, listed in completable.options.items()
    ]
    return BASH.format(
        commands=" ".join(completable.first_words),
        pairs=f'      {pairs}) command="$command ${{COMP_WORDS[2]}}" ;;',
        arguments="\n".join(
            f'      {command}) words="{" ".join(words)}" ;;'
            for command, words in completable.arguments.items()
        ),
        values="\n".join(f"      {line}" for line in values),
        options="\n".join(f"      {line}" for line in options),
    )


def _fish(completable: Completable) -> str:
    lines = ["complete -c pipejax -f"]
    for command, words in completable.arguments.items():
        where = f"-n '__fish_seen_subcommand_from {command}'"
        lines.append(f"complete -c pipejax {where} -a {_quoted(' '.join(words))}")
    lines += [
        f"complete -c pipejax -n __fish_use_subcommand -a {name} -d {_quoted(about)}"
        for name, about in completable.first_words.items()
    ]
    commands_by_option: dict[tuple[str, Option], list[str]] = {}
    for command, options in completable.options.items():
        for name, option in options.items():
            commands_by_option.setdefault((name, option), []).append(command)
    for (name, option), commands in commands_by_option.items():
        firsts = dict.fromkeys(command.partition(" ")[0] for command in commands)
        parts = [f"-n '__fish_seen_subcommand_from {' '.join(firsts)}'", f"-l {flag(name)[2:]}"]
        parts += [f"-s {option.short}"] if option.short else []
        words = completable.words(option) if option.names else ""
        if option.kind == NAMES:
            words = f"(__fish_append , {words})"
        if option.kind != FLAG:
            parts += ["-r", "-F"] if FILES in option.kind.metavar else ["-x"]
        parts += [f"-a {_quoted(words)}"] if words else []
        about = _quoted(begin_sentence(option.head))
        lines.append(f"complete -c pipejax {' '.join(parts)} -d {about}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: Mapping[str, Callable[[Completable], str]] = {
    "bash": _bash,
    "zsh": lambda completable: ZSH + _bash(completable),
    "fish": _fish,
}


def completion_script(
    shell: str, commands: Mapping[str, str], command_options: Mapping[str, Iterable[str]]
) -> str:
    """Return the script that completes commands, options and names of schedules in a shell."""
    shell = resolve_choice(shell, SHELLS, "--completion SHELL")
    options = {
        called: {
            name: record(name, called) for name in command_options[called] if name in CATALOGUE
        }
        for called in commands
    }
    lists = {
        "schedules": names(),
        "models": model_names(),
        "systems": system_names(),
        "stacks": stack_names(),
    }
    arguments = {"init": [*USED_BY], "tune": [*SETTINGS]}
    for called in commands:
        first, space, second = called.partition(" ")
        if space:
            arguments.setdefault(first, []).append(second)
    return SHELLS[shell](Completable(commands, options, arguments, lists))
