"""
Runs a table of functions as the command line of bench.py and assets/draw.py.

    def count(n=3) -> dict:
        return {"sum": sum(range(n))}

    main(__doc__, {"count": count}, {"n": "how far"})      # python bench.py count --n 9

A function's arguments are the command's flags, and their defaults determine the flags' types. An
argument without a default is positional. The docstring says what is measured, and is printed first.
The function returns its figures. These are printed after the flags' values, as one line of JSON.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Callable

import torch

from assets.workloads import DEVICE
from common import Parser, add_flag, positive
from engine.sizing import machine_name


def add_argument(parser: argparse.ArgumentParser, argument: inspect.Parameter, help: str):
    """
    Add the flag for a command's argument. If the default is a tuple, the flag takes several values.
    """
    name = argument.name
    default = argument.default
    if default is argument.empty:
        parser.add_argument(name, help=help)
        return
    options = {"kind": positive, "nargs": "+"} if isinstance(default, tuple) else {}
    flag = "--" + name.replace("_", "-")
    add_flag(parser, flag, help, default, **options)


def build_parser(about: str, commands: dict[str, Callable], flags: dict[str, str]) -> Parser:
    """
    Return a parser with a subcommand for each function. `flags` has the help for each argument.
    """
    as_written = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = Parser(description=about, **as_written)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run in commands.items():
        command = subparsers.add_parser(name, description=inspect.getdoc(run), **as_written)
        for argument in inspect.signature(run).parameters.values():
            add_argument(command, argument, flags[argument.name])
    return parser


def main(about: str, commands: dict[str, Callable], flags: dict[str, str]):
    """Run the command named on the command line, and print its figures."""
    arguments = vars(build_parser(about, commands, flags).parse_args())
    name = arguments.pop("command")
    print(inspect.getdoc(commands[name]), file=sys.stderr)
    try:
        figures = commands[name](**arguments)
    except ValueError as error:  # such as a missing --model, or no GPU
        sys.exit(str(error))
    machine = {"device": machine_name(DEVICE), "torch": torch.__version__}
    result = {"bench": name, **arguments, **machine, **figures}
    for name, value in result.items():
        print(f"{name:>24}: {value}", file=sys.stderr)
    print(json.dumps(result, default=str))  # `str` converts paths
