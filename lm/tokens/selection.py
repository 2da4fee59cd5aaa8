"""Select the tokenizer of a run: from its config, or from an earlier run."""

import os

from lm.config import Config
from lm.errors import UserError, error_class
from lm.files import open_regular
from lm.json_files import CorruptFile
from lm.options import MAX_INT, replaced
from lm.record import load_record
from lm.tokens.subwords import load_subwords
from lm.tokens.symbols import BUILT, FIXED, IDS_FILE, Ids
from lm.tokens.tokenizers import SAVED, VOCABULARY_FILE, Tokenizer, Words
from lm.tokens.vocabulary import Vocabulary


def with_absolute_paths(config: Config) -> Config:
    """Return a copy of a config in which the path of the tokenizer is absolute."""
    names = ["vocabulary"] if config.vocabulary else []
    if config.tokenizer not in (*BUILT, *FIXED):
        names.append("tokenizer")
    paths = {name: os.path.expanduser(getattr(config, name)) for name in names}
    return replaced(config, **{name: os.path.abspath(path) for name, path in paths.items()})


def fixed_tokenizer(config: Config, reads_ids: bool) -> Tokenizer | None:
    """Return the tokenizer of a config, or None if the training text determines its vocabulary.

    Args:
      reads_ids: Whether the corpus consists of token IDs.
    """
    if reads_ids and config.tokenizer in BUILT and not config.vocabulary:
        if config.vocab_size is None:
            raise UserError(
                "a corpus of token IDs needs --vocab_size N, its --vocabulary or its --tokenizer"
            )
        if config.tokenizer != "words" or config.min_count > 1:
            raise UserError(
                "a corpus of token IDs has no text: remove --tokenizer and --min_count, or replace"
                " --vocab_size and --min_count by its --vocabulary"
            )
        return Ids(config.vocab_size)
    if config.tokenizer in BUILT:
        if not config.vocabulary:
            return None
        if config.vocab_size is not None or config.min_count > 1:
            raise UserError("--vocabulary fixes the words: remove --vocab_size and --min_count")
        return BUILT[config.tokenizer](load_vocabulary(config.vocabulary, is_saved=False))
    for name in ("vocabulary", "vocab_size", "min_count"):
        if getattr(config, name) != getattr(Config(), name):
            raise UserError(
                f"--{name} is for the tokenizers words and characters: {config.tokenizer} has a"
                " fixed vocabulary"
            )
    if config.tokenizer in FIXED:
        return FIXED[config.tokenizer]()
    return load_subwords(config.tokenizer)


def load_vocabulary(path: str, is_saved: bool = True) -> Vocabulary:
    """Read a file of one word per line. Line ends may be CR LF.

    Args:
      is_saved: Whether `Tokenizer.save` wrote the file. Other files may start with a byte order
        mark, and end without a line end.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8" if is_saved else "utf-8-sig")
        text = text.replace("\r\n", "\n")
        if is_saved and not text.endswith("\n"):
            raise UserError("the last line is incomplete")
        return Vocabulary(tuple(text.removesuffix("\n").split("\n")))
    except OSError as error:
        message = f"cannot read the vocabulary {path}: {error.strerror}"
        raise error_class(error)(message) from error
    except ValueError as error:  # UserError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{path} is not a vocabulary: {error}") from error


def has_tokenizer(directory: str) -> bool:
    """Return whether `Tokenizer.save` stored a tokenizer in a directory."""
    return any(os.path.exists(os.path.join(directory, name)) for name in (VOCABULARY_FILE, SAVED))


def saved_tokenizer(directory: str) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.save` stored in a directory."""
    if not has_tokenizer(directory):
        raise UserError(f"{directory} has neither {VOCABULARY_FILE} nor {SAVED}/: restore it")
    if not os.path.isdir(os.path.join(directory, SAVED)):
        return Words(load_vocabulary(os.path.join(directory, VOCABULARY_FILE)))
    for built in set(BUILT.values()) - {Words}:
        path = os.path.join(directory, built.saved_as)
        if os.path.exists(path):
            return built(load_vocabulary(path))
    for fixed in FIXED.values():
        if all(os.path.exists(os.path.join(directory, name)) for name in fixed.files):
            return fixed()
    path = os.path.join(directory, IDS_FILE)
    if os.path.exists(path):
        with open_regular(path) as file:
            text = file.read().strip()
        if not text.isdigit() or int(text) > MAX_INT:
            raise CorruptFile(f"{path} must contain the size of the vocabulary")
        return Ids(int(text))
    return load_subwords(os.path.join(directory, SAVED))


def earlier_tokenizer(run_dir: str | None, config: Config, flag: str) -> Tokenizer | None:
    """Return the tokenizer of an earlier run, unless this host does not have its directory.

    Raises:
      UserError: If the config asks for a different tokenizer or vocabulary.
    """
    # A job that was killed before it wrote the record may have written a part of its tokenizer.
    record = load_record(run_dir) if run_dir else None
    if not record or not has_tokenizer(run_dir):
        return None
    tokenizer = saved_tokenizer(run_dir)
    for name in ("tokenizer", "vocabulary", "vocab_size", "min_count"):
        given = getattr(config, name)
        if given == getattr(Config(), name):
            continue
        is_same = record.config[name] == given
        is_file = name == "vocabulary" or (name == "tokenizer" and given not in (*BUILT, *FIXED))
        if is_file and os.path.exists(given):
            is_recorded = is_same
            is_same = fixed_tokenizer(config, reads_ids=False).sha256 == tokenizer.sha256
            if is_recorded and not is_same:
                raise UserError(
                    f"{given} has changed since the start of {run_dir}: restore or remove this"
                    " file. The run contains a copy of the original file"
                )
        if not is_same:
            raise UserError(
                f"{flag} uses the tokenizer of {run_dir}, which differs from {name} {given}: remove"
                f" --{name}, or start a run with --new_vocabulary"
            )
    return tokenizer
