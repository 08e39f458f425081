"""Text files as tokens: which files, which of them are held out, and the batch of every step."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hybrid_jax.text.tokenizer import Tokenizer

END = 256  # the token "<|endoftext|>": before every document, and so after every one too
PAD = 257
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|reserved_0|>", "<|reserved_1|>")

PYTHON = (".py",)
TEXT = (".py", ".txt", ".md", ".rst")
# Installed packages, and tables that are data rather than code.
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "encodings", "pydoc_data"})
HELD_OUT_SHARE = 0.03
LONG_LINE = 20  # characters; shorter lines are the same in many unrelated files
COPY_SHARE = 0.5  # of a file's long lines


@dataclass(frozen=True)
class Document:
    """One file: its path below the source directory, with forward slashes, and its bytes, which are its tokens."""

    name: str
    content: bytes

    @property
    def num_tokens(self) -> int:
        """With the token that starts it."""
        return len(self.content) + 1

    def tokens(self) -> np.ndarray:
        """uint16[num_tokens], END first."""
        return np.concatenate([[END], np.frombuffer(self.content, np.uint8)]).astype(np.uint16)


@dataclass(frozen=True)
class TokenizedDocument(Document):
    """A file whose tokens are not its bytes.

    Attributes:
        ids: int32[num_tokens], after a token that starts every document, if the tokenizer has one.
    """

    ids: np.ndarray = field(compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def tokens(self) -> np.ndarray:
        """The ids."""
        return self.ids


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents, sorted by name, and what was left out.

    Attributes:
        train, held_out: documents; no name and no content is in both or twice in one.
        copies: names of training files left out because held-out files contain most of their lines.
        duplicates: number of files left out for a name or content that was there already.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    copies: tuple[str, ...]
    duplicates: int

    def digest(self) -> str:
        """Identifies the documents and the split."""
        digest = hashlib.sha256()
        for document in (*self.train, Document("", b""), *self.held_out):
            digest.update(document.name.encode() + b"\0")
            digest.update(hashlib.sha256(document.content).digest())
        return digest.hexdigest()


def sources_of(given: str | Path | Sequence[str | Path] | None) -> tuple[Path, ...]:
    """Directories of sources: one or several that are given, or else the running Python's standard library."""
    if not given:
        return (Path(sysconfig.get_paths()["stdlib"]),)
    return tuple(map(Path, [given] if isinstance(given, str | Path) else given))


def is_held_out(name: str, share: float = HELD_OUT_SHARE) -> bool:
    """Decided by the path alone, so the same module is held out on every machine and version."""
    return _place(name) < share


def _place(name: str) -> float:
    """From 0 to 1, by the path alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def read_corpus(sources: Sequence[str | Path], suffixes: Sequence[str] = PYTHON) -> Corpus:
    """Reads all files below `sources` whose names end so, that are UTF-8 and not empty.

    If there are so few files that none would be held out (`is_held_out`), one is.

    Raises:
        ValueError: a source is not a directory, or nothing is left for training or for the held-out set.
    """
    for source in sources:
        if not Path(source).is_dir():
            what = "a file" if Path(source).exists() else "nothing"
            raise ValueError(
                f"read_corpus: a source must be a directory, got {str(source)!r}, where {what} is"
            )
    found: dict[str, Document] = {}
    duplicates = 0
    for source in sources:
        for document in _documents(Path(source), suffixes):
            duplicates += document.name in found
            found.setdefault(document.name, document)
    ordered = [found[name] for name in sorted(found)]
    kept = {d.name for d in ordered if is_held_out(d.name)}
    if not kept and len(ordered) > 1:
        kept = {min((d.name for d in ordered), key=_place)}
    held_out, seen, repeated = _unique([d for d in ordered if d.name in kept], set())
    train, _, again = _unique([d for d in ordered if d.name not in kept], seen)
    known = {line for document in held_out for line in _long_lines(document)}
    copies = tuple(d.name for d in train if _is_copy(d, known))
    train = [d for d in train if d.name not in set(copies)]
    if not train or not held_out:
        raise ValueError(
            f"read_corpus: needs training and held-out files, got {len(train)} and {len(held_out)} "
            f"from {len(found)} files ({', '.join(suffixes)}); give sources with more files"
        )
    return Corpus(tuple(train), tuple(held_out), copies, duplicates + repeated + again)


def tokens_are_bytes(tokenizer: Tokenizer) -> bool:
    """Whether its tokens are those of `Document`: so they were in all trainings of the bundled models."""
    text = "".join(map(chr, range(1, 0x250)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.eos_token_id == END and ids == list(text.encode())


def reading(
    model: Path, sources: str | Path | Sequence[str | Path] | None
) -> tuple[Sequence[str], Tokenizer | None]:
    """Which files are read for a model, and with which tokenizer, None if tokens are bytes.

    Raises:
        ValueError: the model has no tokenizer.
    """
    tokenizer = Tokenizer.from_directory(model)
    if tokenizer is None:
        raise ValueError(f"distill: {model} has no tokenizer.json, with which texts are read")
    suffixes = TEXT if sources else PYTHON
    return suffixes, None if tokens_are_bytes(tokenizer) else tokenizer


def tokenized(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """The same files as tokens. Each starts with the token that begins texts, or with the one that ends them."""
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    start = [mark for mark in marks if mark is not None][:1]

    def read(document: Document) -> TokenizedDocument:
        ids = tokenizer.encode(document.content.decode(), add_special_tokens=False)
        every = np.array([*start, *ids], np.int32)
        return TokenizedDocument(document.name, document.content, every)

    train, held_out = (tuple(map(read, part)) for part in (corpus.train, corpus.held_out))
    return replace(corpus, train=train, held_out=held_out)


def _documents(source: Path, suffixes: Sequence[str]) -> Iterable[Document]:
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.suffix not in suffixes:
            continue
        if SKIPPED_FOLDERS.intersection(relative.parts) or not path.is_file():
            continue
        content = path.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if content:
            yield Document(relative.as_posix(), content)


def _unique(documents: list[Document], seen: set[bytes]) -> tuple[list[Document], set[bytes], int]:
    kept = []
    for document in documents:
        digest = hashlib.sha256(document.content).digest()
        if digest not in seen:
            seen.add(digest)
            kept.append(document)
    return kept, seen, len(documents) - len(kept)


def _long_lines(document: Document) -> list[bytes]:
    lines = (line.strip() for line in document.content.splitlines())
    return [line for line in lines if len(line) >= LONG_LINE]


def _is_copy(document: Document, known: set[bytes]) -> bool:
    lines = _long_lines(document)
    return bool(lines) and sum(line in known for line in lines) > COPY_SHARE * len(lines)


class Batches:
    """The batch of any step, from seed and step alone.

    In each epoch the documents are shuffled, joined, and cut into blocks of `context` tokens, which are
    shuffled again. `GROUP` blocks make a group; a group is cut into rows of the row length in force,
    shuffled once more, and lasts `GROUP / batch` steps. Where the row length changes between groups,
    the training still sees every token of the epoch once.

    Attributes:
        documents: what to train on.
        seed: of all shuffles.
        batch: blocks' worth of tokens in one step; divides GROUP.
        context: tokens of a block, the longest row.
        num_tokens: tokens of one epoch, END tokens included.
        steps_per_group: steps between points where the row length may change.
    """

    GROUP = 32

    def __init__(self, documents: Sequence[Document], seed: int, batch: int, context: int) -> None:
        if batch <= 0 or self.GROUP % batch:
            raise ValueError(f"Batches: batch must divide {self.GROUP}, got {batch}")
        self.documents, self.seed, self.batch, self.context = documents, seed, batch, context
        self.num_tokens = sum(document.num_tokens for document in documents)
        self.steps_per_group = self.GROUP // batch
        self.groups_per_epoch = (self.num_tokens - 1) // context // self.GROUP
        if self.groups_per_epoch == 0:
            raise ValueError(
                f"Batches: needs at least {self.GROUP} blocks of {context} tokens, got "
                f"{self.num_tokens} tokens; give more sources or a shorter context"
            )
        # number, tokens, block order
        self._epoch: tuple[int, np.ndarray, np.ndarray] = (
            -1,
            np.zeros(0, np.uint16),
            np.zeros(0, int),
        )

    def __call__(self, step: int, row_len: int) -> np.ndarray:
        """Tokens of a step: int32[batch * context / row_len, row_len + 1], the last one a target only."""
        group, part = divmod(step, self.steps_per_group)
        epoch, place = divmod(group, self.groups_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, *self._shuffle(epoch))
        _, stream, order = self._epoch
        blocks = order[place * self.GROUP : (place + 1) * self.GROUP]
        starts = (blocks[:, None] * self.context + np.arange(0, self.context, row_len)).ravel()
        starts = np.random.default_rng([self.seed, 1, group]).permutation(starts)
        rows = len(starts) // self.steps_per_group
        starts = starts[part * rows : (part + 1) * rows]
        return stream[starts[:, None] + np.arange(row_len + 1)].astype(np.int32)

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, 0, epoch])
        chosen = rng.permutation(len(self.documents))
        stream = np.concatenate([self.documents[i].tokens() for i in chosen])
        return stream, rng.permutation((len(stream) - 1) // self.context)


def segments(
    documents: Sequence[Document], context: int, limit: int | None = None, *, full: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Documents cut into rows for measuring, in order; no row spans two documents.

    Args:
        documents: what to cut.
        context: inputs of a row.
        limit: an evenly spaced choice of this many rows; None for all.
        full: only rows that fill the context, where there are any.

    Returns:
        tokens int32[rows, context + 1], padded; lengths int32[rows] of targets that count.
    """
    rows, lengths = [], []
    for document in documents:
        tokens = document.tokens()
        for start in range(0, len(tokens) - 1, context):
            piece = tokens[start : start + context + 1]
            lengths.append(len(piece) - 1)
            rows.append(np.pad(piece, (0, context + 1 - len(piece)), constant_values=PAD))
    if full and context in lengths:
        rows = [row for row, length in zip(rows, lengths, strict=True) if length == context]
        lengths = [context] * len(rows)
    if limit is not None and limit < len(rows):
        chosen = np.linspace(0, len(rows) - 1, limit).astype(int)
        rows, lengths = [rows[i] for i in chosen], [lengths[i] for i in chosen]
    return np.stack(rows).astype(np.int32), np.asarray(lengths, np.int32)
