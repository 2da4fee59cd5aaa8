"""The use of a trained run: evaluation, text generation, scoring, and export as a SavedModel.

from lm.inference.evaluator import evaluate
print(evaluate("runs/small", ["test"])[0]["perplexity"])

from lm.inference.generator import Generator, spaced
from lm.inference.run import open_run
from lm.inference.sampling import Sampling
for prompt, words in Generator(open_run("runs/small")).texts(Sampling("the company said")):
    print("".join(spaced([*prompt, *words])))

from lm.inference.scorer import Scorer
print([score.log_prob for score in Scorer(open_run("runs/small")).score(["yes", "no"])])
"""
