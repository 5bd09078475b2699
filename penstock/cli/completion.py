"""`penstock completion SHELL`: a completion script made of the commands and flags there are.

bash  eval "$(penstock completion bash)"                                    in ~/.bashrc
zsh   eval "$(penstock completion zsh)"                                     in ~/.zshrc, after compinit
fish  penstock completion fish > ~/.config/fish/completions/penstock.fish
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

# The words that lead to a command decide what may follow; where nothing fits, files are offered.
BASH = """\
_penstock() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$command $word" in
            {paths}) command="$command $word" ;;
        esac
    done
    case "$command" in
{words}
    esac
    case "$command $previous" in
{values}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _penstock penstock
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_parser(subparsers: Subparsers, root: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script for a shell",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=lambda args: run(args.shell, root))


def run(shell: str, root: argparse.ArgumentParser) -> int:
    print({"bash": bash(root), "zsh": ZSH + bash(root), "fish": fish(root)}[shell], end="")
    return 0


def bash(root: argparse.ArgumentParser) -> str:
    paths, words, values = [], [], []
    for path, parser in commands(root):
        where = "".join(f" {word}" for word in path)
        if path:
            paths.append(shlex.quote(where))
        follow = [*subcommands(parser), *positional_choices(parser), *(name for name, _ in flags(parser))]
        words.append(f"        {shlex.quote(where)}) words={shlex.quote(' '.join(follow))} ;;")
        for name, action in flags(parser):
            if takes_value(action):
                choices = " ".join(map(str, action.choices or ()))
                values.append(f"        {shlex.quote(f'{where} {name}')}) words={shlex.quote(choices)} ;;")
    return BASH.format(paths="|".join(paths), words="\n".join(words), values="\n".join(values))


def fish(root: argparse.ArgumentParser) -> str:
    lines = []
    for path, parser in commands(root):
        seen = [f"__fish_seen_subcommand_from {word}" for word in path]
        # `bench serve` is not `serve`: another command, of this level or the first one, excludes this one.
        below, first = subcommands(parser), subcommands(root) if path else {}
        seen.append(f"not __fish_seen_subcommand_from {' '.join(sorted({*below, *first} - set(path)))}")
        start = f"complete -c penstock -n {shlex.quote('; and '.join(seen))}"
        lines += [f"{start} -f -a {name}" for name in (*below, *positional_choices(parser))]
        for name, action in flags(parser):
            line = f"{start} -l {name.removeprefix('--')} -d {shlex.quote(action.help or '')}"
            if action.choices:
                line += f" -x -a {shlex.quote(' '.join(map(str, action.choices)))}"
            elif takes_value(action):
                line += " -r"
            lines.append(line)
    return "\n".join(lines) + "\n"


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with the words that lead to it."""
    yield path, parser
    for name, below in subcommands(parser).items():
        yield from commands(below, (*path, name))


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        yield from ((name, action) for name in action.option_strings if name.startswith("--"))


def takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def positional_choices(parser: argparse.ArgumentParser) -> list[str]:
    plain = (a for a in parser._actions if not a.option_strings and not isinstance(a, argparse._SubParsersAction))
    return [str(choice) for action in plain for choice in action.choices or ()]
