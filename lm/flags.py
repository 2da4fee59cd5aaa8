"""The documentation of `lm.train`'s flags: `python -m lm.flags > docs/flags.md`."""

from lm.cli.flags import flags_document

if __name__ == "__main__":
    print(flags_document(), end="")
