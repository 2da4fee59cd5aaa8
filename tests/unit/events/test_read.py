"""Damaged events and records are reported in one line; they never stop a resume or a report."""

import json
import os
import tracemalloc

import hypothesis
import pytest
from hypothesis import strategies as st

from lm.errors import ProgramExit, UserError
from lm.events.read import drop_events_after, iterate_events, read_events
from lm.events.reporter import Reporter
from lm.report.comparison import group_by_corpus
from lm.report.differences import section_text
from lm.report.metrics import read_run
from tests.unit.report.runs import write_run

START = {"event": "start", "world_size": 1}
STEP = {"event": "step", "step": 5, "loss": 1.5}
EPOCH = {
    "event": "epoch", "step": 4, "epoch": 1, "epochs": 1.0, "epoch_seconds": 2.5,
    "tokens_per_second": 8,
}  # fmt: skip


def lines_of(*events):
    return "".join(json.dumps(event) + "\n" for event in events)


def test_events_that_will_be_repeated_and_incomplete_lines_are_removed(tmp_path):
    """The checkpoint of step 5 was written before the validation of this step."""
    kept = lines_of(START, {"event": "validation", "step": 3}, STEP, EPOCH, {"event": "later kind"})
    dropped = lines_of(
        {"event": "validation", "step": 5}, {**EPOCH, "epoch": 2, "step": 5}, {**STEP, "step": 6},
        {"event": "test", "step": 5}, {"event": "end", "outcome": "stopped"},
    )  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text(kept + dropped + '{"event": "step", "step": 2}')
    drop_events_after(str(tmp_path), 5, 1, 3)
    assert path.read_text() == kept  # ready for the next event
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_resume_does_not_keep_the_parsed_events_of_a_long_run_in_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of(*({**EPOCH, "step": step} for step in range(4000))))
    tracemalloc.start()
    try:
        drop_events_after(str(tmp_path), 5, 1, 3)
        assert tracemalloc.get_traced_memory()[1] < 3 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_steps_can_be_skipped_without_parsing_them(tmp_path):
    with Reporter(str(tmp_path)) as reporter:
        reporter.event("step", step=5)
        reporter.event("validation", step=5)
    path, damaged = tmp_path / "metrics.jsonl", {}
    path.write_text(path.read_text() + '{"event": "step", damaged\n{\n')
    events = iterate_events(str(tmp_path), damaged, with_steps=False)
    assert [event["event"] for event in events] == ["validation", "end"] and damaged.keys() == {5}


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "Expecting property name"),
        ("\0" * 9, "Expecting value"),
        ("[]", "it must be a JSON object"),
        ('{"step": 5}', "event is missing"),
        ('{"event": ["step"]}', "event is ['step']"),
        ('{"event": "epoch", "step": 5}', "epoch is missing"),
        ('{"event": "step", "step": "5"}', "step is '5'"),
        ('{"event": "step", "step": true}', "step is True"),
        ('{"event": "start", "world_size": 0}', "world_size is 0"),
        ('{"event": "step", "step": 5, "loss": 1e999}', "loss is inf"),
        ('{"event": "step", "step": 5, "loss": [1]}', "loss is [1]"),
        ('{"event": "step", "step": 1%s}' % ("0" * 400), "a number has too many digits"),
        ('{"event": %s}' % ("[" * 99999), "it has too many levels"),
        (json.dumps({**START, "x": json.loads("[" * 30 + "]" * 30)}), "it has too many levels"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_reported_and_kept_aside(tmp_path, caplog, line, reason):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of(START) + line + "\n" + lines_of(STEP))
    events, damage = read_events(str(tmp_path))
    assert events == [START, STEP]
    assert (
        damage.startswith(f"{path} has 1 damaged line, the first is line 2 (") and reason in damage
    )
    drop_events_after(str(tmp_path), 5, 0, 0)
    aside = tmp_path / "metrics.damaged.jsonl"
    assert path.read_text() == lines_of(START, STEP) and aside.read_text() == line + "\n"
    assert caplog.text.count("\n") == 1 and f"moved them to {aside}" in caplog.text
    assert read_events(str(tmp_path))[1] is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.damaged.jsonl"])
def test_damaged_lines_are_not_moved_through_a_link(tmp_path, name):
    """Otherwise, a run of another user could copy a private file, or append to a program."""
    (tmp_path / "metrics.jsonl").write_text("echo theirs\n")
    (tmp_path / "victim").write_text("mine\n")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("victim")
    with pytest.raises((UserError, OSError), match="is a link; replace it by its target"):
        drop_events_after(str(tmp_path), 5, 0, 0)
    assert (tmp_path / "victim").read_text() == "mine\n"
    assert {path.name for path in tmp_path.iterdir()} <= {"victim", "metrics.jsonl", name}


def test_a_file_that_would_block_is_a_one_line_error(tmp_path):
    write_run(tmp_path / "a")
    for name, message in {"metrics.jsonl": "is not a run: ", "run.json": "cannot read "}.items():
        (tmp_path / "a" / name).unlink()
        os.mkfifo(tmp_path / "a" / name)
        with pytest.raises(ProgramExit, match=f"{message}.*{name}: not a regular file"):
            read_run(str(tmp_path / "a"))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4)
    | st.integers(-(10**9), 10**9) | st.sampled_from([10**29, 10**400, -1, 0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
)  # fmt: skip


def mutate(data, value):
    """Replace, remove or add one value anywhere in a JSON value."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 5)):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(keys))
        changed = value.copy()
        if data.draw(st.integers(0, 4)):
            changed[key] = mutate(data, value[key])
        else:
            del changed[key]
        return changed
    return data.draw(JSON)


def flip(data, content):
    """Overwrite some bytes."""
    places = st.integers(0, len(content) - 1)
    changed = bytearray(content)
    for place in data.draw(st.lists(places, min_size=1, max_size=3)):
        changed[place] = data.draw(st.sampled_from(b'"0919[]{},:-e\n\x00\xff'))
    return bytes(changed)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written") / "run"
    write_run(
        directory, losses=[(1, 6.5), (2, 6.0)], tail=lines_of({"event": "end", "outcome": "x"})
    )
    return directory, *((directory / name).read_bytes() for name in ("run.json", "metrics.jsonl"))


@hypothesis.settings(max_examples=400)
@hypothesis.given(data=st.data())
def test_mutated_files_of_a_run_never_give_a_traceback(written, data):
    directory, record, metrics = written
    if data.draw(st.booleans()):
        record, metrics = flip(data, record), flip(data, metrics)
    else:
        record = json.dumps(mutate(data, json.loads(record))).encode()
        lines = metrics.splitlines()
        number = data.draw(st.integers(0, len(lines) - 1))
        lines[number] = json.dumps(mutate(data, json.loads(lines[number]))).encode()
        metrics = b"\n".join([*lines, b""])
    if data.draw(st.booleans()):
        record = written[1]
    (directory / "run.json").write_bytes(record)
    (directory / "metrics.jsonl").write_bytes(metrics)
    try:
        for section in group_by_corpus([read_run(str(directory)), read_run(str(directory))]):
            section_text(section)
    except ProgramExit as error:
        assert "\n" not in str(error) and str(directory) in str(error)
    drop_events_after(str(directory), 2, 1, 1)
    assert read_events(str(directory))[1] is None
