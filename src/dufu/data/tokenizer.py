"""Tokenizers: `bytes`, any `tokenizer.json`, a BERT `vocab.txt`, GPT-2's `vocab.json` with `merges.txt`, or a folder of one of these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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


class TextTokenizer:
    """Text to token numbers and back, with the special tokens by role.

    Args:
        tokenizer: the tokenizer proper.
        source: what it was made from, for messages.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self.tokenizer, self.source = tokenizer, source
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._roles = {role: self._find(names) for role, names in _ROLES.items()}

    def _find(self, names: tuple[str, ...]) -> int | None:
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

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of many texts."""
        return [list(e.ids) for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, numbers: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token numbers."""
        return str(self.tokenizer.decode(list(numbers), skip_special_tokens=skip_special_tokens))

    def token(self, number: int) -> str:
        """Return a token as it stands in the vocabulary."""
        return self.tokenizer.id_to_token(number) or ""

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that decides how text is cut."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` as others open them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")
        names = {"eod": "eos_token", "pad": "pad_token", "cls": "cls_token", "sep": "sep_token", "mask": "mask_token"}
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        config |= {names[role]: self.token(number) for role, number in self._roles.items() if number is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def byte_tokenizer() -> TextTokenizer:
    """Return the tokenizer whose first 256 tokens are the bytes, followed by five special tokens."""
    # ByteLevel writes each byte as one printable character; this is its table, by byte value.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in set(printable))}
    tokenizer = Tokenizer(models.BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END, PAD, CLS, SEP, MASK)])
    return TextTokenizer(tokenizer, "bytes")


def bert_tokenizer(path: Path, lower_case: bool = True) -> TextTokenizer:
    """Return the WordPiece tokenizer of a BERT vocabulary, one token a line."""
    try:
        words = path.read_text(encoding="utf-8").split("\n")
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
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([END])
    return TextTokenizer(tokenizer, str(vocab.parent))


def load_tokenizer(spec: str | Path, lower_case: bool = True) -> TextTokenizer:
    """Return the tokenizer that `spec` names.

    Args:
        spec: "bytes", a `tokenizer.json`, a BERT `vocab.txt`, or a folder that holds one of these or GPT-2's files.
        lower_case: for BERT vocabularies, whether to lower-case and strip accents.

    Raises:
        ConfigError: nothing there, or not a tokenizer.
    """
    if str(spec) == "bytes":
        return byte_tokenizer()
    path = Path(spec)
    if path.is_dir():
        for name in ("tokenizer.json", "vocab.txt"):
            if (path / name).is_file():
                return load_tokenizer(path / name, lower_case)
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return gpt2_tokenizer(path / "vocab.json", path / "merges.txt")
        raise ConfigError(f"{path}: holds no tokenizer.json, vocab.txt, or vocab.json with merges.txt")
    if not path.is_file():
        raise ConfigError(f'tokenizer "{spec}": no such file; give "bytes", a tokenizer.json, a vocab.txt or a folder')
    if path.suffix == ".json":
        try:
            return TextTokenizer(Tokenizer.from_file(str(path)), str(path))
        except Exception as error:  # the library raises a plain Exception
            raise ConfigError(f"{path}: not a tokenizer.json ({error})") from error
    return bert_tokenizer(path, lower_case)
