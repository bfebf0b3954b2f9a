"""Command line: `terrace COMMAND`. One module per command; an error is one line on stderr.

Commands of products (`terrace.base.products`) are looked up only if a command is none of those here. Exit codes are
listed in docs/training.md.
"""

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from terrace import __version__
from terrace.base.errors import ConfigError, HangError, ProbeError, TerraceError, TrainingError
from terrace.base.printable import printable
from terrace.base.products import Command, ProductWarning, add_parser, commands, left_out, parser_adder
from terrace.base.sealed import ChangedFile
from terrace.cli.output import OutputError, Terminated, printable_output

# The core's commands, listed here, so that --help needs none of their modules.
HELP = {
    "doctor": "check this machine: the parts that will be used, and fixes for missing ones",
    "plan": "find the fastest plan, say why, and write it; or predict how one scales",
    "rent": "price the training of a model on machines that can be rented",
    "simulate": "play a step without running it: where its time goes, its memory, its program",
    "train": "train a model",
    "meet": "run the meeting place of islands that come and go",
    "report": "write runs as one HTML page, or serve it while they grow",
    "replay": "repeat a step of a run, block by block",
    "generate": "continue a text with a trained model",
    "eval": "measure how well a trained model predicts a text",
    "export": "write a trained model as a Hugging Face folder",
    "upcycle": "make a mixture of experts from a dense model",
    "prune": "make a smaller model from the most important parts of a trained one",
    "data": "look at a corpus before a run, or tokenise it",
    "keys": "list every key of a run with its default",
    "completion": "print a script that completes commands and options in a shell",
    "probe": "measure this machine or job and write a cluster file",
}
_MAY_BE_EMPTY = ("prompt",)
_LONGEST = 80  # characters of a file's name in an error
_FAILURES = (HangError, OutputError, ProbeError, TrainingError)
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_CLOSED, EXIT_TERMINATED = 1, 2, 130, 141, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    with printable_output(), _notices_said():
        return _run(arguments)


@contextmanager
def _notices_said() -> Iterator[None]:
    # A line for each file, however often it is read, and for each product that is left out.
    said, show = set[str](), warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, ChangedFile | ProductWarning):
            show(message, category, *where, **more)
        elif str(message) not in said:
            said.add(str(message))
            print(f"terrace: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        for category in (ChangedFile, ProductWarning):
            warnings.simplefilter("always", category)
        warnings.showwarning = shown
        yield


def _headroom(value: str, rest: Sequence[str]) -> str:
    key = "--cluster.device.headroom"
    if any(word.partition("=")[0] == key for word in rest):
        raise ConfigError(f"--headroom {value} and {key} set the same: leave one out")
    import json  # here alone, since it is only for this option

    return f"{key}={json.dumps(value)}"  # a TOML text, so that 6 is refused for its missing unit


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Commands are imported inside the try: importing takes a moment, and Ctrl-C then must print one line, too.
        words, program = _split_program(list(sys.argv[1:] if arguments is None else arguments))
        words = words or ["--help"]
        _check_command(words[0])
        options, rest = _parsed(words)
        options.command_words = program
        if getattr(options, "headroom", None) is not None:
            rest.append(_headroom(options.headroom, rest))
        _check_working_folder()
        if options.command not in ("completion", "keys"):
            # Here, since --help needs none of it.
            import_module("terrace.cli.partners").check_partners(options.command, options)
        code: int = options.run(options, rest)
        # A closed pipe raises here, inside the try, not at interpreter exit.
        sys.stdout.flush()
    except BrokenPipeError:
        return EXIT_CLOSED
    except TerraceError as error:
        print(f"terrace: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        # Scripts can tell a failed run from bad input, which would fail again.
        return EXIT_FAILED if isinstance(error, _FAILURES) else EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        from terrace.base.extras import EXTRAS, needs  # here alone: most commands end well

        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"terrace: error: terrace {words[0] if words else ''} {needs(package)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        if error.errno is None:
            raise
        print(f"terrace: error: {_surroundings(error)}", file=sys.stderr)
        # An impossible file name is bad input; any other error may not recur.
        return EXIT_BAD_INPUT if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else EXIT_FAILED
    except KeyboardInterrupt:
        return _ended(Terminated("SIGINT"))
    except Terminated as ended:
        return _ended(ended)
    return code


def _split_program(words: list[str]) -> tuple[list[str], list[str]]:
    """A command line without the words after `--`, and those words, if its command takes another program's."""
    if "--" not in words or words[0] in HELP or not (own := commands().get(words[0])) or not own.takes_program:
        return words, []
    # Before argparse sees them, which drops `--`.
    where = words.index("--")
    return words[:where], words[where + 1 :]


def _ended(ended: Terminated) -> int:
    by_hand = ended.name == "SIGINT"
    print(f"terrace: {'interrupted' if by_hand else f'ended by {ended.name}'}; {ended.words}", file=sys.stderr)
    return EXIT_INTERRUPTED if by_hand else EXIT_TERMINATED


def _parsed(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(words[:1])
    if len(words) > 1:  # here, since --help alone needs none of it
        import_module("terrace.cli.coming_from").check_names(words, parser)
    try:
        return parser.parse_known_args(words)
    except SystemExit:  # --help and --version, whose print takes no notice of an error
        sys.stdout.flush()
        raise


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working folder is gone ({error.strerror}): cd to one that is there") from error


def _surroundings(error: OSError) -> str:
    """Error text for an unexpected error of the machine (disk, memory, file limits), with a fix."""
    reason = error.strerror or str(error)
    if "temporary directory" in reason:  # of tempfile, which has tried them all
        fix = "set TMPDIR to a folder with room"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free space there; TMPDIR names the folder of temporary files"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "raise the limit of open files, as ulimit -n 4096 does"
    else:
        fix = "name another file" if error.filename is not None else ""
    name = " ".join(printable(str(error.filename)).splitlines()) if error.filename is not None else ""
    where = f"{name[:_LONGEST]}{'...' * (len(name) > _LONGEST)}: " if name else ""
    return f"{where}{reason}{fix and f'; {fix}'}"


def _check_command(word: str) -> None:
    if word in HELP or word in ("-h", "--help", "-V", "--version") or word in commands():
        return
    from terrace.base.coming_from import command_for  # here alone: most commands are known
    from terrace.base.errors import did_you_mean

    if own := command_for(word):
        raise ConfigError(f"there is no command {word!r}; did you mean {own}?")
    if word == "help":
        raise ConfigError(
            "there is no command 'help': write terrace COMMAND --help, or terrace --help for all commands"
        )
    if word.startswith("-"):
        raise ConfigError(
            f"{word} comes after a command, as in terrace train {word}; terrace --help lists all commands"
        )
    raise ConfigError(f"there is no command {word!r}{did_you_mean(word, all_help())}")


class _Parser(argparse.ArgumentParser):
    # Errors are handled like all others: one line, exit code 2. Abbreviations would break with every new option.
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the value of --option=-- for the mark that ends options, and drops it.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # An empty value, as from an unset shell variable, would mean the working folder. Defaults pass through here,
        # too.
        wanted = arg_string or action.default == "" or action.dest in _MAY_BE_EMPTY or action.nargs == argparse.PARSER
        if not wanted:
            option = action.option_strings[-1] if action.option_strings else action.metavar
            raise ConfigError(f"{option} is empty: give it a value{', or leave it out' * bool(action.option_strings)}")
        return super()._get_value(action, arg_string)


def _of_products() -> dict[str, Command]:
    return {name: command for name, command in commands().items() if name not in HELP}


def all_help() -> dict[str, str]:
    """One line for each command, those of products last."""
    for name in commands().keys() & HELP:
        left_out(f"command {name!r} of a product is left out: Terrace has a command of that name")
    return HELP | {name: command.help for name, command in _of_products().items()}


def parser_of(named: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="terrace",
        description="Train large language models on clusters whose links are unequal.",
        epilog="terrace COMMAND --help lists the options of a command.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"terrace {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if named and named[0] in ("-h", "--help", "-V", "--version"):
        for name, words in all_help().items() if named[0] in ("-h", "--help") else ():
            parsers.add_parser(name, help=words)
        return parser
    # Errors list all commands; a command needs only its own module.
    if named and named[0] not in HELP and named[0] in (found := _of_products()):
        parser_adder(found[named[0]])(parsers)
        return parser
    for name in named if named and named[0] in HELP else HELP:
        if name == "keys":  # its help lists sections
            import_module("terrace.cli.keys").add_parser(parsers)
        else:
            import_module("terrace.cli.lines").LINES[name].add_to(parsers, name)
    if not named:
        for command in _of_products().values():
            add_parser(command, parsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
