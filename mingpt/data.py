"""Text to tokens.

python -m mingpt.data
python -m mingpt.data mytext.txt books 'more/**/*.txt' --tokenizer tokenizer.json

The trainer encodes a text when it first sees it. These commands do only that: type one
before a job with many processes, or each process encodes the text for itself. Without a
path, the text is what every Python carries: its manual.

The end of the text is for validation, a tenth of it and at most about 1 MB. The text is
split before it is encoded, so that all tokenizers validate on the same text, and you
can compare their losses in bits per byte. Nothing in the text is changed.
"""

import argparse
import dataclasses
import glob
import hashlib
import json
import os
import tempfile

import numpy as np

import utils
from mingpt.tokenizer import ByteTokenizer, CharTokenizer, read_tokenizer

FORMAT = 2  # of the files in the cache: raise it if they, or the split, change
PIECE = 1 << 20  # characters that are read, and encoded, at a time
MAX_VALIDATION = 1 << 20  # bytes: an exact loss over more takes long and says no more


def find_files(paths):
    """The files of some paths, sorted by name, each of them once.

    A path is a file, a folder, a glob, or python-docs (`pydoc_data.topics`, about
    0.5 MB). Names that begin with a dot are left out.
    """
    found = []
    for path in paths:
        if path == "python-docs" or os.path.isfile(path):
            files = [path]
        else:
            if os.path.isdir(path):
                path = os.path.join(glob.escape(path), "**")
            names = glob.glob(path, recursive=True)
            files = [name for name in names if os.path.isfile(name)]
        if not files:
            utils.error(f"there is no text in {path}")
        found += files
    # Of several names of a file, the first in the order is kept.
    found.sort(reverse=True)
    kept = {os.path.realpath(path): path for path in found}
    return sorted(kept.values())


def read(path):
    """Yield the text of a file in pieces that end where a line ends."""
    if path == "python-docs":
        # Imported here, because it is large and no other text needs it.
        from pydoc_data.topics import topics

        yield "\n".join(topics[name] for name in sorted(topics))
        return
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while True:
                piece = file.read(PIECE) + file.readline()
                if not piece:  # the end of the file
                    break
                yield piece
    except (OSError, UnicodeDecodeError) as error:
        utils.error(f"cannot read {path}: {error}")


def split(files, start):
    """Yield (is_val, piece) for all of the text. A piece is None between two files.

    The text is split after the line that has byte number `start`, or at this byte if
    the line is long.
    """
    is_val = False
    for number, path in enumerate(files):
        if number > 0:
            yield is_val, None
            start -= 1  # what stands between two files counts as a newline
        for piece in read(path):
            data = piece.encode()
            if start < len(data) and not is_val:
                cut = find_cut(data, max(0, start))
                yield False, data[:cut].decode()
                is_val = True
                data = data[cut:]
            yield is_val, data.decode()
            start -= len(data)


def find_cut(data, start):
    """Where the line of the byte `start` ends; if it is long, a character near it."""
    middle = start + (len(data) - start) // 2
    end = data.find(b"\n", start, middle)
    if end >= 0:
        return end + 1
    # In UTF-8, the bytes inside a character, and only they, begin with the bits 10.
    while start < len(data) and data[start] & 0b11000000 == 0b10000000:
        start += 1
    return start


@dataclasses.dataclass
class Corpus:
    """A text as tokens, in arrays that are mapped from files."""

    train: np.ndarray  # of uint16, or uint32 for more than 65536 kinds of tokens
    val: np.ndarray
    tokenizer: object  # one of mingpt/tokenizer.py
    vocab_size: int
    val_bytes: int  # that `val` stands for, but for its first token: none predicts it
    checksum: str  # of the text, the tokenizer and the split: ranks compare it
    description: str  # a line for people


def prepare(paths=("python-docs",), tokenizer="chars", cache="tokens", fraction=0.1):
    """The `Corpus` of a text, from the cache if it is there.

    Between two files stands the token <|endoftext|>, or a newline if `tokenizer` has no
    such token. The names in the folder `cache` follow from the content of the text and
    from the tokenizer, so that nobody takes the tokens of another text.
    """
    files = find_files(paths)
    digests, size, chars = survey(files)
    if not size or not fraction:
        utils.error(f"no text to validate on: {size} bytes, --val-fraction {fraction}")
    validation = max(1, min(int(fraction * size), MAX_VALIDATION))
    if tokenizer == "chars":
        tokenizer = CharTokenizer("".join(sorted(chars)))
    elif tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = read_tokenizer(tokenizer)
    vocab_size = tokenizer.vocab_size
    dtype = "<u2" if vocab_size <= 65536 else "<u4"
    key = json.dumps([FORMAT, digests, tokenizer.state(), fraction])
    checksum = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = os.path.join(cache, checksum)
    if not os.path.exists(folder):
        pieces = split(files, size - validation)
        encode(pieces, tokenizer, dtype, folder)
    train = np.memmap(f"{folder}/train", dtype, mode="r")
    val = np.memmap(f"{folder}/val", dtype, mode="r")
    with open(f"{folder}/val_bytes") as file:
        val_bytes = int(file.read())
    first_token = tokenizer.decode(val[:1])
    return Corpus(
        train=train,
        val=val,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val_bytes=val_bytes - len(first_token.encode()),
        checksum=checksum,
        description=(
            f"{', '.join(paths)}: {size:,} bytes,"
            f" {len(train):,} tokens to train on, {len(val):,} to validate on,"
            f" vocabulary of {vocab_size:,}"
        ),
    )


def survey(files):
    """([the SHA-256 of each file], the bytes of the text, the set of its characters)"""
    digests = []
    size = 0
    chars = set()
    for path in files:
        digest = hashlib.sha256()
        for piece in read(path):
            data = piece.encode()
            digest.update(data)
            size += len(data)
            chars.update(piece)
        digests.append(digest.hexdigest())
    if len(files) > 1:  # a newline between two files
        size += len(files) - 1
        chars.add("\n")
    return digests, size, chars


def encode(pieces, tokenizer, dtype, folder):
    """Write the tokens of both parts into a folder, whole or not at all."""
    cache = os.path.dirname(folder)
    val_bytes = 0
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        new = f"{temporary}/new"
        os.mkdir(new)
        with open(f"{new}/train", "wb") as train, open(f"{new}/val", "wb") as val:
            for is_val, piece in pieces:
                text = "\n" if piece is None else piece
                tokens = tokenizer.encode(text)
                if piece is None and tokenizer.separator is not None:
                    tokens = [tokenizer.separator]
                file = val if is_val else train
                np.array(tokens, dtype).tofile(file)
                if is_val:
                    val_bytes += len(text.encode())
        with open(f"{new}/val_bytes", "w") as file:
            file.write(str(val_bytes))
        try:
            os.rename(new, folder)
        except OSError:
            if not os.path.exists(folder):  # else another process was quicker
                raise


def new_parser(doc):
    """A parser without options. `doc` is the docstring of the program."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = utils.error
    return parser


def fraction(text):
    """`text` as a float from 0 on and below 1."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on and below 1")
    return float(text)


def add_options(parser):
    """The options of the text, which the trainer has as well."""
    parser.add_argument(
        "--tokenizer",
        default="chars",
        help="chars (characters; the default), bytes, or a file of the package"
        " tokenizers, as tokenizer.json",
    )
    parser.add_argument(
        "--cache",
        default="tokens",
        help="the folder in which encoded texts are kept (default: tokens)",
    )
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        default=0.1,
        help="how much of the text is for validation, at most about 1 MB"
        " (default: 0.1)",
    )


def main():
    parser = new_parser(__doc__)
    parser.add_argument(
        "data",
        nargs="*",
        default=["python-docs"],
        help="files, folders, globs or python-docs (the default)",
    )
    add_options(parser)
    args = parser.parse_args()
    corpus = prepare(args.data, args.tokenizer, args.cache, args.val_fraction)
    print(corpus.description)


if __name__ == "__main__":
    main()
