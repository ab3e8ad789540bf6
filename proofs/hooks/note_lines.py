"""Each rank writes the numbers that were planted in `train`, as it passes them.

They go to noted.RANK.json: `self.passed.append(N)` stands after statement N.
"""

import json

from hooks import rank


class Trainer:
    def train(self):
        self.passed = []
        super().train()
        with open(f"noted.{rank()}.json", "w") as file:
            json.dump(self.passed, file)
