"""Text to tokens, and tokens to batches.

python -m mingpt.data                        # what every Python carries: its manual
python -m mingpt.data mytext.txt books/ 'more/**/*.txt' --tokenizer tokenizer.json

The trainer encodes the text itself. Type these commands if you want to encode it before
a job starts on the cluster.

The text is split before it is encoded: its end, a tenth of it and at most about 1 MB,
is for validation. So the validation text is the same for each tokenizer, and losses in
bits per byte compare. Nothing in the text is changed: a CRLF stays a CRLF, a byte order
mark (BOM) stays a character.
"""

import argparse
import codecs
import contextlib
import dataclasses
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
import torch
from torch.utils.data import Dataset, Sampler

import utils

FORMAT = 1  # of the files in the cache: raise it if they or the split change
CHUNK = 1 << 16  # bytes that are read and encoded in one piece
MAX_VALIDATION = 1 << 20  # bytes: an exact loss over more takes long and says no more
BUILT_IN = ("python-docs", "python-source")


# Find the text


@dataclasses.dataclass
class Document:
    """The bytes from `start` to `stop` of a file, or of `data`."""

    name: str
    data: bytes | None = None
    start: int = 0
    stop: int = 0

    def __len__(self):
        return self.stop - self.start

    def read(self, size=CHUNK):
        """Yield its bytes in pieces."""
        try:
            with (
                open(self.name, "rb") if self.data is None else io.BytesIO(self.data)
            ) as file:
                file.seek(self.start)
                left = len(self)
                while left and (piece := file.read(min(size, left))):
                    left -= len(piece)
                    yield piece
        except OSError as error:
            utils.fail(f"cannot read {self.name}: {error.strerror}")

    def text(self):
        """Yield its characters in pieces, or end with the place of a bad byte."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        done, line = self.start, 1  # bytes that are decoded, and the line they end in
        for piece in itertools.chain(self.read(), [b""]):
            pending = decoder.getstate()[0]
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                good = error.object[: error.start]
                utils.fail(
                    f"{self.name} is not UTF-8: line {line + good.count(10)}, byte"
                    f" {done + error.start + 1} of the file is"
                    f" 0x{error.object[error.start]:02x}"
                )
            done += len(pending) + len(piece) - len(decoder.getstate()[0])
            line += text.count("\n")
            yield text


@dataclasses.dataclass
class Text:
    """Documents, none of them empty, in their order; a newline stands between two."""

    documents: list[Document]
    checksum: str  # of their contents

    def __len__(self):
        """In bytes."""
        return sum(map(len, self.documents)) + max(0, len(self.documents) - 1)

    def split(self, fraction):
        """Two Texts: what trains, and the end, which validates.

        The cut is at the end of a line, or between two characters where no line ends
        for long. A newline between two documents at the cut belongs to neither part.
        """
        size = min(max(1, int(fraction * len(self))), MAX_VALIDATION)
        documents = list(self.documents)
        validation = []
        while len(documents[-1]) < size:
            validation.insert(0, documents.pop())
            size -= len(validation[0]) + 1
        last = documents.pop()
        cut = last.stop - max(size, 0)
        if size > 0:
            cut = line_end(last, cut, size // 2)
        if cut > last.start:
            documents.append(dataclasses.replace(last, stop=cut))
        if cut < last.stop:
            validation.insert(0, dataclasses.replace(last, start=cut))
        return Text(documents, self.checksum), Text(validation, self.checksum)


def line_end(document, start, length):
    """The end of the first line that ends in `length` bytes from `start`.

    If there is none, the first place from `start` on at which a character begins.
    """
    part = dataclasses.replace(document, start=start)
    head = b"".join(part.read())
    end = head[:length].find(b"\n")
    if end >= 0:
        return start + end + 1
    inside = itertools.takewhile(lambda byte: byte & 0xC0 == 0x80, head)
    return start + len(list(inside))


def load_text(paths="python-docs"):
    """The `Text` of one path or several; else one line and exit status 2.

    A path is a file, a folder with all that is in it and not hidden, a glob, or
    python-docs (`pydoc_data.topics`, about 0.5 MB) or python-source (the standard
    library without its tests, about 12 MB). Each file counts once, and files are sorted
    by name, so that the order is the same on every machine.

    All of it is read once, for its checksum and to find bytes that are not UTF-8.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    documents = []
    for path in map(os.fspath, paths):
        if path == "python-docs":
            documents.append(python_docs())
        elif path == "python-source":
            documents += map(Document, python_source())
        else:
            documents += map(Document, find_files(path))
    # A file that is named twice would train and validate.
    documents = {os.path.realpath(x.name): x for x in documents}.values()
    documents = sorted(documents, key=lambda x: x.name.replace(os.sep, "/"))
    digest = hashlib.sha256()
    for document in documents:
        scan(document, digest)
    documents = [x for x in documents if len(x)]
    if not documents:
        utils.fail(f"there is no text in {', '.join(map(str, paths))}")
    return Text(documents, digest.hexdigest())


def scan(document, digest):
    """Set the size of a document, check that it is UTF-8, feed it to `digest`."""
    if document.data is None:
        try:
            status = os.stat(document.name)
        except OSError as error:
            utils.fail(f"cannot read {document.name}: {error.strerror}")
        if not stat.S_ISREG(status.st_mode):  # a pipe can be read only once
            utils.fail(f"cannot read {document.name}: that is no regular file")
        document.stop = status.st_size
    else:
        document.stop = len(document.data)
    digest.update(b"%d " % len(document))
    for piece in document.read():
        digest.update(piece)
    for _ in document.text():
        pass


def find_files(path):
    """The files that a path names: itself, those in a folder, those a glob matches."""
    if os.path.isdir(path):
        return files_below(path)
    if os.path.lexists(path):
        return [path]
    found = glob.glob(path, recursive=True)
    if not found:
        utils.fail(f"there is no {path}")
    # A pattern with ** matches folders, and what is in them as well.
    if "**" in path:
        return [x for x in found if not os.path.isdir(x)]
    return [file for x in found for file in find_files(x)]


def files_below(folder, seen=()):
    """All files below a folder that are not hidden; a link to a folder is followed."""
    here = os.path.realpath(folder)
    if here in seen:  # a link to a folder above itself
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda x: x.name)
    except OSError as error:
        utils.fail(f"cannot read {folder}: {error.strerror}")
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if os.path.isdir(entry.path):
            yield from files_below(entry.path, (*seen, here))
        else:
            yield entry.path


def python_docs():
    """Python's manual as far as `help()` shows it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        utils.fail(
            "this Python came without pydoc_data, the default text: name another one,"
            " such as --data python-source"
        )
    text = "\n".join(topics[name] for name in sorted(topics))
    return Document("python-docs", text.encode())


def python_source():
    """The files of the standard library, but those of its tests."""
    folder = sysconfig.get_path("stdlib")
    no_text = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = []
    for path, folders, names in os.walk(folder):
        folders[:] = set(folders) - no_text
        found += [os.path.join(path, name) for name in names if name.endswith(".py")]
    if not found:
        utils.fail(f"python-source: there is no .py file in {folder}")
    return found


# Turn text into numbers


class CharTokenizer:
    """A token is a character; `chars` has each of them once."""

    separator = None

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self.table = np.full(0x110000, -1, np.int32)  # of each code point, the token
        self.table[code_points(chars)] = np.arange(len(chars))

    @classmethod
    def of(cls, text):
        """The tokenizer of all characters of a `Text`, validation included."""
        seen = np.zeros(0x110000, bool)
        seen[ord("\n")] = len(text.documents) > 1
        for document in text.documents:
            for piece in document.text():
                seen[code_points(piece)] = True
        return cls("".join(map(chr, seen.nonzero()[0])))

    def array(self, text):
        tokens = self.table[code_points(text)]
        if tokens.size and tokens.min() < 0:
            char = text[int(tokens.argmin())]
            name = unicodedata.name(char, "no name")
            utils.fail(
                f"the vocabulary has no {char!r} (U+{ord(char):04X}, {name}): it has"
                f" the {self.vocab_size} characters of the text it was made from"
            )
        return tokens

    def encode(self, text):
        return self.array(text).tolist()

    def decode(self, ids):
        return "".join(self.chars[i] for i in ids)

    def state(self):
        return {"kind": "chars", "chars": self.chars}

    def pieces(self, texts):
        """The same text in pieces that can be encoded one by one."""
        return texts

    def arrays(self, pieces):
        """The tokens of a few pieces: an array of each."""
        return [self.array(piece) for piece in pieces]

    def first_bytes(self, text):
        """How many bytes of `text` its first token stands for."""
        return len(text[:1].encode())


class ByteTokenizer(CharTokenizer):
    """A token is a byte of the text's UTF-8."""

    vocab_size = 256

    def __init__(self):
        pass

    def array(self, text):
        # What was typed as no UTF-8 comes in surrogates: the bytes come back from them.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")

    def state(self):
        return {"kind": "bytes"}

    def first_bytes(self, text):
        return min(1, len(text))


class FileTokenizer:
    """A tokenizer from the text of a file of `tokenizers`, such as tokenizer.json.

    https://huggingface.co/docs/tokenizers. The name of a special token in a text, such
    as <|endoftext|>, is encoded as this token. No special tokens are added.
    """

    # In front of a white space and after a letter or digit, all tokenizers end a token.
    CUT = re.compile(r".*[^\W_](?=\s)", re.DOTALL)

    def __init__(self, json_text, name="the tokenizer"):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # or a fork would warn
        try:
            from tokenizers import Tokenizer
        except ImportError:
            utils.fail(f"{name} needs a package. Type: pip install tokenizers")
        try:
            self.tokenizer = Tokenizer.from_str(json_text)
        except Exception as error:  # the package raises nothing more exact
            utils.fail(f"{name} is no tokenizer file: {error}")
        self.tokenizer.no_truncation()  # or all after the first so many tokens is lost
        self.tokenizer.no_padding()
        # Numbers may be left out, so that there are fewer tokens than the last says.
        self.vocab_size = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        self.separator = self.tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def state(self):
        return {"kind": "file", "json": self.tokenizer.to_str()}

    def can_be_cut(self):
        """Whether the tokens of a text are those of its pieces.

        A few tokenizers mark the beginning of each text that they get, as Llama's.
        """
        parts = "One, two", "\nthree", " four"
        return self.encode("".join(parts)) == sum(map(self.encode, parts), [])

    def pieces(self, texts):
        """The same text, cut where the tokens do not depend on the cut."""
        rest, goal = "", CHUNK if self.can_be_cut() else float("inf")
        for text in texts:
            rest += text
            if len(rest) < goal:
                continue
            piece = self.CUT.match(rest)
            if piece:
                yield piece[0]
                rest = rest[piece.end() :]
            goal = CHUNK if piece else 2 * len(rest)
        yield rest

    def arrays(self, pieces):
        encoded = self.tokenizer.encode_batch(pieces, add_special_tokens=False)
        return [np.array(x.ids, np.uint32) for x in encoded]

    def first_bytes(self, text):
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        if not encoded.ids:
            return 0
        token = encoded.tokens[0]
        decoder = self.tokenizer.decoder
        if (
            type(decoder).__name__ == "ByteLevel"
            and encoded.special_tokens_mask[0] == 0
        ):
            return len(token)  # there each character stands for a byte
        return len(text[: encoded.offsets[0][1]].encode())


def code_points(text):
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def make_tokenizer(state):
    """The tokenizer whose `state()` this is."""
    if state["kind"] == "chars":
        return CharTokenizer(state["chars"])
    return ByteTokenizer() if state["kind"] == "bytes" else FileTokenizer(state["json"])


# Encode once


@dataclasses.dataclass
class Corpus:
    """A text as tokens. `train` and `val` are 1-D arrays, mapped from files.

    Their dtype is uint16, or uint32 for more than 65536 tokens. `val_bytes`: how many
    bytes of text the tokens of `val` stand for, without the first one, which nothing
    predicts. `checksum`: of the tokens and the vocabulary. Ranks compare it.
    """

    train: np.ndarray
    val: np.ndarray
    tokenizer: object
    vocab_size: int
    val_bytes: int
    checksum: str
    description: str


def prepare(paths="python-docs", tokenizer="chars", cache="tokens", val_fraction=0.1):
    """The `Corpus` of a text, encoded or from the cache; else one line, exit status 2.

    `tokenizer`: chars, bytes, or a file. Between two files of the text stands the token
    <|endoftext|> if the tokenizer has it, else a newline.

    One process of a machine encodes while the others wait. The files in the folder
    `cache` have a name that follows from the content of the text and of the tokenizer's
    file: what was encoded for another text is never taken.
    """
    if not 0 < val_fraction < 1:
        utils.fail(
            f"the fraction to validate on is {val_fraction}, not between 0 and 1"
        )
    text = load_text(paths)
    tokenizer_file = None
    if tokenizer not in ("chars", "bytes"):
        tokenizer_file = read_tokenizer_file(tokenizer)
    key = [FORMAT, text.checksum, tokenizer_file or tokenizer, val_fraction]
    fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    place = os.path.join(cache, fingerprint)
    try:
        found = read_cache(place)
        if not found:
            os.makedirs(cache, exist_ok=True)
            with locked(place + ".lock"):
                found = read_cache(place)  # another process may have been quicker
                if not found:
                    encode(text, tokenizer, tokenizer_file, val_fraction, place)
                    if load_text(paths).checksum != text.checksum:
                        os.remove(place + ".json")
                        utils.fail("the text has changed while it was encoded")
                    found = read_cache(place)
    except OSError as error:
        utils.fail(f"cannot write the tokens to {cache}: {error.strerror}")
    facts, train, val = found
    tokenizer = make_tokenizer(facts["tokenizer"])
    names = ", ".join([paths] if isinstance(paths, str) else map(str, paths))
    description = (
        f"{names}: {len(text):,} bytes in {len(text.documents):,} files,"
        f" {len(train):,} tokens to train on, {len(val):,} to validate on, of"
        f" {tokenizer.vocab_size:,} kinds"
    )
    if not facts["exact"]:
        description += (
            ". The tokenizer does not give all of the text back: bits per byte do not"
            " compare with those of other tokenizers"
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


def read_tokenizer_file(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        utils.fail(f"--tokenizer {path}: choose chars, bytes, or a file that exists")
    except OSError as error:
        utils.fail(f"cannot read {path}: {error.strerror}")
    except UnicodeDecodeError:
        utils.fail(f"{path} is no tokenizer file: it is not UTF-8")


@contextlib.contextmanager
def locked(path):
    """Only one process of a machine at a time is in the block.

    The kernel ends the lock of a process that dies, so that nobody waits for it. Where
    there are no locks, several processes do the same work, and each does it well.
    """
    with open(path, "w") as file:
        if utils.fcntl:
            with contextlib.suppress(OSError):
                utils.fcntl.flock(file, utils.fcntl.LOCK_EX)
        yield


def read_cache(place):
    """(facts, train, val) if all of it is there, else None."""
    try:
        with open(place + ".json", encoding="utf-8") as file:
            facts = json.load(file)
        parts = []
        for part in ("train", "val"):
            path, dtype = f"{place}.{part}.bin", np.dtype(facts["dtype"])
            size = facts[part] * dtype.itemsize
            if os.path.getsize(path) != size:
                return None
            empty = np.zeros(0, dtype)  # an empty file cannot be mapped
            parts.append(np.memmap(path, dtype, "r") if size else empty)
        return facts, *parts
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def encode(text, kind, tokenizer_file, val_fraction, place):
    """Write the tokens of both parts, and last the facts, which say that all is whole.

    Each file is renamed into place when it is complete: a kill leaves nothing that
    the next run takes for the whole.
    """
    if kind == "chars":
        tokenizer = CharTokenizer.of(text)
    elif kind == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = FileTokenizer(tokenizer_file, kind)
    state = tokenizer.state()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    facts = {"dtype": dtype.str, "tokenizer": state, "exact": True}
    digest = hashlib.sha256(json.dumps(state).encode())
    train, val = text.split(val_fraction)
    for name, part in (("train", train), ("val", val)):
        facts[name] = 0
        with utils.replacing(f"{place}.{name}.bin") as file:
            for tokens, exact in encode_part(part, tokenizer):
                tokens = tokens.astype(dtype)
                file.write(tokens.data)
                digest.update(tokens.data)
                facts[name] += len(tokens)
                facts["exact"] &= exact
    facts["val_bytes"] = len(val)
    if val.documents:
        first = next(tokenizer.pieces(val.documents[0].text()))
        facts["val_bytes"] -= tokenizer.first_bytes(first)
    facts["checksum"] = digest.hexdigest()[:16]
    with utils.replacing(place + ".json") as file:
        file.write(json.dumps(facts).encode())


def encode_part(text, tokenizer):
    """Yield arrays of tokens, and whether they decode to just their text."""
    if tokenizer.separator is None:
        separator = np.concatenate(tokenizer.arrays(["\n"]))
    else:
        separator = np.array([tokenizer.separator])

    def pieces():
        for number, document in enumerate(text.documents):
            if number:
                yield None
            yield from tokenizer.pieces(document.text())

    done, total, said = 0, len(text), time.monotonic()
    stream = pieces()
    while batch := list(itertools.islice(stream, 64)):
        texts = [x for x in batch if x is not None]
        arrays = tokenizer.arrays(texts)
        exact = all(
            tokenizer.decode(x) == y for x, y in zip(arrays, texts, strict=True)
        )
        arrays = iter(arrays)
        yield (
            np.concatenate([separator if x is None else next(arrays) for x in batch]),
            exact,
        )
        done += sum(len(x.encode()) for x in texts)
        if time.monotonic() > said + 10:
            said = time.monotonic()
            utils.say(f"encoded {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")


def check_length(corpus, block_size):
    """End with one line and exit status 2 if the text is too short for a block."""
    if len(corpus.train) <= block_size:
        utils.fail(
            f"the text has {len(corpus.train)} tokens to train on, and a block of"
            f" {block_size} takes {block_size + 1}: lower --block-size or add text"
        )
    if len(corpus.val) < 2:
        utils.fail(
            f"the text has {len(corpus.val)} tokens to validate on, and 2 are the"
            " fewest of which one is predicted: add text"
        )


# Make batches


class Blocks(Dataset):
    """Windows of `block_size` tokens; item `start` is the one that begins there.

    An item is (source, targets), int64, each of shape (block_size,); targets are the
    tokens that follow. Past the end source is 0 and targets are -1, which the loss does
    not count. `Blocks[[...]]` of DataLoader's kind, `__getitems__`, has both in shape
    (len(starts), block_size), gathered in one go.
    """

    def __init__(self, tokens, block_size):
        self.tokens = tokens
        self.block_size = block_size

    def __len__(self):
        return max(0, len(self.tokens) - 1)

    def __getitem__(self, start):
        source, targets = self.__getitems__([start])
        return source[0], targets[0]

    def __getitems__(self, starts):
        starts = np.asarray(starts)
        return self._gather(starts, 0), self._gather(starts + 1, -1)

    def _gather(self, starts, filler):
        where = starts[:, None] + np.arange(self.block_size)
        there = where < len(self.tokens)
        if there.all():
            return torch.from_numpy(self.tokens[where].astype(np.int64))
        found = self.tokens[np.where(there, where, 0)].astype(np.int64)
        return torch.from_numpy(np.where(there, found, filler))


def take(batch):
    """The collate_fn of a DataLoader whose dataset returns a batch in one piece."""
    return batch


class StepSampler(Sampler):
    """Where the windows of each step begin, without end; for one of several ranks.

    A step has `batch_size * world_size` windows, of which this rank takes each
    world_size-th. They follow from the seed and the step alone: they are the same at
    every world size. A pass over the text takes each window once, in a random order.
    Each pass has an order and a shift of its own.
    """

    def __init__(self, n_tokens, block_size, batch_size, seed=0, rank=0, world_size=1):
        if n_tokens <= block_size:
            raise ValueError(f"{n_tokens} tokens have no window of {block_size} + 1")
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        # So many fit in at every shift up to block_size - 1.
        self.windows = max(1, (n_tokens - block_size) // block_size)
        self.shifts = n_tokens - self.windows * block_size
        self.step = self.offset = 0

    def set_step(self, step):
        """The first step of the next iteration. It costs nothing."""
        self.step, self.offset = step, 0

    def set_start(self, windows):
        """The same, after so many windows, if other steps were larger or smaller."""
        self.step, self.offset = divmod(windows, self.batch_size * self.world_size)

    def __iter__(self):
        for step in itertools.count(self.step):
            yield from self.starts(step).tolist()

    def starts(self, step):
        """This rank's windows of a step: an array of shape (batch_size,)."""
        size = self.batch_size * self.world_size
        first = self.offset + step * size + self.rank
        number = first + np.arange(0, size - self.rank, self.world_size)
        passes, place = np.divmod(number, self.windows)
        starts = np.empty_like(place)
        for one in np.unique(passes):
            random = np.random.SeedSequence([self.seed, int(one)])
            shift, *keys = random.generate_state(5, np.uint64)
            here = passes == one
            window = permute(place[here], self.windows, keys)
            starts[here] = int(shift % self.shifts) + window * self.block_size
        return starts


def eval_starts(n_tokens, block_size, batch_size, rank=0, world_size=1):
    """Where this rank's windows for validation begin: each token is predicted once.

    They are filled up to whole batches with windows past the end, which count nothing:
    a batch of another size would make torch.compile compile once more.
    """
    starts = range(rank * block_size, n_tokens - 1, world_size * block_size)
    return [*starts, *[n_tokens] * (-len(starts) % batch_size)]


def permute(index, size, keys):
    """Where a random permutation of range(size) puts the numbers `index`, an array.

    A Feistel network permutes the numbers of an even number of bits: it mixes one half
    of the bits into the other, and swaps them. A number that comes out too large goes
    in again. So no permutation of a large text has to be kept in memory.
    https://en.wikipedia.org/wiki/Feistel_cipher
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << bits) - 1)

    def mix(x, key):
        x = (x + key) * np.uint64(0x9E3779B97F4A7C15)
        return (x ^ x >> np.uint64(32)) & mask

    index = index.astype(np.uint64)
    todo = np.ones(len(index), bool)
    while todo.any():
        left, right = index[todo] >> np.uint64(bits), index[todo] & mask
        for key in keys:
            left, right = right, left ^ mix(right, key)
        index[todo] = left << np.uint64(bits) | right
        todo = index >= size
    return index.astype(np.int64)


def prefetch(loader, device):
    """Yield (source, targets) on the device, in the loader's order.

    The next batch is fetched, and its copy to an accelerator has started, before the
    present one is computed. On a CPU, which would have to compute it itself, there is
    nothing to win.
    """
    if device.type == "cpu":
        yield from loader
        return
    present = None
    for batch in loader:
        if device.type != "mps":  # MPS cannot pin
            batch = [x.pin_memory() for x in batch]
        batch = tuple(x.to(device, non_blocking=True) for x in batch)
        if present:
            yield present
        present = batch
    if present:
        yield present


# Encode from the command line


def add_options(parser):
    """The options that the trainer has as well."""
    parser.add_argument(
        "--tokenizer",
        default="chars",
        help="chars (characters, the default), bytes, or a tokenizer file, such as"
        " Hugging Face's tokenizer.json",
    )
    parser.add_argument(
        "--cache",
        default="tokens",
        help="the folder for encoded texts (default: tokens)",
    )
    parser.add_argument(
        "--val-fraction",
        "--val_fraction",
        type=utils.positive_float,
        default=0.1,
        help="how much of the text validates; never more than about 1 MB (default:"
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
