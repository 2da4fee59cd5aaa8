"""The ready-made configs: one file each, with one function `get_config()`."""
