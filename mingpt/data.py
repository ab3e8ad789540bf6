"""Text to tokens.

python -m mingpt.data
python -m mingpt.data mytext.txt books 'more/**/*.txt' --tokenizer tokenizer.json

The trainer encodes a text when it first sees it. These commands do only that, so that
you can encode a large text before a job starts. Without a path, the text is what every
Python carries: its manual.

The text is split before it is encoded: its end is for validation, a tenth of it and at
most about 1 MB. So the validation text is the same for all tokenizers, and you can
compare their losses in bits per byte. Nothing in the text is changed: CRLF stays CRLF,
and a byte order mark (BOM) stays a character.
"""

import argparse
import codecs
import contextlib
import dataclasses
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import stat
import sysconfig
import time
import unicodedata

import numpy as np

import utils

FORMAT = 1  # of the files in the cache: raise it if they, or the split, change
PIECE = 1 << 16  # bytes that are read, and encoded, at a time
MAX_VALIDATION = 1 << 20  # bytes: an exact loss over more takes long and says no more


# Find the text


@dataclasses.dataclass
class Document:
    """The bytes from `start` to `stop` of a file, or of `data`; UTF-8."""

    name: str
    data: bytes | None = None
    start: int = 0
    stop: int = 0

    def __len__(self):
        return self.stop - self.start

    def read(self):
        """Yield the bytes in pieces."""
        try:
            with (
                open(self.name, "rb") if self.data is None else io.BytesIO(self.data)
            ) as file:
                file.seek(self.start)
                left = len(self)
                while left and (piece := file.read(min(PIECE, left))):
                    left -= len(piece)
                    yield piece
        except OSError as error:
            utils.fail(f"cannot read {self.name}: {error.strerror}")

    def text(self, digest=None):
        """Yield the characters in pieces; `digest`, of hashlib, gets their bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        done, line = self.start, 1  # bytes that are decoded, and in which line they end
        for piece in itertools.chain(self.read(), [b""]):
            if digest:
                digest.update(piece)
            pending = len(decoder.getstate()[0])  # the first bytes of a character
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                utils.fail(
                    f"{self.name} is not UTF-8: in line {line}, byte"
                    f" {done + error.start + 1} of the file is"
                    f" 0x{error.object[error.start]:02x}"
                )
            done += pending + len(piece) - len(decoder.getstate()[0])
            line += text.count("\n")
            yield text


@dataclasses.dataclass
class Text:
    """Documents in their order, none of them empty. A newline stands between two."""

    name: str
    documents: list[Document]
    checksum: str  # of all documents

    def __len__(self):
        """How many bytes it has."""
        return sum(map(len, self.documents)) + max(0, len(self.documents) - 1)

    def split(self, fraction):
        """Two Texts: the beginning, to train on, and the end, to validate on.

        The cut is where a line or a document ends. If no line ends for long, it is
        between two characters. A newline that stands between two documents at the cut
        belongs to neither Text.
        """
        size = min(max(1, int(fraction * len(self))), MAX_VALIDATION, len(self) - 1)
        train, val = list(self.documents), []
        while len(train[-1]) <= size:
            val.insert(0, train.pop())
            size -= len(val[0]) + 1
        if size > 0:  # of the last document that is left
            last = train.pop()
            cut = find_cut(last, last.stop - size, at_a_line=bool(val))
            train.append(dataclasses.replace(last, stop=cut))
            if cut < last.stop:
                val.insert(0, dataclasses.replace(last, start=cut))
        return (dataclasses.replace(self, documents=x) for x in (train, val))


def find_cut(document, start, at_a_line):
    """Where the line ends in which the byte `start` is.

    If this line is long, so that it takes half of what follows, the place is where the
    first character begins. With `at_a_line`, it is the end of the line nevertheless.
    """
    after = b"".join(dataclasses.replace(document, start=start).read())
    end = after.find(b"\n", 0, len(after) if at_a_line else len(after) // 2)
    if end >= 0:
        return start + end + 1
    if at_a_line:
        return document.stop
    while after and after[0] & 0xC0 == 0x80:  # inside a character
        after = after[1:]
    return document.stop - len(after)


def load_text(paths="python-docs"):
    """The `Text` of one path or of several; else one line and exit status 2.

    A path is a file, a folder, a glob, python-docs (`pydoc_data.topics`, about 0.5 MB)
    or python-source (the standard library without its tests, about 12 MB). A folder is
    all files in it and below it whose names do not begin with a dot.

    The files are sorted by name, whatever the order of the paths is, so that it is the
    same on every machine. A file counts once, also if several paths or links lead to
    it: it would train and validate.

    The whole text is read once, for its checksum and to find what is not UTF-8.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    paths = [os.fspath(path) for path in paths]
    found = []
    for path in paths:
        if path == "python-docs":
            found.append(python_docs())
        elif path == "python-source":
            found += map(Document, python_source())
        else:
            found += map(Document, find_files(path))
    documents = {}
    for document in sorted(found, key=lambda x: x.name.replace(os.sep, "/")):
        documents.setdefault(os.path.realpath(document.name), document)
    digest = hashlib.sha256()
    for document in documents.values():
        document.stop = find_size(document)
        digest.update(b"%d " % len(document))
        for _ in document.text(digest):
            pass
    documents = [x for x in documents.values() if len(x)]
    name = ", ".join(paths)
    if not documents:
        utils.fail(f"there is no text in {name}")
    return Text(name, documents, digest.hexdigest())


def find_files(path):
    """The files that a path names."""
    if os.path.isdir(path):
        return files_below(path)
    if os.path.lexists(path):
        return [path]
    found = glob.glob(path, recursive=True)
    if not found:
        utils.fail(f"there is no {path}")
    if "**" in path:  # it matches folders and what is in them, loops included
        return [x for x in found if os.path.isfile(x)]
    return [file for x in found for file in find_files(x)]


def files_below(folder):
    """The files in a folder and below it that are not hidden. Links are followed."""

    def stop(error):
        utils.fail(f"cannot read {error.filename}: {error.strerror}")

    files, seen = [], set()
    for here, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        if os.path.realpath(here) in seen:  # a link may lead to a folder above it
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        folders[:] = sorted(x for x in folders if not x.startswith("."))
        files += [os.path.join(here, x) for x in names if not x.startswith(".")]
    return files


def find_size(document):
    """The bytes of a document, or one line and exit status 2 if it is no file."""
    if document.data is not None:
        return len(document.data)
    try:
        status = os.stat(document.name)
    except OSError as error:
        utils.fail(f"cannot read {document.name}: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):  # a pipe can be read only once
        utils.fail(f"cannot read {document.name}: it is not a regular file")
    return status.st_size


def python_docs():
    """The manual that `help()` shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        utils.fail(
            "this Python came without pydoc_data, which is the default text. Choose"
            " another text: python-source, or a file of yours"
        )
    text = "\n".join(topics[name] for name in sorted(topics))
    return Document("python-docs", text.encode())


def python_source():
    """The files of the standard library, except its tests."""
    folder = sysconfig.get_path("stdlib")
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = set(folders) - left_out
        files += [os.path.join(here, name) for name in names if name.endswith(".py")]
    if not files:
        utils.fail(f"python-source: there is no .py file in {folder}")
    return files


# Turn text into numbers


class ByteTokenizer:
    """A token is a byte of the text in UTF-8."""

    vocab_size = 256
    separator = None  # the token between two documents, if it is no newline

    def array(self, text):
        # An argument that is not UTF-8 arrives in surrogates: they become bytes again.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)

    def encode(self, text):
        return self.array(text).tolist()

    def decode(self, ids):
        return bytes(map(int, ids)).decode("utf-8", "replace")

    def state(self):
        return {"kind": "bytes"}

    def pieces(self, texts):
        """The same text in pieces that are encoded one by one."""
        return texts

    def arrays(self, pieces):
        """The tokens of each piece, and whether they decode to just these pieces."""
        return [self.array(piece) for piece in pieces], True

    def first_bytes(self, text):
        """How many bytes of the text its first token stands for."""
        return min(1, len(text))


class CharTokenizer(ByteTokenizer):
    """A token is a character. `chars` has each character of the vocabulary once."""

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self.table = np.full(0x110000, -1, np.int32)  # the token of each code point
        self.table[code_points(chars)] = np.arange(len(chars))

    @classmethod
    def of(cls, text):
        """The tokenizer of all characters of a `Text`, its end included."""
        seen = np.zeros(0x110000, bool)
        seen[ord("\n")] = len(text.documents) > 1
        for document in text.documents:
            for piece in document.text():
                seen[code_points(piece)] = True
        return cls("".join(map(chr, seen.nonzero()[0])))

    def array(self, text):
        tokens = self.table[code_points(text)]
        if len(tokens) and tokens.min() < 0:
            char = text[tokens.argmin()]
            utils.fail(
                f"the vocabulary has no {char!r} (U+{ord(char):04X},"
                f" {unicodedata.name(char, 'without a name')}): it has only the"
                " characters of the text that it was made from"
            )
        return tokens

    def decode(self, ids):
        return "".join(self.chars[i] for i in ids)

    def state(self):
        return {"kind": "chars", "chars": self.chars}

    def first_bytes(self, text):
        return len(text[:1].encode())


def code_points(text):
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


class FileTokenizer:
    """A tokenizer of the package `tokenizers`, from the content of its JSON file.

    It adds no special tokens. Where the text has the name of one, such as
    <|endoftext|>, this is encoded as the special token.
    https://huggingface.co/docs/tokenizers
    """

    # All up to the last letter or digit in front of a white space. There, a token ends.
    CUT = re.compile(r".*[^\W_](?=\s)", re.DOTALL)

    def __init__(self, content, name="the tokenizer"):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            utils.fail(f"{name} needs a package. Type: pip install tokenizers")
        try:
            self.tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the package raises nothing more exact
            utils.fail(f"{name} is no file of the package tokenizers: {error}")
        self.tokenizer.no_truncation()  # some files ask for the first 512 tokens only
        self.tokenizer.no_padding()
        # If numbers are missing, there are fewer tokens than the highest number says.
        self.vocab_size = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        self.separator = self.tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def state(self):
        return {"kind": "file", "json": self.tokenizer.to_str()}

    @functools.cached_property
    def can_be_cut(self):
        """Whether the tokens of a text are those of its pieces, if it is cut at `CUT`.

        Some tokenizers put a mark in front of each text that they get, as Llama 2's.
        """
        pieces = "One, two", "\nthree", " four"
        return self.encode("".join(pieces)) == sum(map(self.encode, pieces), [])

    def pieces(self, texts):
        """The same text, cut where this does not change the tokens, or nowhere."""
        rest, goal = "", 0 if self.can_be_cut else float("inf")
        for text in texts:
            rest += text
            if len(rest) < goal:
                continue
            piece = self.CUT.match(rest)
            if piece:
                yield piece[0]
                rest = rest[piece.end() :]
            goal = 2 * len(rest)  # or a long text without a place is searched often
        yield rest

    def arrays(self, pieces):
        encoded = self.tokenizer.encode_batch(pieces, add_special_tokens=False)
        ids = [x.ids for x in encoded]
        decoded = self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        # Some tokenizers decode without the space at the beginning.
        exact = all(
            x.removeprefix(" ") == y.removeprefix(" ")
            for x, y in zip(decoded, pieces, strict=True)
        )
        return [np.array(x, np.uint32) for x in ids], exact

    def first_bytes(self, text):
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        if not encoded.ids:
            return 0
        token, end = encoded.tokens[0], encoded.offsets[0][1]
        if type(self.tokenizer.decoder).__name__ == "ByteLevel":
            # A character of the token is a byte. Ġ is a space, or put in front.
            return len(token) - (token[0] == "Ġ" and text[0] != " ")
        if len(encoded.ids) > 1 and encoded.offsets[1][0] < end:
            # The first two share a character: a byte of it, or a mark in front of it.
            return int(token.startswith("<0x"))
        return len(text[:end].encode())


def make_tokenizer(state):
    """The tokenizer whose `state()` this is."""
    if state["kind"] == "bytes":
        return ByteTokenizer()
    if state["kind"] == "chars":
        return CharTokenizer(state["chars"])
    return FileTokenizer(state["json"])


def read_tokenizer(path):
    """The tokenizer in a file; else one line and exit status 2."""
    try:
        with open(path, encoding="utf-8") as file:
            return FileTokenizer(file.read(), path)
    except FileNotFoundError:
        utils.fail(f"--tokenizer {path}: choose chars, bytes, or a file that exists")
    except OSError as error:
        utils.fail(f"cannot read {path}: {error.strerror}")
    except UnicodeDecodeError:
        utils.fail(f"{path} is no file of the package tokenizers: it is not UTF-8")


# Encode once


@dataclasses.dataclass
class Corpus:
    """A text as tokens. `train` and `val` are 1-D arrays that are mapped from files.

    Their dtype is uint16, or uint32 if there are more than 65536 kinds of tokens.
    `val_bytes` is how many bytes of the text the tokens of `val` stand for, without the
    first token, which nothing predicts. `checksum` is of the tokens and the vocabulary:
    ranks compare it. `description` is a line for people.
    """

    train: np.ndarray
    val: np.ndarray
    tokenizer: ByteTokenizer | CharTokenizer | FileTokenizer
    vocab_size: int
    val_bytes: int
    checksum: str
    description: str


def prepare(paths="python-docs", tokenizer="chars", cache="tokens", val_fraction=0.1):
    """The `Corpus` of a text, from the cache if it is there; else one line and exit 2.

    `tokenizer`: chars, bytes, a file, or the `state()` of a tokenizer. Between two
    files of the text stands the token <|endoftext|>, or a newline if the tokenizer does
    not have this token.

    One process of a machine encodes while the others wait. The names in the folder
    `cache` follow from the content of the text and from the tokenizer, so that nobody
    takes the tokens of another text. You can delete the folder when no run uses it.
    """
    if not 0 < val_fraction < 1:
        utils.fail(f"val_fraction is {val_fraction}: choose one between 0 and 1")
    text = load_text(paths)
    if isinstance(tokenizer, dict):
        tokenizer = make_tokenizer(tokenizer)
    elif tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif tokenizer == "chars":
        tokenizer = None  # its vocabulary follows from the text
    else:
        tokenizer = read_tokenizer(tokenizer)
    state = tokenizer.state() if tokenizer else "chars"
    key = json.dumps([FORMAT, text.checksum, state, val_fraction])
    place = os.path.join(cache, hashlib.sha256(key.encode()).hexdigest()[:16])
    try:
        found = read_cache(place)
        if not found:
            os.makedirs(cache, exist_ok=True)
            with locked(f"{place}.lock"):
                found = read_cache(place)  # another process may have written it
                if not found:
                    encode(text, tokenizer, val_fraction, place, paths)
                    found = read_cache(place)
    except OSError as error:
        utils.fail(f"cannot keep the tokens in {cache}: {error.strerror}")
    facts, train, val = found
    tokenizer = tokenizer or make_tokenizer(facts["tokenizer"])
    description = (
        f"{text.name}: {len(text):,} bytes, {len(train):,} tokens to train on,"
        f" {len(val):,} to validate on, vocabulary of {tokenizer.vocab_size:,}"
    )
    if not facts["exact"]:
        description += (
            ". Some of the text is lost: the tokenizer does not decode to what it"
            " encoded, and bits per byte do not compare"
        )
    return Corpus(
        train,
        val,
        tokenizer,
        tokenizer.vocab_size,
        facts["val_bytes"],
        facts["checksum"],
        description,
    )


@contextlib.contextmanager
def locked(path):
    """Let one process of a machine at a time into the block.

    If a process dies, the kernel ends its lock, so that nobody waits for it. On a file
    system without locks, several processes do the same work and write equal files. To
    avoid this, encode the text before the job starts.
    """
    with open(path, "w") as file:
        if utils.fcntl:
            with contextlib.suppress(OSError):
                try:
                    utils.fcntl.flock(file, utils.fcntl.LOCK_EX | utils.fcntl.LOCK_NB)
                except BlockingIOError:
                    if os.environ.get("LOCAL_RANK", "0") == "0":
                        utils.say("waiting for another process that encodes the text")
                    utils.fcntl.flock(file, utils.fcntl.LOCK_EX)
        yield


def read_cache(place):
    """(facts, train, val), or None unless all of it is there."""
    try:
        with open(f"{place}.json", encoding="utf-8") as file:
            facts = json.load(file)
        dtype = np.dtype(facts["dtype"])
        parts = []
        for name in ("train", "val"):
            path, length = f"{place}.{name}.bin", facts[name]
            if os.path.getsize(path) != length * dtype.itemsize:
                return None
            empty = np.zeros(0, dtype)  # a file without bytes cannot be mapped
            parts.append(np.memmap(path, dtype, "r") if length else empty)
        return facts, *parts
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None


def encode(text, tokenizer, val_fraction, place, paths):
    """Write the tokens of both parts and, at last, the facts that make them count.

    Each file is renamed into place when it is whole. So a kill leaves nothing that the
    next run would take, and the next run removes what it leaves.
    """
    folder = glob.escape(os.path.dirname(place))
    for left_over in glob.glob(f"{folder}/*.????????.tmp"):
        utils.remove_left_over(left_over[: -len(".12345678.tmp")])
    tokenizer = tokenizer or CharTokenizer.of(text)
    state = tokenizer.state()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    facts = {"dtype": dtype.str, "tokenizer": state, "exact": True}
    digest = hashlib.sha256(json.dumps(state).encode())
    train, val = text.split(val_fraction)
    for name, part in (("train", train), ("val", val)):
        facts[name] = 0
        with utils.replacing(f"{place}.{name}.bin") as file:
            for tokens, exact in encode_part(part, tokenizer):
                data = tokens.astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                facts[name] += len(tokens)
                facts["exact"] &= exact
    facts["val_bytes"] = len(val)
    if val.documents:
        first = next(tokenizer.pieces(val.documents[0].text()))
        facts["val_bytes"] -= tokenizer.first_bytes(first)
    facts["checksum"] = digest.hexdigest()[:16]
    if load_text(paths).checksum != text.checksum:
        utils.fail("the text has changed while it was encoded: try again")
    with utils.replacing(f"{place}.json") as file:
        file.write(json.dumps(facts).encode())


def encode_part(text, tokenizer):
    """Yield the tokens of a `Text` in arrays, and whether they decode to their text."""

    def pieces():
        for number, document in enumerate(text.documents):
            if number:
                yield "\n" if tokenizer.separator is None else None
            yield from tokenizer.pieces(document.text())

    done, said, stream = 0, time.monotonic(), pieces()
    while batch := list(itertools.islice(stream, 64)):  # the memory is for so many
        texts = [x for x in batch if x is not None]
        arrays, exact = tokenizer.arrays(texts)
        of_texts, separator = iter(arrays), np.array([tokenizer.separator])
        tokens = [separator if x is None else next(of_texts) for x in batch]
        yield np.concatenate(tokens), exact
        done += sum(len(x.encode()) for x in texts)
        if time.monotonic() > said + 10:
            said = time.monotonic()
            utils.say(f"encoded {done / 1e6:,.0f} of {len(text) / 1e6:,.0f} MB")


def check_length(corpus, block_size):
    """End with one line and exit status 2 if the text is too short for one block."""
    length = len(corpus.train)
    if length <= block_size:
        utils.fail(
            f"the text has {length} tokens to train on, and a block of {block_size}"
            f" needs {block_size + 1}: choose a smaller block or a longer text"
        )
    if len(corpus.val) < 2:
        utils.fail(
            f"the text has too few tokens to validate on ({len(corpus.val)}): choose a"
            " longer text"
        )


# Encode from the command line


def add_options(parser):
    """The options of the text, which the trainer has as well."""
    parser.add_argument(
        "--tokenizer",
        default="chars",
        help="chars (characters; this is the default), bytes, or a file of the package"
        " tokenizers, such as Hugging Face's tokenizer.json",
    )
    parser.add_argument(
        "--cache",
        default="tokens",
        help="the folder in which encoded texts are kept (default: tokens)",
    )
    parser.add_argument(
        "--val-fraction",
        "--val_fraction",
        type=utils.positive_float,
        default=0.1,
        help="how much of the text is for validation, at most about 1 MB (default:"
        " 0.1)",
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = utils.fail
    parser.add_argument(
        "data",
        nargs="*",
        default=["python-docs"],
        help="files, folders, globs, python-docs (the default) or python-source",
    )
    add_options(parser)
    args = parser.parse_args()
    corpus = prepare(args.data, args.tokenizer, args.cache, args.val_fraction)
    utils.say(corpus.description)


if __name__ == "__main__":
    main()
