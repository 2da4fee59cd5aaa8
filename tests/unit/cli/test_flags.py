"""The command line: flags from option classes, and the flags that all commands share."""

import dataclasses

import pytest

import lm
from lm import train
from lm.benchmark.__main__ import run as run_benchmark
from lm.cli.parser import RunChoice, field_help, parse
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.errors import InfoRequested, UserError
from lm.inference.sampling import Sampling
from lm.options import Checked, option
from lm.record import CorpusRecord, RunRecord
from tests.commands import parse_flags, run_module


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    input: str = option("", "the file to read", required=True, is_path=True)
    text: str | None = option(None, "some text")
    lines: int = option(3, "number of lines", low=1)
    fast: bool = option(False, "skip the checks")


def test_flags_set_the_fields_of_several_option_classes():
    arguments = parse(["x", "--input", "a", "--lines=7", "--top_k", "2"], "", Options, Sampling)
    assert arguments[Options] == Options(input="a", lines=7)
    assert arguments[Sampling].top_k == 2
    assert arguments.given[Sampling] == {"top_k": 2}


def test_home_directory_is_expanded_only_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    options = parse(["x", "--input=~/a", "--text=~/b"], "", Options)[Options]
    assert (options.input, options.text) == ("/home/me/a", "~/b")


def test_positional_arguments_and_missing_flags_are_errors():
    argv = ["x", "a", "--input", "b", "c"]
    assert parse(argv, "", Options, positional=True).positional == ["a", "c"]
    with pytest.raises(UserError, match="'a' is not a flag: write --flag value"):
        parse(argv, "", Options)
    with pytest.raises(UserError, match="'false' is not a flag: write --flag or --noflag"):
        parse(["x", "--input", "b", "--nohelp", "false"], "", Options)
    with pytest.raises(UserError, match=r"^--run is missing: directory of the run"):
        parse(["x", "--run="], "", RunChoice)


def test_choices_are_appended_to_a_help_text_that_does_not_name_them():
    fields = Config.__dataclass_fields__
    assert field_help(fields["optimizer"]).endswith(" adagrad or rmsprop")
    assert field_help(fields["token_dtype"]).endswith(
        " (one of: uint8, uint16, int32, uint32, int64)"
    )


def test_windows_line_ends_of_a_script_are_an_error_with_a_fix():
    with pytest.raises(
        UserError, match=r"^'a.txt\\r' ends in a carriage return.* sed -i 's/\\r\$//' FILE$"
    ):
        parse(["x", "--input", "a.txt\r"], "", Options)


def test_version_lists_the_project_and_its_libraries():
    expected = rf"^lm {lm.__version__}\n(.*\n)*numpy \d"
    with pytest.raises(InfoRequested, match=expected):
        parse(["x", "--version"], "", Options)
    with pytest.raises(InfoRequested, match=expected):
        run_benchmark(["lm.benchmark", "--version"])


def test_print_config_shows_the_source_of_each_value():
    argv = ["lm.train", "--config", "config_medium", "--seed", "7", "--noeval", "--print_config"]
    with pytest.raises(InfoRequested) as printed:
        parse_flags(argv)
    rows = [line.strip("| ").split() for line in str(printed.value).splitlines()]
    found = {row[0]: (row[2], " ".join(row[4:])) for row in rows}
    assert found["hidden_size"] == ("650", "config file")
    assert found["seed"] == ("7", "command line")
    assert found["forget_bias"] == ("0.0", "default")
    assert found["eval"] == ("False", "command line")
    assert found["max_steps"] == ("None", "default")


def test_print_config_of_a_resumed_run_shows_its_config(tmp_path):
    config = dataclasses.asdict(Config(name="mine", hidden_size=12))
    corpus = CorpusRecord("text", "/data", "0" * 64)
    RunRecord(config, "0" * 64, corpus).write(str(tmp_path), has_checkpoints=True)
    flags = ("--resume", "--output_dir", tmp_path, "--num_epochs", 7, "--print_config")
    result = run_module("lm.train", *flags)
    rows = [" ".join(line.strip("| ").split()) for line in result.stdout.splitlines()]
    assert {"hidden_size | 12 | run", "num_epochs | 7 | command line"} <= {*rows}


def test_a_flag_that_the_config_ignores_is_rejected(tmp_path):
    recorded = dataclasses.asdict(Config(num_steps_total=99, momentum=0.7))
    record = RunRecord(recorded, "0" * 64, CorpusRecord("text", "/data", "0" * 64))
    record.write(str(tmp_path), has_checkpoints=True)
    resume = ["--resume", f"--output_dir={tmp_path}"]
    for flags, message in (
        (["--momentum=0.5"], "momentum has no effect with optimizer sgd"),
        (
            [*resume, "--num_epochs=7"],
            "num_epochs has no effect with num_steps_total 99: set num_steps_total to 0",
        ),
    ):
        arguments = train._parse(["lm.train", *flags])
        with pytest.raises(UserError, match=message):
            train._train(arguments, Communicator(), None)
