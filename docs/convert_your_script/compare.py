"""Compare what processes have ended with: their weights and their learning rates.

python docs/convert_your_script/compare.py alone.pt world_*.pt
"""

import sys

import torch


def stop(text):
    print(f"compare.py: error: {text}", file=sys.stderr)
    sys.exit(2)


paths = sys.argv[1:]
results = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
for path, result in zip(paths, results, strict=True):
    keys = ("MODEL_STATE", "LR", "FIRST_LR", "EPOCHS_TRAINED")
    if missing := [key for key in keys if key not in result]:
        stop(f"{path}: has no {', '.join(missing)}")
    trained, expected = result["EPOCHS_TRAINED"], results[0]["EPOCHS_TRAINED"]
    if trained <= 0:
        stop(f"{path}: trained 0 epochs: remove the snapshot before each run")
    if trained != expected:
        stop(f"{path}: epochs trained: {trained}, but in {paths[0]}: {expected}")
    mine, first = result["MODEL_STATE"], results[0]["MODEL_STATE"]
    for key in {**mine, **first}:
        if key not in mine or key not in first or mine[key].shape != first[key].shape:
            stop(f"{path}: has other weights than {paths[0]}, such as {key}")
    # torch's max and not Python's, which can lose a nan
    apart = [(mine[key].double() - first[key].double()).abs().max() for key in first]
    apart = torch.stack(apart).max()
    print(f"{path}: weights differ by {apart:.12f}, rate {result['LR']:.6f}")
if all(result["LR"] == result["FIRST_LR"] for result in results):
    print("the rate has not changed yet: a mistake with a scheduler would not show")
