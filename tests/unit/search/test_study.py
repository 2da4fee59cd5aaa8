"""A search directory: what is checked, kept and resumed, and its best config."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil

import optuna
import pytest

from lm.config_file import load_config_file
from lm.errors import RunError, UserError
from lm.search.results import best_command, write_best
from lm.search.settings import SearchOptions, Settings, load_settings, parse_search
from lm.search.study import Search, load_study, open_search
from tests.unit.search.searches import COMPLETE, starts, states, trials

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--config="], "config"),
        (["--config=config_small", "--data_url=/none.tgz", "--data_path=/none"], "/none"),
        (["--learning_rate=3"], "--learning_rate is in --space too"),
        (["--adam_beta1=0"], "adam_beta1 has no effect"),
        (["--space=lr_plateau_factor=0.2|0.3"], "lr_plateau_factor has no effect"),
    ],
)
def test_invalid_input_creates_nothing(search, flags, error):
    with pytest.raises(UserError, match=error):
        search(*flags)
    assert not search.directory.exists()


def test_a_search_in_a_run_is_rejected(search, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/run.json").write_text("{}")
    for place in (tmp_path / "run", tmp_path / "run/checkpoints"):
        with pytest.raises(UserError, match=r"output_dir .* is a run, or inside a run: choose"):
            search(f"--output_dir={place}")
        assert not (place / "search.json").exists()


def test_a_resumed_search_keeps_its_settings(search, corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address, corpus = "https://host/a.tgz", os.path.relpath(corpora)
    flags = [
        "--max_grad_norm=inf", "--warmup_steps=3", f"--data_path={corpus}", "--init_from=a",
        f"--data_url={address}", "--tie_weights", "--notensorboard",
        "--init_rename=attn/key=self/key", "--on_event=send --api_key SECRET",
    ]  # fmt: skip
    for _ in range(2):
        assert states(search(*flags)) == [COMPLETE] * 3
    assert starts(search, 0) == ["start"]
    files = [path for path in search.directory.rglob("*") if path.is_file()]
    assert not any(b"SECRET" in path.read_bytes() for path in files)
    kept = load_settings(str(search.directory)).flags
    paths = {"data_path": str(corpora), "init_from": str(tmp_path / "a"), "data_url": address}
    assert {**paths, "tie_weights": True, "tensorboard": False}.items() <= kept.items()
    assert kept["init_rename"] == "attn/key=self/key"  # is not a secret
    search("--trials=2", "--intra_op_threads=1")
    assert load_settings(str(search.directory)).flags["trials"] == 2  # for the next --resume
    for flag, before in {
        "warmup_steps=4": "3", "init_from=/b": f"'{tmp_path}/a'", "init_partly": "None",
        "space=seed=1|2": "'learning_rate=1.2.4'",
    }.items():  # fmt: skip
        message = f"cannot resume: {flag.partition('=')[0]} was {before}"
        with pytest.raises(UserError, match=message):
            search(f"--{flag}")
    with pytest.raises(UserError, match=r"config_transformer.py differs from the config file"):
        search("--config=config_transformer")


def test_an_older_search_with_a_flag_without_an_effect_is_resumed(search):
    search()
    file = search.directory / "search.json"
    settings = json.loads(file.read_text())
    settings["flags"]["momentum"] = 0.95
    file.write_text(json.dumps(settings))
    assert states(search()) == [COMPLETE] * 3


def test_a_search_is_resumed_on_the_given_hosts(search):
    for flags, hosts in ((["--hosts=node1:1"], "node1:1"), ([], None)):
        with contextlib.ExitStack() as stack:
            found = open_search(*parse_search(search.command(*flags)), stack)
        assert found.options.hosts == hosts


def test_best_finds_its_vocabulary_from_any_directory(search, corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"<eos>", *(corpora / "embedded/train.txt").read_text().split()}
    (tmp_path / "words.txt").write_text("".join(f"{word}\n" for word in sorted(words)))
    search("--vocabulary=words.txt")
    best = load_config_file(str(search.directory / "best.py")).config
    assert best.vocabulary == str(tmp_path / "words.txt")


def test_a_search_is_resumed_with_flags_that_its_config_file_defines(search):
    flags = ["--corpus=embedded", "--nomemory", "--num_heads=2", "--hidden_size=8"]
    for config in ("config_transformer", search.directory / "config.py"):
        assert states(search(f"--config={config}", *flags)) == [COMPLETE] * 3
    assert starts(search, 0) == ["start"]


def test_a_search_cannot_be_resumed_with_another_corpus(search, tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b\n" * 500)
    flags = ["--corpus=files", f"--data_path={tmp_path}"]
    for _ in range(2):
        search(*flags)
    (tmp_path / "valid.txt").write_text("a b b\n" * 500)
    with pytest.raises(UserError, match="cannot resume: the corpus is not the corpus of this"):
        search(*flags)


def test_a_restarted_search_waits_for_an_unmounted_corpus(search, tmp_path):
    data_path = tmp_path / "texts"
    data_path.mkdir()
    for split in ("train", "valid", "test"):
        (data_path / f"{split}.txt").write_text("a b\n" * 500)
    flags = ["--corpus=files", f"--data_path={data_path}"]
    search(*flags)
    data_path.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="texts does not exist"):
        search(*flags)


@pytest.mark.parametrize("number, kind", [(errno.EDQUOT, RunError), (errno.EACCES, UserError)])
def test_a_full_disk_is_not_a_user_error(search, monkeypatch, number, kind):
    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("lm.search.study.locked", fail)
    with pytest.raises(kind) as raised:
        search()
    reason = os.strerror(number)
    assert str(raised.value) == f"cannot write to output_dir {search.directory}: {reason}"


def test_an_incomplete_search_or_a_newer_version_is_one_line(search, tmp_path):
    search()
    study = (search.directory / "study.db").rename(tmp_path / "elsewhere.db")
    for read in (search, lambda: load_study(str(search.directory))):
        with pytest.raises(UserError, match=r"study.db does not exist"):
            read()
    study.rename(search.directory / "study.db")
    assert states(search()) == [COMPLETE] * 3
    path = search.directory / "search.json"
    settings = json.loads(path.read_text())
    settings["flags"]["spin"] = 1
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="'spin'"):
        search()


def test_a_study_belongs_to_one_search_at_any_path(search):
    first, second = (search.directory.with_name(f"{name}?%41#\n") for name in "ab")
    for search.directory in (first, second):
        for _ in range(2):
            assert states(search()) == [COMPLETE] * 3
        assert starts(search, 2) == ["start"]
    studies = [load_study(str(directory)).study_name for directory in (first, second)]
    assert len(set(studies)) == 2
    shutil.copy(first / "study.db", second / "study.db")
    for read in (search, lambda: load_study(str(second))):
        with pytest.raises(UserError, match=r"study.db is the study of a different search; res"):
            read()


def ask(search):
    trial = search.study.ask()
    search.config_of(trial)
    return trial


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_resumed_search_tries_the_same_values(search, sampler):
    """The search is interrupted before each trial, and after the choice of its values."""
    words = ["--space=learning_rate=1:8, keep_prob=0.5:1", f"--sampler={sampler}", "--trials=8"]

    def resume(then):
        with contextlib.ExitStack() as stack:
            found = open_search(*parse_search(search.command(*words)), stack)
            return then(found)

    def run_all(found, count=8):
        for _ in range(count):
            trial = ask(found)
            found.study.tell(trial, float(trial.number))

    resume(run_all)
    whole = [trial.params for trial in trials(load_study(str(search.directory)))]
    search.directory = search.directory.with_name("interrupted")
    for _ in range(8):
        resume(ask)
        resume(lambda found: run_all(found, 1))
    resumed = [trial.params for trial in trials(load_study(str(search.directory)))]
    assert whole == resumed and len({str(params) for params in whole}) >= 6


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_searches_with_different_seeds_try_different_values(search, sampler):
    tried = []
    for seed in (1, 2):
        search.directory = search.directory.with_name(f"seed{seed}")
        words = ["--space=learning_rate=1:8", f"--sampler={sampler}", f"--search_seed={seed}"]
        with contextlib.ExitStack() as stack:
            found = open_search(*parse_search(search.command(*words)), stack)
            tried.append({ask(found).params["learning_rate"] for _ in range(6)})
    assert [len(rates) for rates in tried] == [6, 6] and not tried[0] & tried[1]


@pytest.mark.parametrize(
    "space, flags, warning",
    [
        ("seed=1|2", [], "pruning keeps only the better seeds"),
        ("seed=1|2", ["--pruner=none"], None),
        ("lr_schedule=decay|linear, seed=1|2", [], "varies lr_schedule, seed: add --pruner none"),
        ("hidden_size=8|9, num_layers=1:2", ["--sampler=tpe", "--trials=5"], None),
        ("hidden_size=8|9, keep_prob=0.5:1", ["--sampler=random", "--trials=5"], None),
        ("hidden_size=8|9, num_layers=1|2", ["--trials=3"], "has 4 combinations"),
        ("hidden_size=8|9, num_layers=1|2", ["--trials=5"], None),
    ],
)
def test_a_misleading_search_has_a_warning(search, caplog, space, flags, warning):
    with contextlib.ExitStack() as stack:
        open_search(*parse_search(search.command(f"--space={space}", *flags)), stack)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == (warning is not None)
    assert warning is None or warning in messages[0]


def test_a_lost_storage_is_one_line(search):
    lost = r"cannot use the study \(.*\); the running trials are saved"
    with pytest.raises(RunError, match=lost):
        search(body="rm ../../study.db; mkdir ../../study.db")


def test_a_file_has_one_driver_at_a_time(search):
    def start_another():
        with contextlib.ExitStack() as stack, pytest.raises(RunError, match="another driver"):
            open_search(*parse_search(search.command()), stack)

    search(on_tick=start_another)


def test_a_search_that_another_driver_started_and_ended_meanwhile_is_unchanged(search):
    parsed = parse_search(search.command())
    search()
    before = (search.directory / "search.json").read_bytes()
    with contextlib.ExitStack() as stack, pytest.raises(RunError, match="with --resume"):
        open_search(*parsed, stack)
    assert (search.directory / "search.json").read_bytes() == before


@pytest.mark.parametrize("name", ["config_small", "config_transformer"])
def test_best_has_the_config_and_the_network_of_the_trial(tmp_path, name):
    file = load_config_file(name)
    config = dataclasses.asdict(dataclasses.replace(file.config, hidden_size=12))
    study = optuna.create_study()
    size = {"hidden_size": optuna.distributions.IntDistribution(8, 16)}
    trial = optuna.trial.create_trial(value=3.0, params={"hidden_size": 12}, distributions=size)
    study.add_trial(trial)
    settings = Settings("", {"data_path": "d", "max_steps": 9})
    search = Search(str(tmp_path), settings, SearchOptions(), file, file.config, {}, [], study)
    write_best(search)
    best = load_config_file(str(tmp_path / "best.py"))
    assert dataclasses.asdict(best.config) == config
    assert best.functions.by_name.keys() == file.functions.by_name.keys()
    assert dataclasses.fields(best.config)[-1].name == dataclasses.fields(file.config)[-1].name
    command = "python -m lm.train --config 'a b/best.py' --data_path=d --test_on=best"
    assert best_command("a b", settings) == command  # without --max_steps
