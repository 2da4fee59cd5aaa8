"""One command-line parser for all commands.

The flags of a command are the fields of its option classes, which `lm.options.option` declares.
"""

import dataclasses
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

import lm
from lm.cli.markdown import markdown_table
from lm.config import Config, RunOptions
from lm.config_file import ConfigFile, load_config_file
from lm.errors import InfoRequested, UserError, first_line
from lm.functions import BUILT_IN
from lm.options import Checked, field_type, option, replaced
from lm.system import package_version

_DEFINE = {
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    bool: absl_flags.DEFINE_boolean,
    str: absl_flags.DEFINE_string,
}
_COMMON_FLAGS = {
    "help": "show this help",
    "version": "show the versions of this project and its libraries",
    "print_config": "show all values and their sources: default, config file, run or command line",
}


@dataclasses.dataclass(frozen=True)
class ConfigChoice(Checked):
    """The flag that selects the config."""

    config: str = option(
        "config_small",
        "a config in configs/, or the path of a .py file that defines get_config(); the file is"
        " executed",
        is_path=True,
    )


@dataclasses.dataclass(frozen=True)
class RunChoice(Checked):
    """Flags that select a run and a checkpoint."""

    run: str = option(
        "", "directory of the run (--output_dir of lm.train), or one of its checkpoints",
        required=True, is_path=True,
    )  # fmt: skip
    checkpoint: str = option(
        "last", "last, best (by validation perplexity), or a checkpoint's name or directory",
        is_path=True,
    )  # fmt: skip
    config: str | None = option(
        None,
        "the config file of the run, if it defines a network or config fields; executes the file",
        is_path=True,
    )
    allow_changed_config_file: bool = option(False, "use --config even if the file has changed")

    def open_arguments(self) -> dict[str, Any]:
        """Return the arguments of `open_run` (lm/inference/trained_run.py)."""
        return {
            "directory": self.run,
            "checkpoint": self.checkpoint,
            "functions": load_config_file(self.config).functions if self.config else BUILT_IN,
            "allow_changed_config_file": self.allow_changed_config_file,
        }


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line. `arguments[cls]` is an instance of the option class."""

    given: Mapping[type, Mapping[str, Any]]  # the fields of each option class that flags set
    config_file: ConfigFile | None  # None if the command has no `ConfigChoice`
    positional: Sequence[str]

    def __getitem__(self, cls: type) -> Any:
        if cls is Config:
            return replaced(self.config_file.config, **self.given[cls])
        return cls(**self.given[cls])

    def table(self, recorded: Mapping[str, Any] | None = None) -> str:
        """Return the output of `--print_config`, with the `recorded` config of a run."""
        rows = []
        for cls, given in self.given.items():
            if cls is ConfigChoice and recorded is not None:
                continue
            is_recorded = cls is Config and recorded is not None
            options = replaced(Config(**recorded), **given) if is_recorded else self[cls]
            for field in dataclasses.fields(options):
                value, source = getattr(options, field.name), "default"
                if field.name in given:
                    source = "command line"
                elif is_recorded:
                    source = "run"
                elif cls is Config and value != field.default:
                    source = "config file"
                rows.append([field.name, str(value), source])
        return markdown_table(["option", "value", "source"], rows)


def parse(
    argv: Sequence[str],
    usage: str,
    *option_classes: type,
    positional: bool = False,
    leave_out: Container[str] = (),
    find_recorded: Callable[["Arguments"], Mapping[str, Any] | None] = lambda _: None,
) -> Arguments:
    """Parse a command line, with the program name first.

    Args:
      usage: The description of the command, for `--help`.
      *option_classes: Dataclasses whose fields become flags. `Config` stands for the class of the
        config in the file that `--config` names, and needs a `ConfigChoice`.
      positional: Whether the command accepts arguments that are not flags.
      leave_out: Fields of `RunOptions` that the command does not accept.
      find_recorded: Returns the config of a run if it replaces the default of `--config`.

    Raises:
      InfoRequested: For `--help`, `--version` and `--print_config`.
    """
    for word in argv:
        if word.endswith("\r"):
            raise UserError(
                f"{word!r} ends in a carriage return, because the file that contains this command"
                " has Windows line ends: run sed -i 's/\\r$//' FILE"
            )
    file = _load_config_file(argv) if Config in option_classes else None
    # Libraries define dozens of flags in absl's global FLAGS.
    flags, fields = absl_flags.FlagValues(), {}
    for name, text in _COMMON_FLAGS.items():
        absl_flags.DEFINE_boolean(name, False, text, flag_values=flags)
    for cls in option_classes:
        actual = type(file.config) if cls is Config else cls
        skipped = leave_out if cls is RunOptions else ()
        fields[cls] = [field for field in dataclasses.fields(actual) if field.name not in skipped]
        for field in fields[cls]:
            _define(flags, actual, field)
    flags.set_gnu_getopt(positional)  # Otherwise, flags end at the first positional argument.
    rest = _read(flags, argv)[1:]
    if flags["help"].value:
        raise InfoRequested(_help_text(usage, flags))
    if flags["version"].value:
        raise InfoRequested(versions())
    if rest and not positional:
        fix = "--flag value"
        if rest[0].lower() in ("true", "false"):
            fix = "--flag or --noflag for a flag that is true or false"
        raise UserError(f"{rest[0]!r} is not a flag: write {fix} (see --help)")
    given = {cls: _given(flags, fields[cls]) for cls in option_classes}
    arguments = Arguments(given, file, rest)
    if flags["print_config"].value:
        raise InfoRequested(arguments.table(find_recorded(arguments)))
    return arguments


def field_help(field: dataclasses.Field) -> str:
    """Return the help text of a field, with its choices if the text does not name them all."""
    text, choices = field.metadata["help"], [str(c) for c in field.metadata["choices"]]
    return text if all(c in text for c in choices) else f"{text} (one of: {', '.join(choices)})"


def _load_config_file(argv: Sequence[str]) -> ConfigFile:
    """Load the file that `--config` names. Its config class determines which flags exist."""
    flags = absl_flags.FlagValues()
    _define(flags, ConfigChoice, ConfigChoice.__dataclass_fields__["config"])
    flags.set_gnu_getopt(True)  # Continue after the values of unknown flags.
    _read(flags, argv, known_only=True)
    name = flags["config"].value if flags["config"].present else ConfigChoice.config
    return load_config_file(os.path.expanduser(name))


def _define(flags: absl_flags.FlagValues, cls: type, field: dataclasses.Field) -> None:
    plain_type, _ = field_type(cls, field.name)
    text = field_help(field)
    # The defaults of a Config depend on its config file.
    if field.default not in (None, "") and not issubclass(cls, Config):
        text += f" (default: {field.default})"
    is_repeatable = field.metadata["repeatable"]
    define = absl_flags.DEFINE_multi_string if is_repeatable else _DEFINE[plain_type]
    try:
        define(field.name, None, text, flag_values=flags)
    except absl_flags.DuplicateFlagError as error:
        raise UserError(
            f"--{field.name} is already a flag of this command: rename this config field"
        ) from error


def _read(
    flags: absl_flags.FlagValues, argv: Sequence[str], known_only: bool = False
) -> Sequence[str]:
    try:
        return flags(list(argv), known_only=known_only)
    except (absl_flags.Error, ValueError) as error:  # --noflag=value raises ValueError.
        raise UserError(f"{first_line(error)} (see --help)") from error


def _given(flags: absl_flags.FlagValues, fields: Sequence[dataclasses.Field]) -> dict[str, Any]:
    given = {}
    for field in fields:
        value = flags[field.name].value
        if field.metadata["repeatable"] and value is not None:
            value = " ".join(value)
        if field.metadata["required"] and not value:
            raise UserError(f"--{field.name} is missing: {field.metadata['help']} (see --help)")
        if value is not None:
            # The shell does not expand ~ in --flag=~/path.
            given[field.name] = os.path.expanduser(value) if field.metadata["is_path"] else value
    return given


def _help_text(usage: str, flags: absl_flags.FlagValues) -> str:
    lines = [usage.strip(), ""]
    for name in flags:
        flag = flags[name]
        lines += [f"  --{'[no]' if flag.boolean else ''}{name}", f"      {flag.help}"]
    return "\n".join(lines)


def versions() -> str:
    """Return the versions of this project and of the installed libraries, one per line."""
    lines = [f"lm {lm.__version__}"]
    for library in ("tensorflow", "tensorflow-cpu", "horovod", "numpy", "torch", "jax"):
        if version := package_version(library):
            lines.append(f"{library} {version}")
    return "\n".join(lines)
