"""Let a trained GPT write.

python -m mingpt.sample --prompt "The "
python -m mingpt.sample --prompt "The " --init-from gpt2 --tokenizer gpt2/tokenizer.json
"""

import importlib
import sys

import torch

import utils
from mingpt import data, tokenizer


def load_snapshot(path):
    """(model, tokenizer) of a snapshot that mingpt.train has saved."""
    snapshot = utils.read_snapshot(path)
    if not snapshot or "CONFIGURATION" not in snapshot:
        utils.error(f"there is no snapshot of mingpt.train in {path}")
    saved = snapshot["CONFIGURATION"]
    module = importlib.import_module(saved["model"])
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(snapshot["MODEL_STATE"])
    return model, tokenizer.make_tokenizer(saved["tokenizer"])


def main():
    parser = data.new_parser(__doc__)
    add = parser.add_argument
    add("--prompt", default="\n", help="how the text begins, at least one token")
    add("--tokens", type=utils.positive_int, default=500, help="to write (500)")
    add("--temperature", type=float, default=0.8, help="0: the most likely token (0.8)")
    add("--top-k", type=utils.positive_int, help="draw from the K most likely tokens")
    add("--seed", type=int, default=0, help="of the draws (0)")
    add("--snapshot-path", default="mingpt.pt", help="of mingpt.train (mingpt.pt)")
    add("--init-from", help="GPT-2's weights instead of a snapshot")
    add("--tokenizer", help="the tokenizer.json of --init-from")
    add("--device", default="auto", help="auto (the default), cpu, ...")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")
    device = utils.set_device(args.device)
    if args.init_from:
        from mingpt import gpt2_weights  # it needs safetensors

        model = gpt2_weights.load_gpt2(args.init_from)
        coder = tokenizer.read_tokenizer(args.tokenizer)
    else:
        model, coder = load_snapshot(args.snapshot_path)
    model.to(device)
    tokens = model.generate(
        torch.tensor([coder.encode(args.prompt)], device=device),
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        generator=torch.Generator(device).manual_seed(args.seed % 2**64),
    )
    print(coder.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main()
