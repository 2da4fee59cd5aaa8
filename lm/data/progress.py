"""A progress bar for reading a file or a download."""

import contextlib

import tqdm


class ReadProgress(tqdm.tqdm):
    """Shows the number of bytes read so far, if stderr is a terminal."""

    monitor_interval = 0  # tqdm's monitor thread would outlive the run

    def __init__(self, activity: str, total: int | None):
        options = dict(unit="B", unit_scale=True, leave=False)
        super().__init__(desc=activity, total=total or None, disable=None, **options)

    def show(self, done: int) -> None:
        with contextlib.suppress(OSError):  # A closed terminal must not end a job.
            self.update(done - self.n)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
