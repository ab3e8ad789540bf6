"""This machine says that it has 8 GPUs, of which PyTorch can use none."""

from hooks.accelerators import plant

plant("cuda", 8, available=False)
