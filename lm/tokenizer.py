"""Train a subword tokenizer on the training split of a corpus.

  python -m lm.tokenizer --data_path data/kjv --kind bpe --vocab_size 8000 --output kjv.json
  python -m lm.train --data_path data/kjv --tokenizer kjv.json

Both kinds of tokenizers divide a text into sequences of bytes. Therefore, they can encode any text,
and decoding returns exactly this text. bpe (byte-pair encoding) merges frequent pairs of tokens, as
for GPT-2. unigram (Kudo, 2018, https://arxiv.org/abs/1804.10959) keeps the pieces with the highest
likelihood. The special token <|endoftext|> separates documents.

The memory of this command depends on the number of different words, not on the length of the text.
The tokenizer depends only on the text and the flags, not on the number of threads or on how the
text is divided into files.
"""

import collections
import concurrent.futures
import dataclasses
import io
import itertools
import os
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from lm import logger
from lm.cli import program
from lm.cli.parser import parse
from lm.config import Config
from lm.data.splits import Source, divide_file, find_splits
from lm.errors import UserError, error_class, needs_extra
from lm.files import open_atomically
from lm.options import Checked, option
from lm.tokens.subwords import byte_level
from lm.tokens.text import Block, decode_blocks, read_blocks

_SEPARATOR = "<|endoftext|>"
_NUM_BYTES = 256
_COMPLETE = re.compile(r".*\S(?=[ \n\r\u3000])", re.DOTALL)
_SAMPLE_SIZE = 1 << 20  # words
# BpeTrainer counts pairs of tokens in 32 bits. "he" is 2 to 3% of an English text, so its
# count overflows in a text of about 75 GB.
_MAX_BPE_BYTES = 32_000_000_000
_MAX_CHARACTERS = 1 << 20  # spaces and line ends do not count


@dataclasses.dataclass(frozen=True)
class TokenizerOptions(Checked):
    """The flags of this command."""

    data_path: str = option(
        "", "directory with train.txt, or a corpus in a different form (see data/README.md)",
        required=True, is_path=True,
    )  # fmt: skip
    split: str = option(
        Config.split, "value of --split for lm.train, if --data_path is a single file. With the"
        " same value, the tokenizer is not trained on the validation and test splits",
    )  # fmt: skip
    kind: str = option("bpe", "algorithm", choices=("bpe", "unigram"))
    vocab_size: int = option(
        8000, "largest number of tokens. The 256 bytes and <|endoftext|> are always tokens",
        low=_NUM_BYTES + 1,
    )  # fmt: skip
    output: str = option("", "new file for the tokenizer (.json)", required=True, is_path=True)


def _tokenizer(argv):
    options = parse(argv, __doc__, TokenizerOptions)[TokenizerOptions]
    output = options.output
    if os.path.lexists(output):
        raise UserError(f"--output {output} already exists: choose a different file, or remove it")
    train = {"bpe": train_bpe, "unigram": train_unigram}[options.kind]
    source = find_train(options.data_path, options.split)
    try:
        with open_atomically(output) as file:  # Report a read-only directory before the training.
            blocks = read_blocks(source.parts, "reading")
            tokenizer = train(read_complete_words(blocks), options.vocab_size)
            file.write(tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise error_class(error)(f"cannot write {output}: {error.strerror}") from error
    print(f"wrote {output}: {tokenizer.get_vocab_size():,} tokens")


def find_train(data_path: str, split: str) -> Source:
    """Return the training split of a corpus.

    Raises:
      UserError: If the corpus does not exist, or does not consist of text.
    """
    is_file = os.path.isfile(data_path)
    sources = divide_file(data_path, split) if is_file else find_splits(data_path)
    if "train" not in sources:
        raise UserError(
            f"{data_path} does not contain train.txt: --data_path must be a text file or the"
            " directory of a corpus (other forms: data/README.md)"
        )
    source = sources["train"]
    if source.reads_ids:
        raise UserError(f"{source.path} contains token IDs: a tokenizer is trained on text")
    return source


def read_complete_words(blocks: Iterable[Block]) -> Iterator[list[str]]:
    """Divide a text at the separators, and yield a list of consecutive parts at a time.

    Each list ends between a word and white space. The pre-tokenizer always divides the text there,
    so reading the text in several lists does not change the words that it finds.
    """
    rest = ""
    for block in decode_blocks(blocks):
        text = rest + block.data
        found = _COMPLETE.match(text)
        end = found.end() if found else 0
        text, rest = text[:end], text[end:]
        if len(rest) > _MAX_CHARACTERS:
            raise UserError(
                f"{block.part.path} has {_MAX_CHARACTERS:,} characters without spaces and line"
                " ends: use --tokenizer characters or bytes for lm.train"
            )
        yield text.split(_SEPARATOR)
    yield rest.split(_SEPARATOR)


def train_bpe(texts: Iterable[list[str]], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer like GPT-2's on the first `_MAX_BPE_BYTES` of the texts."""
    with needs_extra("tokenizers"):
        from tokenizers import models, trainers
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=_alphabet(),
        special_tokens=[_SEPARATOR],
        show_progress=False,  # `read_blocks` shows the progress
    )
    tokenizer = byte_level(models.BPE())
    # In the main thread, the library would delay Ctrl-C until the end of the training.
    thread = concurrent.futures.ThreadPoolExecutor(1)
    thread.submit(tokenizer.train_from_iterator, _first(texts, _MAX_BPE_BYTES), trainer).result()
    thread.shutdown()
    return tokenizer


def _first(texts: Iterable[list[str]], num_bytes: int) -> Iterator[list[str]]:
    """Yield texts until they have `num_bytes` bytes."""
    for some in texts:
        if num_bytes <= 0:
            logger.warning("training on the first %s bytes only", f"{_MAX_BPE_BYTES:,}")
            return
        yield some
        num_bytes -= sum(len(text.encode()) for text in some)


def train_unigram(texts: Iterable[list[str]], vocab_size: int) -> Any:
    """Train a byte-level unigram tokenizer.

    SentencePiece trains the model, because the trainer of `tokenizers` adds probabilities in a
    random order. With one thread, SentencePiece adds them in the order of the words.
    """
    with needs_extra("tokenizers"):
        from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
        from tokenizers import models
    split_words = byte_level(models.BPE()).pre_tokenizer.pre_tokenize_str
    counts = collections.Counter(
        word for some in texts for text in some for word, _ in split_words(text)
    )
    logger.info("training on %s different words", f"{len(counts):,}")
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(_sample(counts)),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        num_threads=1,
        # The text is already divided into words, which consist of visible characters.
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,
        split_by_number=False,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    pieces = SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(1, pieces.get_piece_size())  # ID 0 is <unk>
    scores = {pieces.id_to_piece(i): pieces.get_score(i) for i in ids}  # best pieces first
    lowest = min(scores.values())
    longer = [piece for piece in scores if len(piece) > 1][: vocab_size - _NUM_BYTES - 1]
    tokens = [(byte, scores.get(byte, lowest)) for byte in _alphabet()]
    tokens += [(piece, scores[piece]) for piece in longer]
    tokenizer = byte_level(models.Unigram([(_SEPARATOR, 0.0), *tokens]))
    tokenizer.add_special_tokens([_SEPARATOR])
    return tokenizer


def _sample(counts: collections.Counter[str]) -> list[str]:
    """Repeat each word according to its count, and return the words in a random order.

    If the text is short, each word is repeated as often as it occurs in the text. Otherwise, all
    counts are reduced by the same factor, but each word is returned at least once. Only the most
    frequent words are used, because rare words could otherwise make up most of the sample.

    SentencePiece also accepts pairs of words and counts, but it ignores the counts when it selects
    candidates for pieces. If the sample is sorted, SentencePiece does not find whole words.
    """
    share = min(1, _SAMPLE_SIZE / counts.total())
    kept = sorted(counts.most_common(_SAMPLE_SIZE))
    repeated = (itertools.repeat(w, max(1, int(n * share))) for w, n in kept)
    words = list(itertools.chain.from_iterable(repeated))
    random.Random(0).shuffle(words)
    return words


def _alphabet() -> list[str]:
    """Return the visible characters that represent the 256 values of a byte."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def main() -> None:
    program.run_alone(_tokenizer)


if __name__ == "__main__":
    main()
