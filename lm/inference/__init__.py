"""Use of a trained run: evaluation, text generation, scoring, and export as a SavedModel.

from lm.inference.evaluator import evaluate
print(evaluate("runs/small", ["test"])[0]["perplexity"])

from lm.inference.trained_run import open_run
from lm.inference.scorer import Scorer
print([score.log_prob for score in Scorer(open_run("runs/small")).score(["yes", "no"])])
"""
