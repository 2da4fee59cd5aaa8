"""What the launchers' variables say."""

import pytest

from lm.distributed import launch


@pytest.mark.parametrize(
    "variables, size, rank",
    [
        ({}, 1, 0),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 2, 1),
        ({"SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "5"}, 7, 5),
        (  # mpirun in a shell that srun has started
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0",
             "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "5"},
            2, 0,
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 1, 0),  # in the batch script itself
    ],
)  # fmt: skip
def test_the_launcher_that_is_nearest_counts(variables, size, rank, monkeypatch):
    for names in launch._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launch.launched_size(), launch.launched_rank()) == (size, rank)
