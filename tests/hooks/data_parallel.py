"""For data_parallel.py: it notes what passes through the wrapper in noted.json.

wrapper        the class of `dp_model`
train, eval    the batches that `dp_model` gets, in training and in evaluation: the
               size of each
calls          of the model, or of a copy of it on another GPU: [device, samples]
"""

import json
import pathlib

noted = {"train": [], "eval": [], "calls": []}


class Trainer:
    def train(self, *arguments):
        noted["wrapper"] = type(self.dp_model).__name__
        self.dp_model.register_forward_pre_hook(self._note_batch)
        # DataParallel copies the model with its hooks.
        self.model.register_forward_hook(self._note_call)
        super().train(*arguments)
        pathlib.Path("noted.json").write_text(json.dumps(noted))

    def _note_batch(self, _, inputs):
        (source,) = inputs
        mode = "train" if self.model.training else "eval"
        noted[mode].append(len(source))

    def _note_call(self, _, inputs, output):
        (source,) = inputs
        noted["calls"].append([str(output.device), len(source)])
