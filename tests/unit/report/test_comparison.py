"""Runs side by side, from hand-written metrics."""

import json

import pytest

from lm.errors import UserError
from lm.report.comparison import (
    exact_comparison,
    group_by_config,
    group_by_corpus,
    loss_difference,
    pairs_of,
)
from lm.report.metrics import read_run
from lm.report.tables import build_tables, run_title
from tests.unit.report.runs import CONFIG, write_record, write_run


def test_time_of_an_epoch_is_that_of_a_whole_one(tmp_path):
    run = write_run(tmp_path / "a", speed=250.0)
    assert run.seconds_per_epoch == pytest.approx(4.0)  # 1000 words at 250 a second
    assert run.words_per_second == pytest.approx(250)


def test_runs_of_other_networks_are_not_of_one_config(tmp_path):
    runs = [
        write_run(tmp_path / f"{number}", losses=[(1, 6.5)], network=network)
        for number, network in enumerate("aab")
    ]
    first, second = group_by_config(runs)
    assert (first.label, second.label) == (
        f"small (config_file={'a' * 12})", f"small (config_file={'b' * 12})",
    )  # fmt: skip
    assert list(pairs_of([first, second])) == [(runs[0], runs[1])]


def test_a_running_run_is_shown_as_far_as_it_is(tmp_path):
    run = write_run(tmp_path / "a", losses=[(1, 6.5)], test=None, tail='{"event": "ep')
    assert run.last("test", "test_perplexity") is None
    (tmp_path / "a/metrics.jsonl").write_text("")
    empty = read_run(str(tmp_path / "a"))
    assert empty.seconds_per_epoch is None and empty.last("epoch", "valid_perplexity") is None
    assert build_tables(group_by_config([empty]))[1].rows[0][4:] == ["-"] * 7


def test_what_a_resumed_run_tells_last_counts(tmp_path):
    losses = [(1, 6.0), (2, 5.0), (2, 5.5), (3, 4.0)]
    steps = [event for event in write_run(tmp_path / "a", losses=losses).events if "loss" in event]
    assert [(event["step"], event["loss"]) for event in steps] == [(1, 6.0), (2, 5.5), (3, 4.0)]


def test_a_field_that_an_older_version_did_not_know_means_its_default(tmp_path):
    older = write_run(tmp_path / "older", losses=[(1, 6.0)])
    same = write_run(tmp_path / "same", losses=[(1, 6.0)], config={**CONFIG, "momentum": 0.9})
    other = write_run(tmp_path / "other", losses=[(1, 6.0)], config={**CONFIG, "momentum": 0.5})
    labels = [group.label for group in group_by_config([older, same, other])]
    assert labels == ["small (momentum=0.9)", "small (momentum=0.5)"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("metrics.jsonl", None, "is not a run: .*metrics.jsonl: No such file"),
        ("run.json", None, "is not a run: it has no run.json"),
        ("metrics.jsonl", "{\n", "damaged"),
        ("metrics.jsonl", '{"event": "epoch"}\n', "damaged"),
        ("metrics.jsonl", "[]\n", "damaged"),
        ("run.json", "[1]", "it must be a JSON object"),
    ],
)
def test_what_is_not_a_run_is_an_error(tmp_path, name, content, message):
    write_run(tmp_path / "a")
    if content is None:
        (tmp_path / "a" / name).unlink()
    else:
        (tmp_path / "a" / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_run(str(tmp_path / "a"))


def test_the_published_table_and_the_speed_up(tmp_path):
    runs = [write_run(tmp_path / "two", ranks=2, speed=150.0), write_run(tmp_path / "one")]
    results, each, *_ = build_tables(group_by_config(runs))
    assert results.header[:5] == ["config", "epochs", "train", "valid", "test"]
    assert results.header[5:] == ["time/epoch, 2 ranks", "time/epoch, 1 rank"]
    assert results.rows == [["small", "2", "90.00", "80.50", "50.00", "6.7", "10.0"]]
    assert [row[2] for row in each.rows] == ["1", "2"]
    assert [row[-2:] for row in each.rows] == [["1.00", "100%"], ["1.50", "75%"]]


def test_a_run_that_was_resumed_on_other_ranks_is_timed_by_the_last(tmp_path):
    alone, partly, both = (
        {"event": "epoch", "epoch": epoch, "epoch_seconds": 10.0, "words_per_second": speed,
         "world_size": ranks}
        for epoch, ranks, speed in [(1, 1, 100.0), (2, 2, 110.0), (3, 2, 150.0)]
    )  # fmt: skip
    starts = [
        {"event": "start", "world_size": ranks, "steps_per_epoch": 10, "resumed_from_step": step}
        for ranks, step in [(1, 0), (2, 19)]
    ]
    run = write_run(tmp_path / "a")
    lines = map(json.dumps, [starts[0], alone, starts[1], partly, both])
    (tmp_path / "a/metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(str(tmp_path / "a"))
    assert run.words_per_second == 150 and run_title(run).endswith("/a (1 rank, then 2 ranks)")
    (row,) = build_tables(group_by_config([run]))[1].rows
    assert row[2] == "1, then 2" and row[7:] == ["6.7", "150", "-", "-"]


def test_a_run_that_was_resumed_on_other_ranks_for_its_test_alone_keeps_its_times(tmp_path):
    write_run(tmp_path / "a", ranks=2, test=None)
    path = tmp_path / "a/metrics.jsonl"
    start = {"event": "start", "world_size": 1, "steps_per_epoch": 10, "resumed_from_step": 15}
    test = {"event": "test", "test_perplexity": 50.0}
    path.write_text(path.read_text() + "\n".join(map(json.dumps, [start, test])) + "\n")
    run = read_run(str(tmp_path / "a"))
    assert run.num_ranks == 2 and run.words_per_second == 100


def test_perplexities_are_of_the_epoch_that_was_tested(tmp_path):
    write_run(tmp_path / "a", test=None)
    path = tmp_path / "a/metrics.jsonl"
    worse = {"event": "epoch", "epoch": 3, "train_perplexity": 1.0, "valid_perplexity": 99.0,
             "words_per_second": 1.0, "epoch_seconds": 1.0}  # fmt: skip
    told = path.read_text()
    best = {"event": "test", "test_perplexity": 50.0, "test_on": "best"}
    path.write_text(json.dumps(best) + "\n")  # of a run whose other events are lost
    assert read_run(str(tmp_path / "a")).tested_epoch == {}
    path.write_text(told)
    for test_on, expected in {"best": ["90.00", "80.50"], "last": ["1.00", "99.00"]}.items():
        test = {"event": "test", "step": 30, "test_perplexity": 50.0, "test_on": test_on}
        path.write_text(path.read_text() + "\n".join(map(json.dumps, [worse, test])) + "\n")
        (row,) = build_tables(group_by_config([read_run(str(tmp_path / "a"))]))[0].rows
        assert row[2:5] == [*expected, "50.00"]


def test_without_a_run_of_one_rank_there_is_no_speed_up(tmp_path):
    tables = build_tables(group_by_config([write_run(tmp_path / "a", ranks=2)]))
    assert tables[1].rows[0][-2:] == ["-", "-"]
    assert len(tables) == 2  # nothing to compare the loss curve with


def test_configs_of_one_name_are_told_apart_by_what_differs(tmp_path):
    other = {**CONFIG, "batch_size": 40, "seed": 2}
    groups = group_by_config([write_run(tmp_path / "a"), write_run(tmp_path / "b", config=other)])
    labels = [group.label for group in groups]
    assert labels == ["small (batch_size=20, seed=1)", "small (batch_size=40, seed=2)"]


def test_the_largest_difference_of_loss_curves(tmp_path):
    one = write_run(tmp_path / "a", losses=[(1, 6.0), (2, 5.0), (3, 2.0), (4, None), (9, 1.0)])
    two = write_run(
        tmp_path / "b", ranks=2, losses=[(1, 6.0), (2, 5.5), (3, 2.3), (4, 1.0), (5, 1.0), (9, 7.0)]
    )
    difference = loss_difference(one, two)
    assert (
        difference.num_points == 3
    )  # an infinite loss is null; that of step 9 is a mean over other steps
    assert difference.absolute == pytest.approx(0.5)
    assert difference.relative == pytest.approx(0.15) and difference.step == 3
    assert build_tables(group_by_config([one, two]))[2].rows[0][2:] == [
        "3", "5.00e-01", "1.50e-01", "3",
    ]  # fmt: skip


def events_to(last, every=2):
    """Return the events of a run that ends after a step, with epochs of 6 steps.

    As older versions wrote them: epochs and tests do not know their step.
    """
    events = []
    for step in range(every, last + 1, every):
        numbers = {"loss": 6 / step, "gradient_norm": step / 3, "learning_rate": 1.0}
        events.append({"event": "step", "step": step, "epoch": -(-step // 6), **numbers})
        if step % 6 == 0 or step == last:
            numbers = {"train_perplexity": 90 / step, "valid_perplexity": 80 / step}
            events.append({"event": "epoch", "epoch": -(-step // 6), **numbers})
    return [*events, {"event": "test", "test_perplexity": 70 / last}]


def compare(tmp_path, *runs):
    """Write two runs of such events; return how they compare."""
    for name, events in zip("ab", runs):
        (tmp_path / name).mkdir()
        write_record(tmp_path / name)
        lines = [json.dumps({**event, "words_per_second": id(event)}) + "\n" for event in events]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    return exact_comparison(read_run(str(tmp_path / "a")), read_run(str(tmp_path / "b")))


def test_equal_runs_are_equal_bit_for_bit_however_often_one_was_resumed(tmp_path):
    killed = [{**event, "loss": 0.0} for event in events_to(12)[2:5]]  # told again after it
    start = {"event": "start", "world_size": 2}
    resumed = [start, *events_to(12)[:2], *killed, start, *events_to(12)[2:]]
    assert compare(tmp_path, events_to(12), resumed) == "equal, bit for bit, in 9 events"


@pytest.mark.parametrize(
    "index, field, value, said",
    [
        (0, "loss", 3.0000000000000004,
         "the first difference, in event 1 of 9, is loss of step 2: 3.0 and 3.0000000000000004"),
        (4, "gradient_norm", None, "event 5 of 9, is gradient_norm of step 8: "),
        (5, "learning_rate", 0.5, "event 6 of 9, is learning_rate of step 10: "),
        (7, "valid_perplexity", 9, "event 8 of 9, is valid_perplexity of epoch 2: "),
        (8, "test_perplexity", 9, "event 9 of 9, is test_perplexity of the test: "),
    ],
)  # fmt: skip
def test_the_first_number_that_differs_is_named(tmp_path, index, field, value, said):
    other = events_to(12)
    for later in other[index:]:
        later[field] = value
    assert said in compare(tmp_path, events_to(12), other)


def test_tests_of_other_weights_are_not_compared(tmp_path):
    other = events_to(12)
    other[-1].update(test_on="best", test_perplexity=1.0)
    assert compare(tmp_path, events_to(12), other).startswith("equal, bit for bit, in 8 events")


def test_only_what_both_runs_have_is_compared(tmp_path):
    # The second epoch and the test of the one that was stopped are of fewer steps.
    said = compare(tmp_path, events_to(8), events_to(12))
    assert said == "equal, bit for bit, in 5 events (the first has 7, the second 9)"


def test_a_run_without_validation_is_compared_in_the_rest(tmp_path):
    unvalidated = [
        {name: value for name, value in event.items() if name != "valid_perplexity"}
        for event in events_to(12)
    ]
    said = compare(tmp_path, events_to(12), unvalidated)
    assert said == "equal, bit for bit, in 9 events"


def test_epochs_of_other_steps_are_told_apart_though_none_of_them_was_logged(tmp_path):
    step = {"event": "step", "step": 4, "epoch": 1, "loss": 6.0}
    epoch = {"event": "epoch", "epoch": 1, "train_perplexity": 90.0}
    whole = [step, {**epoch, "step": 6}, {"event": "step", "step": 8, "epoch": 2, "loss": 5.0}]
    cut = [step, {**epoch, "step": 5, "train_perplexity": 91.0}]
    said = compare(tmp_path, whole, cut)
    assert said == "equal, bit for bit, in 1 event (the first has 3, the second 2)"


def test_numbers_of_other_steps_are_not_compared(tmp_path):
    assert "nothing to compare" in compare(tmp_path, events_to(4), events_to(3, every=3))


def test_runs_of_the_same_steps_are_compared_if_one_has_more_epochs(tmp_path):
    changes = ({}, {"num_epochs": 3, "name": "longer"}, {"seed": 2})
    for number, change in enumerate(changes):
        write_run(tmp_path / str(number), config={**CONFIG, "num_epochs": 1, **change})
    runs = [read_run(str(tmp_path / str(number))) for number in range(3)]
    (section,) = group_by_corpus(runs)
    assert list(pairs_of(section.groups)) == [(runs[0], runs[1])]


def test_epochs_are_compared_however_often_steps_are_told(tmp_path):
    """As runs since then know the steps of their epochs and tests."""
    with_steps = [
        [{"step": 6 * event.get("epoch", 2), **event} for event in events_to(12, every)]
        for every in (2, 3)
    ]
    # Of the steps 6 alone both tell; their losses are means over other steps.
    said = compare(tmp_path, *with_steps)
    assert said == "equal, bit for bit, in 3 events (the first has 9, the second 7)"
