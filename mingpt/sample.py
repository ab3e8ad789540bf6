"""Let a trained GPT write.

python -m mingpt.sample --prompt "The "
python -m mingpt.sample --prompt "The " --init-from gpt2 --tokenizer gpt2/tokenizer.json
"""

import argparse
import importlib

import torch

import utils
from mingpt import data, options


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = utils.fail
    parser.add_argument("--prompt", default="\n", help="how the text begins")
    parser.add_argument(
        "--tokens", type=utils.positive_int, default=500, help="to write (default: 500)"
    )
    parser.add_argument(
        "--temperature",
        type=options.not_negative,
        default=0.8,
        help="0 takes the most likely token, larger values dare more (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=utils.positive_int, help="choose among the K most likely tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--snapshot-path",
        default="mingpt.pt",
        help="what mingpt.train has saved (default: mingpt.pt)",
    )
    parser.add_argument(
        "--init-from", metavar="PATH", help="GPT-2's weights instead of a snapshot"
    )
    parser.add_argument("--tokenizer", help="the tokenizer.json of --init-from")
    parser.add_argument("--device", default="auto", help="auto (the default), cpu, ...")
    return parser


def load_snapshot(path):
    """(model, tokenizer) of a snapshot that mingpt.train has saved."""
    try:
        snapshot = utils.read_snapshot(path, mmap=True)
        saved = snapshot["CONFIGURATION"]
    except KeyError:
        utils.fail(f"there is no snapshot of mingpt.train in {path}")
    except Exception as error:
        utils.fail(f"cannot read {path}: {str(error).splitlines()[0]}")
    try:
        module = importlib.import_module(saved["model"])
    except ModuleNotFoundError as error:
        utils.fail(f"{path} has a model of {saved['model']}: {error}")
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(snapshot["MODEL_STATE"])
    return model, data.make_tokenizer(saved["tokenizer"])


def load_gpt2(path, tokenizer_file):
    """(model, tokenizer) of GPT-2's weights in Hugging Face's format."""
    from mingpt import gpt2_weights

    if not tokenizer_file:
        utils.fail("--init-from needs --tokenizer with the tokenizer.json of the model")
    return gpt2_weights.load_gpt2(path), data.read_tokenizer(tokenizer_file)


def main(args):
    device = utils.get_device(args.device)
    if args.tokenizer and not args.init_from:
        utils.fail("--tokenizer is for --init-from: a snapshot has its own tokenizer")
    if args.init_from:
        model, tokenizer = load_gpt2(args.init_from, args.tokenizer)
    else:
        model, tokenizer = load_snapshot(args.snapshot_path)
    prompt = torch.tensor([tokenizer.encode(args.prompt)], device=device)
    if prompt.numel() == 0:
        utils.fail("--prompt is empty: the model needs a first token")
    tokens = model.to(device).generate(
        prompt,
        args.tokens,
        args.temperature,
        args.top_k,
        torch.Generator(device).manual_seed(args.seed),
    )
    utils.say(tokenizer.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main(make_parser().parse_args())
