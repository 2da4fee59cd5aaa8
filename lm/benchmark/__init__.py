"""How fast a training step is, what it is compared with, and whether more ranks pay off."""
