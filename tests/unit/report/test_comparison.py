"""Comparison of runs, from hand-written metrics."""

import dataclasses
import json

import pytest

from lm.cli.markdown import epochs_text
from lm.errors import UserError
from lm.record import InitRecord
from lm.report.comparison import (
    comparable_sets,
    compare,
    group_by_config,
    group_by_corpus,
)
from lm.report.differences import build_differences, build_identity
from lm.report.metrics import find_runs, read_run
from lm.report.tables import build_tables, build_time_table, headline, run_title
from tests.unit.report.runs import CONFIG, write_record, write_run


def append(run_dir, *events):
    """Append events to a run; return its metrics."""
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return read_run(str(run_dir))


def test_runs_are_found_three_levels_below_a_directory(tmp_path):
    names = ["a", "ab/c", "search/trials/0001"]
    for name in names:
        write_run(tmp_path / name)
    assert find_runs(str(tmp_path)) == [str(tmp_path / name) for name in names]
    assert find_runs(str(tmp_path / "a")) == [str(tmp_path / "a")]


def test_runs_with_different_networks_have_different_configs(tmp_path):
    runs = [
        write_run(tmp_path / f"{number}", losses=[(1, 6.5)], network=network)
        for number, network in enumerate("aab")
    ]
    first, second = group_by_config(runs)
    assert first.label == f"small (config_file={'a' * 12})"
    assert second.label == f"small (config_file={'b' * 12})"
    assert comparable_sets([first, second]) == [runs[:2]]


def test_configs_with_the_same_name_are_labeled_by_their_differences(tmp_path):
    other = {**CONFIG, "batch_size": 40, "seed": 2}
    groups = group_by_config([write_run(tmp_path / "a"), write_run(tmp_path / "b", config=other)])
    labels = [group.label for group in groups]
    assert labels == ["small (batch_size=20, seed=1)", "small (batch_size=40, seed=2)"]


def test_an_unfinished_run_is_reported_up_to_its_last_event(tmp_path):
    run = write_run(tmp_path / "a", losses=[(1, 6.5)], test=None, tail='{"event": "ep')
    assert run.test == {} and len(run.epochs) == 2
    (tmp_path / "a/metrics.jsonl").write_text("")
    empty = read_run(str(tmp_path / "a"))
    assert empty.seconds_per_epoch is None and empty.epochs == []
    table, outcomes = build_tables(group_by_config([empty]))
    assert [row[1:] for row in table.rows] == [["small", "1 rank", "0", *["-"] * 5]]
    assert [row[1:] for row in outcomes.rows] == [["running or killed", "0", "0", "-"]]


def test_each_run_has_its_outcome_and_the_longest_one_is_the_result(tmp_path):
    runs = [write_run(tmp_path / name, test=None) for name in "abc"]
    start = {"event": "start", "world_size": 4, "steps_per_epoch": 10, "exact": "no: threads"}
    stop, step = {"event": "end", "outcome": "stopped"}, {"event": "step", "step": 16, "loss": 1.0}
    failure = {"event": "end", "outcome": "failed", "reason": "the disk is full"}
    runs[1] = append(tmp_path / "b", stop, {**start, "exact": "yes: always"}, step, failure)
    runs[2] = append(tmp_path / "c", {"event": "end", "outcome": "finished"})
    (tmp_path / "d").mkdir()
    write_record(tmp_path / "d")
    runs.append(append(tmp_path / "d", start, stop))
    results, _, outcomes = build_tables(group_by_config(runs))
    assert {row[0][-1]: row[1:] for row in outcomes.rows} == {
        "a": ["running or killed", "15 of 130", "1", "-"],
        "b": ["failed: the disk is full", "16 of 130", "2", "yes"],
        "c": ["finished", "15 of 130", "1", "-"],
        "d": ["stopped", "0 of 130", "1", "no"],
    }
    assert results.rows[0][:4] == ["small", "1.50", "90.00", "80.50"]


def test_runs_with_different_seeds_have_a_mean_and_a_standard_deviation(tmp_path):
    runs = [
        write_run(tmp_path / f"{number}", config={**CONFIG, "seed": seed}, test=test)
        for number, (seed, test) in enumerate([(1, 50.0), (1, 50.0), (2, 52.0), (3, 54.0)])
    ]
    tuned = write_run(tmp_path / "tuned", config={**CONFIG, "seed": 4})
    record = dataclasses.replace(tuned.record, init_from=InitRecord("a", {"model.data": "1"}))
    runs.append(tuned._replace(record=record))
    shorter = write_run(tmp_path / "shorter", config={**CONFIG, "seed": 9}, test=None)
    runs.insert(0, shorter._replace(events=shorter.events[:1]))
    tables = build_tables(group_by_config(runs))
    (seeds,) = (table for table in tables if table.title == "Seeds")
    means = ["90.00 ± 0.00", "80.50 ± 0.00", "52.00 ± 2.00"]
    assert seeds.rows == [["small (init_from=None)", "3", "1.50", *means]]
    write_run(tmp_path / "stalled", config={**CONFIG, "seed": 5}, test=52.0)
    path = tmp_path / "stalled" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 15', '"step": 14').replace("1.5", "1.4"))
    end = {"event": "end", "outcome": "finished", "reason": "the perplexity no longer improves"}
    runs.append(append(tmp_path / "stalled", end))
    (seeds,) = (table for table in build_tables(group_by_config(runs)) if table.title == "Seeds")
    assert seeds.rows[0][1:3] == ["4", "1.40 to 1.50"]


def test_best_and_last_weights_are_not_averaged(tmp_path):
    runs = []
    for seed, place in enumerate("aabb", 1):
        write_run(tmp_path / f"{seed}", config={**CONFIG, "seed": seed}, test=None)
        best = {"event": "validation", "step": 5, "epoch": 1, "valid_perplexity": 70.0 + seed}
        test = {"event": "test", "step": 15, "test_perplexity": 50.0}
        found = [best, {**test, "test_on": "best"}] if place == "b" else [test]
        runs.append(append(tmp_path / f"{seed}", *found))
    (seeds,) = (table for table in build_tables(group_by_config(runs)) if table.title == "Seeds")
    assert [(row[0], row[1], row[4]) for row in seeds.rows] == [
        ("small", "2", "80.50 ± 0.00"), ("small, best weights", "2", "73.50 ± 0.71"),
    ]  # fmt: skip
    assert "73.00 and a test perplexity of 50.00 after 0.50 epochs, in 00:05 on" in headline(
        *group_by_corpus(runs)
    )


def test_an_epoch_on_different_numbers_of_ranks_has_no_speed(tmp_path):
    write_run(tmp_path / "a", ranks=4, test=None)
    start = {"event": "start", "world_size": 1, "steps_per_epoch": 10}
    epoch = {"event": "epoch", "step": 30, "epoch": 3, "epochs": 3.0, "epoch_seconds": 2.0,
             "tokens_per_second": 70.0, "world_size": 1}  # fmt: skip
    mixed = append(tmp_path / "a", {**start, "resumed_from_step": 25}, epoch)
    assert mixed.num_ranks == 1 and mixed.tokens_per_second is None
    later = append(tmp_path / "a", {**epoch, "step": 40, "epoch": 4, "tokens_per_second": 30.0})
    assert later.tokens_per_second == 30.0


def test_runs_with_different_seeds_may_have_different_names(tmp_path):
    configs = [
        {**CONFIG, "name": f"{name}-{seed}", "seed": seed, "batch_size": batch_size}
        for name, batch_size in (("a", 20), ("b", 40))
        for seed in (1, 2)
    ]
    runs = [write_run(tmp_path / config["name"], config=config) for config in configs]
    (seeds,) = (table for table in build_tables(group_by_config(runs)) if table.title == "Seeds")
    assert [row[:2] for row in seeds.rows] == [["a-1 to a-2", "2"], ["b-1 to b-2", "2"]]


@pytest.mark.parametrize(
    ("tokenizer", "unit"), [("characters", "character"), ("bytes", "byte"), ("words", None)]
)
def test_models_of_characters_show_their_bits_and_more_digits(tmp_path, tokenizer, unit):
    runs = [
        write_run(
            tmp_path / f"{seed}", config={**CONFIG, "seed": seed}, test=2.5, tokenizer=tokenizer,
            metrics={"valid_perplexity": 2.61 + seed / 100, f"valid_bits_per_{unit}": 1.384},
        )
        for seed in (1, 3)
    ]  # fmt: skip
    seeds, each, _ = build_tables(group_by_config(runs))
    bits = [f"valid bits/{unit}", f"test bits/{unit}"] if unit else []
    assert seeds.header == ["config", "seeds", "epochs", "train", "valid", "test", *bits]
    assert seeds.rows[0][3:6] == ["90.00 ± 0.00", "2.6300 ± 0.0141", "2.5000 ± 0.0000"]
    assert seeds.rows[0][6:] == (["1.3840 ± 0.0000", "-"] if unit else [])
    assert each.header[4:-2] == ["train", "valid", "test", *bits]
    assert each.rows[1][4:-2] == ["90.00", "2.6400", "2.5000", *(["1.3840", "-"] if unit else [])]
    assert "reaches a validation perplexity of 2.6200" in headline(*group_by_corpus(runs))


def test_the_time_to_a_perplexity_ends_at_the_first_validation_that_reaches_it(tmp_path):
    write_run(tmp_path / "a", test=None)
    best = {"event": "validation", "step": 12, "epoch": 2, "valid_perplexity": 70.0}
    run = append(tmp_path / "a", best)
    assert [run.seconds_to(perplexity) for perplexity in (80.6, 80.5, 70, 69)] == [10, 10, 12, None]
    (section,) = group_by_corpus([run])
    (row,) = build_time_table(section, [80.5, 69]).rows
    assert row[1:] == ["1 rank", "00:10", "-", "00:15"]


def test_steps_are_timed_once_although_epoch_events_contain_their_mean_again(tmp_path):
    write_run(tmp_path / "a", test=None)  # two epochs of 100 tokens per step, until step 15
    steps = [(4, 50.0), (8, 200.0), (12, 100.0)]
    events = [{"event": "step", "step": at, "tokens_per_second": v} for at, v in steps]
    run = append(tmp_path / "a", *events)
    assert [list(values) for values in run.clock()] == [[0, 4, 8, 12, 15], [0, 8, 10, 14, 17]]


def test_a_damaged_run_does_not_end_the_report_of_others(tmp_path):
    write_run(tmp_path / "a", test=None)
    run = append(tmp_path / "a", {"event": "epoch", "step": 10**29, "tokens_per_second": 100.0})
    assert run.seconds_to(80.5) == pytest.approx(10)
    (tmp_path / "a/checkpoints").symlink_to("checkpoints")  # a loop, which raises OSError
    assert run.checkpoint_steps == []


def test_a_part_of_an_epoch_is_not_a_whole(tmp_path):
    assert [epochs_text(epochs) for epochs in (0, 1e-5, 0.29, 2194 / 2195, 1, 1.999, 13.0)] == [
        "0", "0.01", "0.29", "0.99", "1", "1.99", "13",
    ]  # fmt: skip
    run = write_run(tmp_path / "a")
    assert [epoch["epochs"] for epoch in run.epochs] == [1, 1.5]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("metrics.jsonl", None, "is not a run: .*metrics.jsonl: No such file"),
        ("run.json", '{"vocabulary": %s}' % ("[" * 99 + "]" * 99), "corrupt: it has too many"),
        (
            "run.json",
            '{"config": {"num_steps": "5"}, "vocabulary": "v", "corpus": '
            '{"kind": "text", "path": "/", "sha256": "c"}}',
            "corrupt: num_steps is a str",
        ),
    ],
)
def test_a_directory_without_a_valid_run_is_one_line(tmp_path, name, content, message):
    write_run(tmp_path / "a")
    if content is None:
        (tmp_path / "a" / name).unlink()
    else:
        (tmp_path / "a" / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_run(str(tmp_path / "a"))


def test_results_have_the_published_format_and_runs_have_a_speedup(tmp_path):
    runs = [write_run(tmp_path / "two", ranks=2, speed=150.0), write_run(tmp_path / "one")]
    results, each, _ = build_tables(group_by_config(runs))
    assert results.header[:5] == ["config", "epochs", "train", "valid", "test"]
    assert results.header[5:] == ["time/epoch, 2 ranks", "time/epoch, 1 rank"]
    assert results.rows == [["small", "1.50", "90.00", "80.50", "50.00", "6.7", "10.0"]]
    assert [row[2] for row in each.rows] == ["1 rank", "2 ranks"]
    assert [row[-2:] for row in each.rows] == [["1.00", "100%"], ["1.50", "75%"]]


def test_a_single_run_has_one_table_without_comparisons(tmp_path):
    run = write_run(tmp_path / "a", ranks=2, speed=250.0)
    table, _ = build_tables(group_by_config([run]))
    # The time is for a full epoch: 1000 tokens at 250 tokens/s.
    cells = ["small", "2 ranks", "1.50", "90.00", "80.50", "50.00", "4.0", "250"]
    assert [row[1:] for row in table.rows] == [cells] and "speedup" not in table.header
    two = [write_run(tmp_path / name, ranks=2) for name in "bc"]
    assert "speedup" not in build_tables(group_by_config(two))[1].header  # no run on one rank


def test_a_run_on_changing_ranks_is_timed_by_its_epochs_on_the_last_number(tmp_path):
    write_run(tmp_path / "a")
    alone, both = (
        {"event": "epoch", "step": 10 * epoch, "epoch": epoch, "epochs": epoch,
         "epoch_seconds": 10.0, "tokens_per_second": speed, "world_size": ranks}
        for epoch, ranks, speed in [(1, 1, 100.0), (2, 2, 150.0)]
    )  # fmt: skip
    starts = [
        {"event": "start", "world_size": ranks, "steps_per_epoch": 10, "resumed_from_step": step}
        for ranks, step in [(1, 0), (2, 10), (1, 20)]
    ]
    (tmp_path / "a/metrics.jsonl").write_text("")
    run = append(tmp_path / "a", starts[0], alone, starts[1], both, {"event": "end"})
    assert run.tokens_per_second == 150
    assert run_title(run).endswith("/a (1 to 2 ranks, 2 starts)")
    # A later start on a different number of ranks, only for the test, does not change the times.
    run = append(tmp_path / "a", starts[2], {"event": "test", "step": 20, "test_perplexity": 5})
    assert (run.num_ranks, run.tokens_per_second) == (2, 150)
    assert run.ranks_text == "1 to 2 ranks, 3 starts"


def test_perplexities_belong_to_the_tested_epoch(tmp_path):
    write_run(tmp_path / "a", test=None)
    worse = {"event": "epoch", "step": 30, "epoch": 3, "epochs": 3.0, "train_perplexity": 1.0,
             "valid_perplexity": 99.0, "tokens_per_second": 1.0, "epoch_seconds": 1.0}  # fmt: skip
    append(tmp_path / "a", worse)
    for test_on, expected in {"best": ["90.00", "80.50"], "last": ["1.0000", "99.00"]}.items():
        test = {"event": "test", "step": 30, "test_perplexity": 50.0, "test_on": test_on}
        run = append(tmp_path / "a", test)
        assert build_tables(group_by_config([run]))[0].rows[0][4:7] == [*expected, "50.00"]
    best = {"event": "validation", "step": 25, "epoch": 3, "valid_perplexity": 70.0}
    run = append(tmp_path / "a", best, {**test, "test_on": "best"})
    assert build_tables(group_by_config([run]))[0].rows[0][4:7] == ["-", "70.00", "50.00"]
    (tmp_path / "a/metrics.jsonl").write_text("")
    assert append(tmp_path / "a", {**test, "test_on": "best"}).tested_epoch == {}


def events_to(last, every=2):
    """Return the events of a run that ends after a step, with epochs of 6 steps."""
    events = []
    for step in range(1, last + 1):
        epoch = -(-step // 6)
        numbers = {"loss": 6 / step, "gradient_norm": step / 3, "learning_rate": 1.0}
        if step % every == 0:
            events.append({"event": "step", "step": step, "epoch": epoch, **numbers})
        if step % 6 == 0 or step == last:
            numbers = {"train_perplexity": 90 / step, "valid_perplexity": 80 / step}
            place = {"step": step, "epoch": epoch, "epochs": step / 6}
            events.append({"event": "epoch", **place, **numbers})
    return [*events, {"event": "test", "step": last, "test_perplexity": 70 / last}]


def compare_events(tmp_path, *runs):
    """Write two runs with these events and compare them."""
    for name, events in zip("ab", runs):
        (tmp_path / name).mkdir()
        write_record(tmp_path / name)
        times = {"tokens_per_second": id(events), "epoch_seconds": 1.0}
        append(tmp_path / name, *({**event, **times} for event in events))
    return compare(read_run(str(tmp_path / "a")), read_run(str(tmp_path / "b")))


def test_many_runs_are_identical_in_a_sentence_and_differ_in_a_matrix(tmp_path):
    losses = {"a": 6.5, "b": 6.5, "c": 6.5, "d": 6.25, "e": 6.0}
    runs = {name: write_run(tmp_path / name, losses=[(1, loss)]) for name, loss in losses.items()}
    (sentence,), (matrix,) = build_identity(group_by_config(list(runs.values())))
    names = [f"{tmp_path}/{name} (1 rank)" for name in "abc"]
    assert sentence == f"{names[0]}, {names[1]} and {names[2]}: bitwise identical in 4 events"
    assert matrix.header == ["run", *(f"{tmp_path}/{name}" for name in "ade")]
    assert [row.count("-") for row in matrix.rows] == [1, 1, 1]
    assert matrix.rows[1][1].endswith("in 4 events is loss of step 1: 6.5 and 6.25")
    (sentence,), matrices = build_identity(group_by_config([runs["a"], runs["d"]]))
    assert "is loss of step 1: 6.5 and 6.25" in sentence and not matrices


def test_values_that_differ_are_divided_from_common_values():
    """A value that is the same on all ranks is shown once. Unknown names are shown too."""
    facts = {"a": {"new": 1, "hosts": ["h", "h"]}, "b": {"new": 2, "hosts": ["h"]}}
    different, common = build_differences("Machines", facts)
    assert [list(different.header), *map(list, different.rows)] == [
        ["", "new"],
        ["a", "1"],
        ["b", "2"],
    ]
    assert common.rows == [["hosts", "h"]]
    assert build_differences("Machines", {"a": facts["a"]})[0] is None


def without(events, field):
    return [{name: v for name, v in event.items() if name != field} for event in events]


@pytest.mark.parametrize(
    "other, text",
    [
        ([{"event": "start", "world_size": 2}, *events_to(12)], "bitwise identical in 9 events"),
        (without(events_to(12), "valid_perplexity"), "bitwise identical in 9 events"),
        # The second epoch and the test of the shorter run have fewer steps.
        (events_to(8), "bitwise identical in 5 events (the runs have 9 and 7)"),
        # Losses are means over the steps since the previous event. Only epochs are comparable.
        (events_to(12, 3), "bitwise identical in 3 events (the runs have 9 and 7)"),
        (
            [*events_to(12)[:-1], {"event": "test", "step": 12, "test_on": "best"}],
            "bitwise identical in 8 events (the runs have 9 and 9)",
        ),
        (events_to(3, 3), "not comparable, because they have no event with the same steps"),
    ],
)
def test_only_events_with_the_same_steps_are_compared(tmp_path, other, text):
    assert compare_events(tmp_path, events_to(12), other) == text


@pytest.mark.parametrize(
    "index, field, value, text",
    [
        (0, "loss", 3.0000000000000004,
         "the first difference in 9 events is loss of step 2: 3.0 and 3.0000000000000004"),
        (4, "gradient_norm", 0.5, "in 9 events is gradient_norm of step 8: "),
        (5, "learning_rate", 0.5, "in 9 events is learning_rate of step 10: "),
        (7, "valid_perplexity", 9, "in 9 events is valid_perplexity of epoch 2: "),
        (8, "test_perplexity", 9, "in 9 events is test_perplexity of the test: "),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(tmp_path, index, field, value, text):
    other = events_to(12)
    for later in other[index:]:
        later[field] = value
    assert text in compare_events(tmp_path, events_to(12), other)


def test_different_results_are_explained_by_the_facts_that_differ(tmp_path):
    def run(name, loss, numpy):
        directory = tmp_path / name
        directory.mkdir()
        write_record(directory)
        provenance = {"numpy": numpy, "version": "1"}
        start = {"event": "start", "world_size": 2, "provenance": provenance}
        return append(directory, start, {"event": "step", "step": 1, "loss": loss})

    first = run("a", 3.0, "2.0")
    _, tables = build_identity(group_by_config([first, run("b", 4.0, "2.4")]))
    (table,) = tables
    assert [list(row) for row in table.rows] == [[first.name, "2.0"], [str(tmp_path / "b"), "2.4"]]
    _, tables = build_identity(group_by_config([first, run("c", 3.0, "2.4")]))
    assert tables == []


def test_runs_with_the_same_steps_are_compared_even_if_one_has_more_epochs(tmp_path):
    cosine = {"lr_schedule": "cosine"}  # the learning rates depend on num_epochs
    longer = {"num_epochs": 3, "name": "longer"}
    changes = ({}, longer, {"seed": 2}, cosine, {**cosine, **longer})
    runs = [
        write_run(tmp_path / str(number), config={**CONFIG, "num_epochs": 1, **change})
        for number, change in enumerate(changes)
    ]
    (section,) = group_by_corpus(runs)
    assert comparable_sets(section.groups) == [runs[:2]]
