"""Results of the searches of the fixture `search`."""

from optuna.trial import TrialState

COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


def trials(study):
    return study.get_trials(deepcopy=False)


def states(study):
    return [trial.state for trial in trials(study)]


def values(study):
    return [trial.value for trial in trials(study)]


def starts(search, number):
    return (search.directory / f"trials/000{number}/starts").read_text().split()


def space(rates):
    return f"--space=learning_rate={rates}"
