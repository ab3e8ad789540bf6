"""How fast this repository is beside other ways to train the same model."""
