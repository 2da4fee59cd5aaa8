"""Command-line flags, generated from dataclasses of settings (`lm/options.py`)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Sequence
from typing import Any

from absl import flags as absl_flags

from lm.config import Config, RunOptions
from lm.config_file import BUILT_IN, ConfigFile, NetworkFunctions, load_config_file
from lm.errors import InfoRequested, UserError, first_line
from lm.options import field_type, replaced

_DEFINE = {
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    bool: absl_flags.DEFINE_boolean,
    str: absl_flags.DEFINE_string,
}


class Flags:
    """A program's flags, with `--help`.

    A set of its own, not absl's global one: libraries define dozens of flags there, which would
    show in our `--help` and clash with the fields of a Config.

    Args:
      usage: The program's description, shown by `--help`.
    """

    def __init__(self, usage: str):
        self._usage = usage
        self._values = absl_flags.FlagValues()
        self._required: dict[str, str] = {}
        self.define(bool, "help", False, "show this help")

    def define(
        self, plain_type: type, name: str, default: Any, help: str, required: str = ""
    ) -> None:
        """Define one flag of type int, float, bool or str; `required` tells who leaves it out what
        to do.

        Raises:
          UserError: A field of a config file has this name.
        """
        if required:
            self._required[name] = required
        try:
            _DEFINE[plain_type](name, default, help, flag_values=self._values)
        except absl_flags.DuplicateFlagError as error:
            raise UserError(
                f"--{name} is a flag of this command already: rename that field of the config file"
            ) from error

    def define_fields(
        self, cls: type, show_defaults: bool = True, leave_out: Container[str] = ()
    ) -> None:
        """Define one flag for each field of a dataclass, all unset until the user gives them."""
        for field in dataclasses.fields(cls):
            if field.name in leave_out:
                continue
            plain_type, _ = field_type(cls, field.name)
            text = field_help(field)
            if show_defaults and field.default not in (None, ""):
                text += f" (default: {field.default})"
            self.define(plain_type, field.name, None, text)

    def peek(self, argv: Sequence[str], name: str) -> Any:
        """Return the value of one flag, before all flags are defined that the command line may
        have.

        Raises:
          UserError: It is ill-typed.
        """
        self._values.set_gnu_getopt(True)  # the values of unknown flags are no end of the flags
        try:
            self._values(list(argv), known_only=True)
        except (absl_flags.Error, ValueError) as error:  # ValueError: --noflag=value
            raise UserError(f"{first_line(error)} (see --help)") from error
        return self[name]

    def parse(self, argv: Sequence[str], positional: bool = False) -> Sequence[str]:
        """Parse a command line, program name first.

        Args:
          argv: The command line.
          positional: Whether there may be arguments that are not flags.

        Returns:
          The arguments that are not flags.

        Raises:
          UserError: A flag is unknown, ill-typed or missing, or an argument is not a flag.
          InfoRequested: The command line has `--help`.
        """
        self._values.set_gnu_getopt(positional)  # else flags end at the first other argument
        try:
            rest = self._values(list(argv))
        except (absl_flags.Error, ValueError) as error:  # ValueError: --noflag=value
            raise UserError(f"{first_line(error)} (see --help)") from error
        if self["help"]:
            raise InfoRequested(self.help_text())
        if len(rest) > 1 and not positional:
            raise UserError(f"{rest[1]!r} is not a flag: write --flag value (see --help)")
        for name, what_to_do in self._required.items():
            if not self[name]:
                raise UserError(f"--{name} is missing: {what_to_do} (see --help)")
        return rest[1:]

    def __getitem__(self, name: str) -> Any:
        value = self._values[name].value
        if isinstance(value, str) and value.startswith("~/"):  # which the shell leaves after "="
            return os.path.expanduser(value)
        return value

    def given(self, cls: type) -> dict[str, Any]:
        """Return the fields of a dataclass that the user gave as flags."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in self._values]
        return {name: self[name] for name in names if self[name] is not None}

    def help_text(self) -> str:
        """Return the usage, then each flag with its documentation."""
        lines = [self._usage, ""]
        for name in self._values:
            flag = self._values[name]
            lines += [f"  --{'[no]' if flag.boolean else ''}{name}", f"      {flag.help}"]
        return "\n".join(lines)


def field_help(field: dataclasses.Field) -> str:
    """Return the help text of a field, with its choices."""
    choices = ", ".join(map(str, field.metadata["choices"]))
    return field.metadata["help"] + (f" (one of: {choices})" if choices else "")


def run_flags(usage: str) -> Flags:
    """Return the flags of a program that uses a run: `--run`, `--checkpoint`, `--config`; more may
    follow."""
    flags = Flags(usage)
    flags.define(
        str, "run", None, "directory of the run: what --output_dir was in training",
        required="give the directory of a run",
    )  # fmt: skip
    flags.define(
        str, "checkpoint", "last",
        "last, best (by validation perplexity), or a checkpoint's directory (default: last)",
    )  # fmt: skip
    flags.define(
        str, "config", None, "the config file that the run was trained with, which is run; only"
        " where it brought a network or fields of its own",
    )  # fmt: skip
    flags.define(
        bool, "allow_changed_config_file", False, "use --config although the file has changed"
    )
    return flags


def run_arguments(flags: Flags) -> dict[str, Any]:
    """Return what the flags of `run_flags` say, as `open_run` takes it.

    Raises:
      UserError: The config file cannot be used.
    """
    path = flags["config"]
    return {
        "directory": flags["run"],
        "checkpoint": flags["checkpoint"],
        "functions": load_config_file(path).functions if path else BUILT_IN,
        "allow_changed_config_file": flags["allow_changed_config_file"],
    }


def config_flags(flags: Flags, argv: Sequence[str]) -> ConfigFile:
    """Define `--config` and a flag for each field of the config that it names.

    Raises:
      UserError: The config file cannot be used.
    """
    flags.define(
        str, "config", "config_small",
        "a config in configs/, or a path to a .py file with get_config(), which is run"
        " (default: config_small)",
    )  # fmt: skip
    file = load_config_file(flags.peek(argv, "config"))
    flags.define_fields(type(file.config), show_defaults=False)
    return file


def parse_training_flags(
    argv: Sequence[str],
) -> tuple[Config, RunOptions, NetworkFunctions]:
    """Turn the command line of `lm.train` into what `lm.training.run.train` takes.

    Args:
      argv: The command line, program name first.

    Returns:
      The config that `--config` names with the given flags put over it, the options, and the
      functions of the network.

    Raises:
      UserError: Bad flags, config or values; the message names the field.
      InfoRequested: The command line has `--help`.
    """
    flags = Flags(
        "Train a language model, on one process or under mpirun on many.\n"
        "\n"
        "  python -m lm.train --config config_small\n"
        "  mpirun -np 2 -H host1:1,host2:1 python -m lm.train --config config_small\n"
        "\n"
        "A flag given here overrides the config's field of the same name."
    )
    file = config_flags(flags, argv)
    flags.define_fields(RunOptions)
    flags.parse(argv)
    config = replaced(file.config, **flags.given(type(file.config)))
    options = RunOptions(**flags.given(RunOptions))
    return config, options, file.functions
