"""Let a trained GPT write.

python -m mingpt.sample --prompt "The "
"""

import importlib

import torch

import utils
from mingpt import data


def make_parser(doc):
    parser = utils.make_parser(doc, by_epochs=False)
    parser.add_argument("--prompt", default="\n", help="how the text begins")
    parser.add_argument(
        "--tokens", type=utils.positive_int, default=500, help="to write (default: 500)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 takes the most likely token; larger is bolder (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=utils.positive_int, help="choose among the K most likely tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    return parser


def load(path, device):
    """(model in eval mode, tokenizer) of a snapshot that mingpt.train has saved."""
    try:
        snapshot = utils.read_snapshot(path, mmap=True)
        fields = snapshot["CONFIGURATION"]
    except OSError as error:
        utils.fail(f"cannot read {path}: {error.strerror}")
    except Exception:
        utils.fail(f"{path} is no snapshot of mingpt.train")
    module = importlib.import_module(fields["model"])
    config = module.GPTConfig(**fields["config"])
    model = module.GPT(config)
    model.load_state_dict(snapshot["MODEL_STATE"])
    return model.to(device).eval(), data.make_tokenizer(fields["tokenizer"])


def main(args):
    device = utils.get_device(args.device)
    model, tokenizer = load(args.snapshot_path, device)
    prompt = torch.tensor([tokenizer.encode(args.prompt)], device=device)
    generator = torch.Generator(device).manual_seed(args.seed)
    tokens = model.generate(
        prompt, args.tokens, args.temperature, args.top_k, generator
    )
    utils.say(tokenizer.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main(make_parser(__doc__).parse_args())
