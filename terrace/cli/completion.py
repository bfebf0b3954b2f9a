"""`terrace completion SHELL`: completion of commands, options and keys for bash, zsh and fish, by argcomplete.

The script calls this command for the words, so that it knows the options of every later version.
"""

import argparse
from collections.abc import Sequence


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["terrace"], shell=options.shell))
    return 0


def complete(line: str) -> None:
    """Prints the words that may come next on a command line, typed up to `line`, and ends the process."""
    import argcomplete

    argcomplete.autocomplete(parser_for(line))


def parser_for(line: str) -> argparse.ArgumentParser:
    """The parser that knows the words of the command in `line`, which ends where the cursor is."""
    from terrace.cli.keys import dotted, sections, takers
    from terrace.cli.main import all_help, parser_of

    words = line.split()
    if line.endswith(" "):
        words.append("")
    command = words[1] if len(words) > 2 else ""
    parser = parser_of([command] if command in all_help() else ["--help"])
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    if command in takers():
        for name, help_line in dotted(command).items():
            commands.choices[command].add_argument(f"--{name}", help=help_line.replace("%", "%%"))
    if command == "keys":
        (asked,) = (action for action in commands.choices[command]._actions if action.dest == "asked")
        asked.choices = (*sections(), *dotted())
    return parser
