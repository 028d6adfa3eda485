"""Sentences of English and Chinese text by rule: where they end is told by punctuation, what follows it, and a list of abbreviations."""

from __future__ import annotations

import re

_CLOSING = "\"'”’»)\\]}」』）】》〉"
_OPENING = "\"'“‘«(\\[{「『（【《〈¿¡"
# A full-width mark ends a sentence by itself; an ASCII one only before white space and a likely beginning (no lower-case letter). The
# look-behind keeps a long row of dots from being tried at each of its dots.
_ENDS = re.compile(
    rf"(?P<wide>[。！？；…｡]+[{_CLOSING}]*)|(?P<line>\n+)|(?P<ascii>(?<![.!?])[.!?]+[{_CLOSING}]*)(?=\s+[{_OPENING}]*[^\s{_OPENING}a-z])"
)
_ABBREVIATION = re.compile(
    "mrs?|ms|[dsjf]r|prof|st|col|sgt|capt|lt|rep|gov|hon|rev|mt|ft|vol|figs?|eqs?|sec|ch|pp|eds|al|vs|etc|cf|ca|approx|dept|univ|inc|ltd|co|"
    "corp|bros|jan|feb|apr|jun|jul|aug|sept?|oct|nov|dec|e[.]g|i[.]e|[ap][.]m|u[.][skn]|ph[.]d|b[.]c|a[.]d"
)
_LAST_WORD = re.compile(r"[^\s(\[{\"'“‘]*$")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text; joined together they are the text again, to the last character.

    White space between two sentences goes to the second, as byte-level tokenizers expect; a line's end to the first.
    """
    found: list[str] = []
    start = 0
    for match in _ENDS.finditer(text):
        if match.group("ascii") is not None and _goes_on(text, start, match):
            continue
        if not text[start : match.end()].strip():
            continue
        found.append(text[start : match.end()])
        start = match.end()
    rest = text[start:]
    if rest.strip() or not found:
        found.append(rest)
    elif rest:
        found[-1] += rest
    return found


def _goes_on(text: str, start: int, match: re.Match[str]) -> bool:
    """Say whether a full stop belongs to an abbreviation or an initial (`J. Smith`) instead of ending a sentence."""
    if match.group("ascii") != ".":
        return False
    before = _LAST_WORD.search(text, max(start, match.start() - 12), match.start())
    word = before.group().lower() if before else ""
    return bool(_ABBREVIATION.fullmatch(word)) or (len(word) == 1 and word.isalpha() and word != "i")
