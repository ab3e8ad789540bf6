"""This machine says that it has three GPUs."""

from hooks.accelerators import plant

plant("cuda", 3)
