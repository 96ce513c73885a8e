"""The command `longspan`: one table of subcommands, loaded when called, so that `longspan --help` is instant.

Each command is a function (arguments) -> exit status in the module that owns it: 0 when what it checks holds, 1 on a
miss, 2 for a usage error. `train` gets parity's certificate here, because rl/ and parity/ know nothing of each other.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longspan import __version__
from longspan.errors import UserError

__all__ = ["COMMANDS", "main"]

USAGE_ERROR = 2


@dataclass(frozen=True, slots=True)
class Command:
    """Where a subcommand lives ("module:function") and what it does in one line."""

    home: str
    what: str
    extra: str | None = None  # "module:function" handed to it as its second argument


COMMANDS: dict[str, Command] = {
    "train": Command(
        "longspan.rl.train:main",
        "run a recipe: longspan train recipes/digits_vl.py",
        "longspan.parity.certificate:certify",
    ),
    "parity": Command("longspan.parity.command:main", "prove on your model that a layout changes no number"),
    "plan": Command("longspan.engine.plan_command:main", "show how a batch would be cut: micro-steps, ranks, memory"),
    "bench": Command("longspan.engine.bench_command:main", "measure tokens a second and memory of a layout"),
    "export": Command(
        "longspan.rl.export_command:main", "longspan export RUN OUT: a run's weights as a Hugging Face folder"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else USAGE_ERROR
    if given[0] == "--version":
        print(__version__)
        return 0
    name, rest = given[0], given[1:]
    if name not in COMMANDS:
        print(f"longspan: {name!r} is no command. Use one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return USAGE_ERROR
    return run(COMMANDS[name], rest)


def run(command: Command, arguments: Sequence[str]) -> int:
    """Load the command and call it; a UserError it lets out is a usage error, a SystemExit of its parser its status."""
    extra = () if command.extra is None else (load(command.extra),)
    try:
        return load(command.home)(arguments, *extra)
    except UserError as error:
        print(f"longspan: {error}", file=sys.stderr)
        return USAGE_ERROR
    except SystemExit as leaving:  # argparse and tyro leave by it: 0 after --help, 2 after a bad option
        return leaving.code if isinstance(leaving.code, int) else USAGE_ERROR


def load(home: str) -> Callable[..., int]:
    module, _, function = home.partition(":")
    return vars(importlib.import_module(module))[function]


def usage() -> str:
    lines = [f"  {name:8} {command.what}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "longspan: exact reinforcement learning on long sequences.",
            "A layout changes speed and memory, never the numbers.",
            "",
            "usage: longspan COMMAND [OPTIONS]      (longspan COMMAND --help says more)",
            "",
            *lines,
            "",
            "Exit status: 0 when what the command checks holds, 1 on a miss, 2 for a usage error.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
