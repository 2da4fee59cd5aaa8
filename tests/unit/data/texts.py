"""Small corpora: written, loaded and read back."""

import ctypes
import os
import pathlib
import subprocess

from tests.commands import run_code

TEXTS = {"train": "the cat sat\nthe dog sat\n", "valid": "the cat\n", "test": "dog sat\n"}


def write(directory, prefix="", **texts) -> str:
    """Write the splits as text or bytes. Splits that are not given contain small defaults."""
    os.makedirs(directory, exist_ok=True)
    for split, text in {**TEXTS, **texts}.items():
        content = text if isinstance(text, bytes) else text.encode()
        (pathlib.Path(directory) / f"{prefix}{split}.txt").write_bytes(content)
    return str(directory)


def words_of(corpus, split) -> list:
    return decoded(corpus.tokenizer, getattr(corpus, split))


def unknown(corpus) -> dict:
    return {split: encoded.unknown for split, encoded in corpus.encoded.items()}


def decoded(tokenizer, ids) -> list:
    return [tokenizer.tokens[i] for i in ids]


def load_obeying_permissions(data_path, **env: str) -> subprocess.CompletedProcess:
    """Load a corpus in a process that obeys permission bits, even if the user is root."""

    def drop_privileges():
        if os.getuid() == 0:
            for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
                assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP

    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        "from lm.data.corpus import load_corpus; print(load_corpus(sys.argv[1]).train.filename)"
    )
    return run_code(code, data_path, env=env, preexec_fn=drop_privileges)
