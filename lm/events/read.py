"""Read metrics.jsonl, which has an event per line. Damaged lines never stop a run or a report."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lm import logger
from lm.errors import UserError
from lm.files import no_link, open_regular, write_atomically
from lm.json_files import parse_object
from lm.record import METRICS_FILE

Event = Mapping[str, Any]

_DAMAGED_FILE = "metrics.damaged.jsonl"

_REQUIRED = {
    "start": {"event", "world_size"},
    "step": {"event", "step"},
    "validation": {"event", "step"},
    "epoch": {"event", "step", "epoch", "epochs", "epoch_seconds", "tokens_per_second"},
    "test": {"event", "step"},
    "end": {"event", "outcome"},
}
_OF_NUMBERS = {"step", "validation", "epoch", "test"}  # events whose other fields are numbers
_STEP = b'{"event": "step"'  # the start of a line; `Reporter.event` writes this field first
_COUNTS = {"step", "epoch", "world_size", "vocab_size", "steps_per_epoch", "resumed_from_step"}
_TEXTS = {"event", "outcome", "reason", "test_on"}
_NOT_FLOATS = _COUNTS | _TEXTS


def read_events(run_dir: str) -> tuple[list[Event], str | None]:
    """Return the events of a run, and a description of its damaged lines if there are any."""
    damaged: dict[int, str] = {}
    events = list(iterate_events(run_dir, damaged))
    return events, describe_damage(run_dir, damaged)


def iterate_events(
    run_dir: str, damaged: dict[int, str], with_steps: bool = True
) -> Iterator[Event]:
    """Yield the events of a run, which may not fit into memory, and add its damaged lines.

    The last line may be incomplete, because a run may be writing it. Most events are steps. Reading
    is about 30 times as fast without them.
    """
    with open_regular(os.path.join(run_dir, METRICS_FILE)) as file:
        for _, event in _parse(file, damaged, () if with_steps else (_STEP,)):
            yield event


def describe_damage(run_dir: str, damaged: Mapping[int, str]) -> str | None:
    """Describe damaged lines, given their numbers and reasons; return None if there are none."""
    for number, reason in damaged.items():
        count = f"{len(damaged)} damaged line{'s' * (len(damaged) > 1)}"
        path = os.path.join(run_dir, METRICS_FILE)
        return f"{path} has {count}, the first is line {number} ({reason})"
    return None


def drop_events_after(run_dir: str, step: int, epochs_done: int, last_validation: int) -> None:
    """Remove the events of steps that will be done again, so that each event occurs once.

    Damaged lines are moved to another file.
    """
    path, aside = (os.path.join(run_dir, name) for name in (METRICS_FILE, _DAMAGED_FILE))
    if os.path.islink(path):  # Damaged lines of a private file would be copied into the run.
        raise UserError(f"{path} is a link; replace it by its target")
    try:
        with open_regular(path) as file:
            lines = file.readlines()
    except FileNotFoundError:
        return
    damaged: dict[int, str] = {}
    last = {"step": step, "epoch": epochs_done, "validation": last_validation}
    kept = [line for line, event in _parse(lines, damaged) if _is_before(event, last)]
    if damaged:
        with open(aside, "ab", opener=no_link) as file_aside:
            file_aside.writelines(lines[number - 1] for number in damaged)
        logger.warning("%s; moved them to %s", describe_damage(run_dir, damaged), aside)
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept))


def _parse(
    lines: Iterable[bytes], damaged: dict[int, str], skipped: tuple[bytes, ...] = ()
) -> Iterator[tuple[bytes, Event]]:
    """Yield the lines with their events, and add the reason for each damaged line by number."""
    for number, line in enumerate(lines, start=1):
        # An incomplete line is being written, or the job was killed.
        if not line.endswith(b"\n") or line.startswith(skipped):
            continue
        try:
            event = parse_object(line)
            _check(event)
        except ValueError as error:
            damaged[number] = str(error)
        else:
            yield line, event


def _check(event: Event) -> None:
    kind = str(event.get("event"))  # A later version may write other kinds.
    for name in sorted(_REQUIRED.get(kind, {"event"}) - event.keys()):
        raise ValueError(f"{name} is missing")
    for name, value in event.items():
        if type(value) is float and name not in _NOT_FLOATS and math.isfinite(value):
            continue
        if name in _TEXTS:
            is_valid = isinstance(value, str)
        elif name in _COUNTS:
            is_valid = type(value) is int and value >= (name == "world_size")
        else:
            is_number = type(value) in (int, float) and math.isfinite(value)
            is_valid = is_number or kind not in _OF_NUMBERS
        if not is_valid:
            raise ValueError(f"{name} is {value!r:.40}")
    if kind == "epoch" and event["epochs"] <= 0:
        raise ValueError(f"epochs is {event['epochs']}")


def _is_before(event: Event, last: Mapping[str, int]) -> bool:
    """Return whether an event is not later than the last step, epoch or validation."""
    kind = event["event"]
    if kind == "epoch":
        return event["epoch"] <= last["epoch"]
    if kind == "validation":
        return event["step"] <= last["validation"]
    return kind not in ("test", "end") and event.get("step", 0) <= last["step"]
