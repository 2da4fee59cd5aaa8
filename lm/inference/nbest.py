"""Rescoring of n-best lists in the format of Moses: `id ||| text ||| features [||| score ...]`."""

import itertools
from collections.abc import Iterable, Iterator

from lm.errors import UserError
from lm.inference.scorer import Scorer

_SEPARATOR = " ||| "


def rescore(lines: Iterable[str], scorer: Scorer, weight: float) -> Iterator[str]:
    """Yield the lines of each n-best list, sorted by their new scores.

    The natural log-probability of a text becomes the feature `lm`. The score of its line increases
    by `weight` times the log-probability. A line without a score starts at 0.
    """
    entries = (_parse(line, number) for number, line in enumerate(lines, 1))
    for _, group in itertools.groupby(entries, key=lambda fields: fields[0]):
        rescored = []
        of_list = list(group)
        for fields, score in zip(of_list, scorer.score(fields[1].strip() for fields in of_list)):
            name, text, features, total, *rest = fields
            features = f"{features.strip()} lm= {score.log_prob:.6f}".strip()
            total = float(total) + weight * score.log_prob
            rescored.append((total, [name, text, features, f"{total:.6f}", *rest]))
        rescored.sort(key=lambda entry: -entry[0])
        yield from (_SEPARATOR.join(fields) for _, fields in rescored)


def _parse(line: str, number: int) -> list[str]:
    fields = line.split("|||")
    fields = [field.strip() for field in fields] + (["0"] if len(fields) == 3 else [])
    try:
        float(fields[3])
    except (IndexError, ValueError) as error:
        raise UserError(
            f"line {number} of the list must be `id ||| text ||| features [||| score]`, not"
            f" {line[:60]!r}"
        ) from error
    return fields
