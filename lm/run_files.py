"""The names of the files in a run's directory (`--output_dir`)."""

CONFIG = "config.json"  # what is trained, a Config
CONFIG_FILE = "config_file.json"  # which file brought the network, where one did
CORPUS = "corpus.json"  # where the corpus was, and its checksum
VOCABULARY = "vocabulary.txt"  # a word's id is its line, from 0
METRICS = "metrics.jsonl"  # the events, one per line
LOG = "log.txt"  # rank 0's; those of other ranks are named after it
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"  # held by the job that writes here
