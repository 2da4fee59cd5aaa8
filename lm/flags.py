"""Generate the documentation of the flags of lm.train: `python -m lm.flags > docs/flags.md`."""

import dataclasses

from lm.cli.parser import field_help
from lm.config import Config, RunOptions
from lm.options import field_type


def flags_document() -> str:
    """Return docs/flags.md, with a table row for each field of Config and RunOptions."""
    lines = [
        "# The flags of lm.train",
        "",
        "`python -m lm.flags > docs/flags.md` generates this file from `lm/config.py`.",
        "`--config` names a config in `configs/` or the path of a config file. Each flag of the",
        "first table overrides the config field of the same name. The default applies if the",
        "config does not set the field.",
        "",
        "`--help` shows the flags, `--print_config` shows all values and their sources, and",
        "`--version` shows the versions of the project and its libraries.",
    ]
    sections = {"Config: the model and its training": Config, "RunOptions: the run": RunOptions}
    for title, cls in sections.items():
        lines += ["", f"## {title}", "", "| flag | default | meaning |", "|---|---|---|"]
        for field in dataclasses.fields(cls):
            plain_type, _ = field_type(cls, field.name)
            name = f"--[no]{field.name}" if plain_type is bool else f"--{field.name}"
            text = field_help(field).replace("<", "&lt;")  # Markdown would read <unk> as HTML.
            default = "" if field.default is None else field.default
            lines.append(f"| `{name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_document(), end="")
