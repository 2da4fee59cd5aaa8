"""Rescoring of n-best lists in the format of Moses: `id ||| text ||| features [||| score ...]`."""

import itertools
from collections.abc import Iterable, Iterator

from lm.errors import UserError
from lm.inference.scorer import Scorer

_SEPARATOR = " ||| "


def rescore(lines: Iterable[str], scorer: Scorer, weight: float, name: str) -> Iterator[str]:
    """Yield the lines of each n-best list, sorted by their new scores.

    The natural log-probability of a text becomes the feature `lm`. The score of its line increases
    by `weight` times the log-probability. A line without a score starts at 0. `name` is the name of
    the file in messages.
    """
    entries, copies = itertools.tee(
        _parse(line, f"{name}, line {number}") for number, line in enumerate(lines, 1)
    )
    scores = scorer.score((fields[1] for fields in copies), f"{name}, line")
    # The scores come first, because they raise the errors of all lines.
    for identifier, group in itertools.groupby(zip(scores, entries), key=lambda pair: pair[1][0]):
        rescored = []
        for score, (_, text, features, total, *rest) in group:
            features = f"{features} lm= {score.log_prob:.6f}".strip()
            new_total = float(total) + weight * score.log_prob
            fields = [identifier, text, features, f"{new_total:.6f}", *rest]
            rescored.append((new_total, _SEPARATOR.join(fields)))
        rescored.sort(key=lambda entry: -entry[0])
        yield from (line for _, line in rescored)


def _parse(line: str, place: str) -> list[str]:
    fields = [field.strip() for field in line.split("|||")]
    fields += ["0"] if len(fields) == 3 else []
    try:
        float(fields[3])
    except (IndexError, ValueError) as error:
        raise UserError(
            f"{place} must be `id ||| text ||| features [||| score]`, not {line[:60]!r}"
        ) from error
    return fields
