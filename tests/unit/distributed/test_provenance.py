"""The facts about the start of a run: the commit, and the command line without secrets."""

import re
import subprocess

import pytest

from lm.distributed.provenance import git_commit
from lm.errors import without_secrets


def test_the_commit_is_marked_if_files_have_changed(tmp_path):
    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True)

    assert git_commit(str(tmp_path)) is None
    git("init", "--quiet")
    (tmp_path / "a.py").touch()
    git("add", "a.py")
    git("commit", "--quiet", "--message=a")
    commit = git_commit(str(tmp_path))
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "a.py").write_text("changed")
    assert git_commit(str(tmp_path)) == commit + "+"


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "--data_url=https://me:SECRET@host/a.tgz?sig=SECRET -x",
            "--data_url=https://host/a.tgz -x",
        ),
        ("""'https://me:it'"'"'s@host/'""", "'https://host/'"),
        ("""{"url":"http://proxy","to":"me@x"}""", """{"url":"http://proxy","to":"me@x"}"""),
        ("--api_key SECRET --seed 5", "--api_key ... --seed 5"),
        ("--on_event 'WANDB_API_KEY=SECRET send'", "--on_event 'WANDB_API_KEY=... send'"),
        ("--password 'SECRET SECRET' b", "--password ... b"),
        ("""-H "Authorization: Bearer SECRET" c""", """-H "Authorization: Bearer ..." c"""),
        ("X-Auth-Key: SECRET -x", "X-Auth-Key: ... -x"),
        ("--init_rename 'attn/key=k/key' --seed 1", "--init_rename 'attn/key=k/key' --seed 1"),
        ("--tokenizer words --data_path data/?.txt", "--tokenizer words --data_path data/?.txt"),
    ],
)
def test_secrets_are_removed(text, expected):
    assert without_secrets(text) == expected
