"""Average the weights of several checkpoints of a run.

  python -m lm.average runs/small --last 3
  python -m lm.average runs/small --checkpoints step-00001000,step-00002000
  python -m lm.evaluate --run runs/small --checkpoint average-00001000-00002000

The command writes a checkpoint with the mean of the weights into the run. Its name contains the
first and the last step. lm.evaluate, lm.generate, lm.score and lm.export read it with --checkpoint,
and lm.train with --init_from. A run never resumes from it. If the run averages its weights, the
command uses the averages. Weights that are not floating-point numbers are copied from the
last checkpoint.
"""

import dataclasses
import itertools
import os

import numpy as np

from lm import logger
from lm.cli import program
from lm.cli.parser import parse
from lm.errors import UserError
from lm.options import Checked, option
from lm.record import CHECKPOINTS_DIR
from lm.tensorflow_import import import_tensorflow


@dataclasses.dataclass(frozen=True)
class AverageOptions(Checked):
    """The flags of this command."""

    last: int | None = option(None, "average the last N checkpoints", low=1)
    checkpoints: str = option("", "comma-separated names of the checkpoints to average")


def _average(argv):
    arguments = parse(argv, __doc__, AverageOptions, positional=True)
    options, directories = arguments[AverageOptions], arguments.positional
    if len(directories) != 1:
        raise UserError("give one run directory: python -m lm.average RUN --last N")
    names = [name.strip() for name in options.checkpoints.split(",") if name.strip()]
    if (options.last is None) == (not names):
        raise UserError("give either --last N or --checkpoints NAME,NAME")
    import_tensorflow()
    written = average(directories[0], names, options.last)
    logger.info("wrote %s", written)


def average(run_dir: str, names: list[str], last: int | None = None) -> str:
    """Write the mean of the named or of the last checkpoints, and return its directory."""
    from lm.checkpoint import store
    from lm.checkpoint.tensors import whole

    if last:
        newest_first = store.usable(run_dir, store.verify, newest_first=True)
        found = list(itertools.islice(newest_first, last))  # only these, because they may be large
        if len(found) < last:
            raise UserError(f"{run_dir} has only {len(found)} checkpoints, not {last}")
    else:
        found = [store.find(run_dir, name) for name in names]
        own = os.path.realpath(os.path.join(run_dir, CHECKPOINTS_DIR))
        for checkpoint in found:
            if os.path.dirname(os.path.realpath(checkpoint.path)) != own:
                raise UserError(f"{checkpoint.path} is not a checkpoint of {run_dir}")
        for first, second in itertools.combinations(found, 2):
            if first.path == second.path:
                raise UserError(f"--checkpoints names {first.path} twice")
    found = sorted(found, key=lambda checkpoint: checkpoint.manifest.step)
    newest = found[-1].manifest
    name = f"average-{found[0].manifest.step:08d}-{newest.step:08d}"
    if os.path.exists(os.path.join(run_dir, CHECKPOINTS_DIR, name)):
        raise UserError(f"{name} of {run_dir} already exists: remove it first")
    progress = dataclasses.replace(newest.progress, averages_from=None, valid_perplexity=None)
    manifest = dataclasses.replace(newest, progress=progress)
    return store.save(run_dir, [whole(_means(found))], manifest, name=name).path


def _means(checkpoints) -> dict[str, np.ndarray]:
    """Return the mean of each weight, which is computed in float64."""
    from lm.checkpoint.tensors import load_arrays, weight_tensors

    sums: dict[str, np.ndarray] = {}
    for checkpoint in checkpoints:
        tensors = weight_tensors(checkpoint)
        arrays = load_arrays(checkpoint.path, tensors.values())
        for name, tensor in tensors.items():
            sums[name] = sums.get(name, 0) + arrays[tensor].astype(np.float64)
    last = {name: arrays[tensor] for name, tensor in tensors.items()}
    return {
        name: (sums[name] / len(checkpoints)).astype(array.dtype)
        if np.issubdtype(array.dtype, np.floating)
        else array
        for name, array in last.items()
    }


def main() -> None:
    program.run_alone(_average)


if __name__ == "__main__":
    main()
