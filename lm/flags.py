"""The documentation of `lm.train`'s flags: `python -m lm.flags > docs/flags.md`."""

import dataclasses

from lm.cli.flags import field_help
from lm.config import Config, RunOptions
from lm.options import field_type


def flags_document() -> str:
    """Return docs/flags.md: every field of Config and RunOptions, as the flag it is."""
    lines = [
        "# The flags of lm.train",
        "",
        "`--config` names a config of `configs/` or a file of one's own. The others, made from",
        "`lm/config.py` by `python -m lm.flags > docs/flags.md`, are in `--help`, too.",
        "A flag of the first table overrides the config's field; the defaults are those of a",
        "config that does not set the field.",
    ]
    for title, cls in (("What is trained: Config", Config), ("How: RunOptions", RunOptions)):
        lines += ["", f"## {title}", "", "| flag | default | what |", "|---|---|---|"]
        for field in dataclasses.fields(cls):
            plain_type, _ = field_type(cls, field.name)
            name = f"--[no]{field.name}" if plain_type is bool else f"--{field.name}"
            text = field_help(field).replace("<", "&lt;")  # Markdown would take <unk> for HTML
            default = "" if field.default is None else field.default
            lines.append(f"| `{name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_document(), end="")
