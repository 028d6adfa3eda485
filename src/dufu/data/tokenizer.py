"""Tokenizers: `bytes`, any `tokenizer.json`, a BERT `vocab.txt`, GPT-2's `vocab.json` with `merges.txt`, or a folder of one of these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dufu.errors import ConfigError

END, PAD, CLS, SEP, MASK = "<|endoftext|>", "<|pad|>", "<|cls|>", "<|sep|>", "<|mask|>"

# role -> the names under which tokenizers of different origin keep that token, the first found wins
_ROLES = {
    "eod": (END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]"),
    "pad": (PAD, "<pad>", "[PAD]"),
    "cls": (CLS, "[CLS]", "<s>"),
    "sep": (SEP, "[SEP]", "</s>"),
    "mask": (MASK, "[MASK]", "<mask>"),
}
# role -> its key in a Hugging Face tokenizer_config.json
_CONFIG_KEYS = {"eod": "eos_token", "pad": "pad_token", "cls": "cls_token", "sep": "sep_token", "mask": "mask_token"}


class TextTokenizer:
    """Text to token numbers and back, with the special tokens by role.

    Args:
        tokenizer: the tokenizer proper. Truncation and padding that its file asks for are switched off: nothing of a text may be lost.
        source: what it was made from, for messages.
        roles: role to token, where the maker of the tokenizer has said which is which.

    Attributes:
        vocab_size: the largest token number, plus 1.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, roles: Mapping[str, str] | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer, self.source = tokenizer, source
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        given = roles or {}
        self._roles = {role: self._find(([given[role]] if role in given else []) + list(names)) for role, names in _ROLES.items()}

    def _find(self, names: Iterable[str]) -> int | None:
        for name in names:
            number = self.tokenizer.token_to_id(name)
            if number is not None:
                return int(number)
        return None

    def special(self, role: str) -> int:
        """Return the number of the token with a role: eod, pad, cls, sep or mask.

        Raises:
            ConfigError: the vocabulary has none.
        """
        number = self._roles[role]
        if number is None:
            raise ConfigError(f"tokenizer {self.source} has no {role} token (looked for {', '.join(_ROLES[role])})")
        return number

    def has(self, role: str) -> bool:
        """Say whether the vocabulary has a token with that role."""
        return self._roles[role] is not None

    @property
    def eod(self) -> int:
        """Return the end-of-document token: the end token, or the pad token where there is none."""
        return self.special("eod") if self.has("eod") else self.special("pad")

    @cached_property
    def special_numbers(self) -> frozenset[int]:
        """Return the numbers of all tokens that stand for no text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(n for n, token in added.items() if token.special) | {n for n in self._roles.values() if n is not None}

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def prefix(self) -> list[int]:
        """Return the tokens that the tokenizer puts before a text, such as one that begins it."""
        plain, whole = self.encode("a"), list(self.tokenizer.encode("a").ids)
        starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
        return whole[: starts[0]] if starts else []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of many texts."""
        return [list(e.ids) for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, numbers: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token numbers."""
        return str(self.tokenizer.decode(list(numbers), skip_special_tokens=skip_special_tokens))

    def token(self, number: int) -> str:
        """Return a token as it stands in the vocabulary."""
        return self.tokenizer.id_to_token(number) or ""

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of everything that decides how text is cut."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` as others open them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        config |= {_CONFIG_KEYS[role]: self.token(number) for role, number in self._roles.items() if number is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def byte_tokenizer() -> TextTokenizer:
    """Return the tokenizer whose first 256 tokens are the bytes, followed by five special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END, PAD, CLS, SEP, MASK)])
    return TextTokenizer(tokenizer, "bytes")


def byte_characters() -> list[str]:
    """Return the printable character by which byte-level tokenizers write each byte, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in set(printable))}
    return [names[byte] for byte in range(256)]


def train_tokenizer(texts: Iterator[str], vocab_size: int, source: str) -> TextTokenizer:
    """Return a byte-level BPE tokenizer learnt from texts, as GPT-2's; its first five tokens are the special ones.

    Args:
        texts: documents.
        vocab_size: most tokens; a small text may hold too few repetitions to fill it.
        source: where it will be kept, for messages.

    Raises:
        ConfigError: the vocabulary could not even hold the bytes.
    """
    specials = [END, PAD, CLS, SEP, MASK]
    if vocab_size < 256 + len(specials):
        raise ConfigError(
            f"--train-tokenizer {vocab_size}: at least {256 + len(specials)}, the bytes and {len(specials)} special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer, source)


def bert_tokenizer(path: Path, lower_case: bool = True) -> TextTokenizer:
    """Return the WordPiece tokenizer of a BERT vocabulary, one token a line."""
    try:
        words = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    while words and not words[-1]:
        words.pop()
    vocab = {word.rstrip("\r"): number for number, word in enumerate(words)}
    if "[UNK]" not in vocab:
        raise ConfigError(f"{path}: not a BERT vocabulary, it has no [UNK] line")
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([t for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if t in vocab])
    if "[CLS]" in vocab and "[SEP]" in vocab:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return TextTokenizer(tokenizer, str(path))


def gpt2_tokenizer(vocab: Path, merges: Path) -> TextTokenizer:
    """Return the byte-level BPE tokenizer of GPT-2's two files."""
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises a plain Exception
        raise ConfigError(f"{vocab}, {merges}: not GPT-2's vocabulary and merges ({error})") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([END])
    return TextTokenizer(tokenizer, str(vocab.parent))


def load_tokenizer(spec: str | Path, lower_case: bool = True) -> TextTokenizer:
    """Return the tokenizer that `spec` names.

    Args:
        spec: "bytes", a `tokenizer.json`, a BERT `vocab.txt`, GPT-2's `vocab.json` (its `merges.txt` beside it), or a folder that holds one
            of these.
        lower_case: for BERT vocabularies, whether to lower-case and strip accents.

    Raises:
        ConfigError: nothing there, or not a tokenizer.
    """
    if str(spec) == "bytes":
        return byte_tokenizer()
    path = Path(spec)
    if path.is_dir():
        for name in ("tokenizer.json", "vocab.txt", "vocab.json"):
            if (path / name).is_file():
                return load_tokenizer(path / name, lower_case)
        raise ConfigError(f"{path}: holds no tokenizer.json, vocab.txt, or vocab.json with merges.txt")
    if not path.is_file():
        raise ConfigError(f'tokenizer "{spec}": no such file; give "bytes", a tokenizer.json, a vocab.txt or a folder')
    if path.name == "vocab.json":
        merges = path.with_name("merges.txt")
        if not merges.is_file():
            raise ConfigError(f"{path}: GPT-2's vocabulary needs its merges beside it, but there is no {merges}")
        return gpt2_tokenizer(path, merges)
    if path.suffix == ".json":
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a plain Exception
            raise ConfigError(f"{path}: not a tokenizer.json ({error})") from error
        return TextTokenizer(tokenizer, str(path), _named_roles(path.with_name("tokenizer_config.json")))
    return bert_tokenizer(path, lower_case)


def _named_roles(config: Path) -> dict[str, str]:
    """Return the roles that a Hugging Face `tokenizer_config.json` gives to tokens."""
    if not config.is_file():
        return {}
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{config}: not JSON ({error})") from error
    roles = {}
    for role, key in _CONFIG_KEYS.items():
        token = found.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            roles[role] = content
    return roles
