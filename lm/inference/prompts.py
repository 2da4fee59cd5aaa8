"""Prompts as tokens, and tokens as text while they are generated or read. Needs no TensorFlow."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

from lm import logger
from lm.errors import UserError
from lm.tokens.tokenizers import Tokenizer
from lm.tokens.vocabulary import UNK

_WINDOW = 8  # number of complete parts of a text that are decoded again with each new token


def encode_prompt(prompt: str, tokenizer: Tokenizer, position: int = 0) -> list[int]:
    """Return the token IDs of a prompt, and log its unknown words."""
    try:
        unknown, ids = dict.fromkeys(tokenizer.unknown(prompt)), tokenizer.encode(prompt)
    except UserError as error:
        raise UserError(f"prompt {position + 1} ({prompt[:40]!r}): {error}") from error
    if unknown:
        logger.warning("not in the vocabulary, read as %s: %s", UNK, ", ".join(unknown))
    return ids


def contains_at_end(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> bool:
    """Return whether tokens contain a text that ends in their last token.

    Only as many tokens are decoded as the text may have: a token has at least one byte.
    """
    count = len(text.encode(errors="surrogatepass")) + _WINDOW
    decoded = tokenizer.decode(tokens[-count:])
    while decoded.startswith("\ufffd") and count < len(tokens):  # It may start inside a character.
        count *= 2
        decoded = tokenizer.decode(tokens[-count:])
    return text in decoded


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield the characters that each token completes, and then the rest of the text."""
    # The window must not start inside a character. Otherwise, some decoders would replace all
    # bytes that follow.
    complete: collections.deque[list[int]] = collections.deque(maxlen=_WINDOW)
    window: list[int] = []
    shown, num_shown = "", 0
    for token in ids:
        window.append(token)
        text = tokenizer.decode(window)
        if text.endswith("\ufffd"):  # the last character may be incomplete
            yield ""
        else:
            yield text[len(shown) :]
            complete.append(window[num_shown:])
            window = list(itertools.chain.from_iterable(complete))
            shown, num_shown = tokenizer.decode(window), len(window)
    yield tokenizer.decode(window)[len(shown) :]
