"""The commands that use a run, compared with each other."""

import numpy as np
import pytest
import tensorflow as tf2

from lm.inference.evaluation import evaluate
from lm.inference.generator import Generator
from lm.inference.sampling import Sampling
from lm.inference.saved_model import export
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
from lm.tokens.tokenizers import split_words


def check_commands_agree(run, functions, corpora, tmp_path, text="embedded/test.txt"):
    """Check that lm.evaluate, score, generate and export compute the same probabilities."""
    opened = open_run(run, functions=functions)
    sentence = (corpora / text).read_text().splitlines()[0]
    (tmp_path / "one.txt").write_text(sentence + "\n")
    texts = [str(tmp_path / "one.txt")]
    (evaluated,) = evaluate(opened, texts, eval_batch_size=1)
    (score,) = Scorer(opened, 2).score([sentence])
    assert -evaluated["nll"] * evaluated["tokens"] == pytest.approx(score.log_prob, rel=1e-5)
    how = Sampling(num_words=8, top_k=1, seed=1, allow_unk=True)
    generated = split_words("".join(Generator(opened).stream(sentence, how)))
    assert generated[:-8] == sentence.split()
    export(opened, str(tmp_path / "exported"))
    model = tf2.saved_model.load(str(tmp_path / "exported"))
    found = model.signatures["score"](words=tf2.constant([sentence.split()]))
    np.testing.assert_allclose(found["log_probability"], [score.log_prob], rtol=1e-5)
    ids = tf2.constant([opened.tokenizer.encode(sentence)])
    found = model.signatures["score_ids"](ids=ids)
    np.testing.assert_allclose(found["log_probability"], [score.log_prob], rtol=1e-5)
    step, log_probs = model.signatures["next_word"], []
    state = tf2.zeros([1, step.structured_input_signature[1]["state"].shape[1]])
    for word, after in zip(["<eos>", *sentence.split()], [*sentence.split(), "<eos>"]):
        out = step(words=tf2.constant([word]), state=state)
        ids = tf2.constant(opened.tokenizer.vocabulary.encode([word]))
        by_id = model.signatures["next_id"](ids=ids, state=state)
        np.testing.assert_allclose(by_id["log_probabilities"], out["log_probabilities"], rtol=1e-5)
        state = out["state"]
        log_probs.append(out["log_probabilities"][0, opened.tokenizer.vocabulary.ids[after]])
    np.testing.assert_allclose(log_probs, score.log_probs, rtol=1e-4)
