"""The built-in configs: each file defines `get_config()`."""
