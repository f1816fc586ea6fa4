"""Words that hide what a sentence says do not come back. `python -m tests.docs.test_words` prints
where they stand, and lowers the numbers that are allowed."""

import io
import json
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("words_allowed.json")
# By pattern: what to write instead.
PATTERNS = {
    r"tell|tells|told": "prints, logs, reports, warns about",
    r"ours|theirs|as there": "megazoo's checkpoint, the Hugging Face model; repeat the text",
    r"(?:stands?|stood)(?! for)": "is, exists, is in memory, is in the file",
    r"ha(?:s|ve) it": "as in X",
    r"alone": "only",
    r"but for|besides?": "except, in addition to, next to, compared with",
    r"of (?:your|one's|its|their|the user's) own|user's own": "custom; a separate",
    r"else(?!where)": "otherwise; by default",
    r"(?:would|will) do|(?:do|does) so|so (?:do|does|is|are)": "repeat the verb",
    r"(?:tokens?|nats|bits|bytes?|numbers?|lines?|stages?|launches|waits|sequences|objects?|"
    r"documents?|samples?|times?|prompts?) an? "
    r"(?:step|token|byte|rank|layer|row|parameter|second|line|paragraph)": "per",
    r"(?:is|are) (?:no|(?-i:none))(?! longer)": "is not a; invalid",
    r"refuse[sd]?": "is not supported; raises an error",
    r"no longer|until lately|came after|once was": "describe what is, not what was",
    r"in all|at once|in turn|by turns|take turns": "total, immediately, together, alternately",
    r"lies?|lay": "is stored, is located",
    r"(?:refused|named|told|listed) by name": "with an error that names it",
    r"go(?:es)? by": "use",
    r"whatever|whoever": "regardless of; any",
    r"anew|alike|likewise|lately|all the same|for want of": "again, the same, also",
    r"left out|leave (?:it|them) out": "omitted; default",
}
WORDS = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): pattern for pattern in PATTERNS}


def files() -> list[Path]:
    places = ("README.md", "CHANGELOG.md", "pretrain_gpt.py", "docs/*.md", "configs/**/*.toml")
    code = ("megazoo/**/*.py", "tools/**/*.py")
    return sorted(path for place in (*places, *code) for path in ROOT.glob(place))


def prose_of(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that people read, with their numbers: outside blocks and spans of code;
    of Python its strings and comments."""
    text = path.read_text()
    if path.suffix != ".py":
        hidden = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
        text = hidden.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
        return list(enumerate(text.splitlines(), 1))
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            kept = re.sub(r"`[^`\n]*`", "", token.string)
            lines += enumerate(kept.splitlines(), token.start[0])
    return lines


def found_in(path: Path) -> list[tuple[int, str, str]]:
    """The number of each line with such a word, the word, and its pattern."""
    return [
        (number, match[0], pattern)
        for number, line in prose_of(path)
        for words, pattern in WORDS.items()
        for match in words.finditer(line)
    ]


def counts() -> dict[str, dict[str, int]]:
    found = {}
    for path in files():
        words = Counter(pattern for _, _, pattern in found_in(path))
        if words:
            found[path.relative_to(ROOT).as_posix()] = dict(sorted(words.items()))
    return found


def test_words_do_not_come_back():
    """A file has as many of each as are allowed; the numbers only become smaller."""
    allowed, now = json.loads(ALLOWED.read_text()), counts()
    more, fewer = [], []
    for file in sorted(allowed.keys() | now.keys()):
        for pattern in PATTERNS:
            most, count = (each.get(file, {}).get(pattern, 0) for each in (allowed, now))
            if count > most:
                places = ", ".join(
                    f"line {number}: {word!r}"
                    for number, word, kind in found_in(ROOT / file)
                    if kind == pattern
                )
                more.append(f"{file}: {places}: write {PATTERNS[pattern]}")
            elif count < most:
                fewer.append(file)
    assert not more, "\n".join(more)
    assert not fewer, f"run `python -m tests.docs.test_words`: {sorted(set(fewer))} have fewer"


def main() -> None:
    before, now = json.loads(ALLOWED.read_text()) if ALLOWED.exists() else None, counts()
    for file in now:
        for number, word, pattern in found_in(ROOT / file):
            print(f"{file}:{number}: {word}: {PATTERNS[pattern]}")
        if before is not None:
            now[file] = {
                pattern: min(count, before.get(file, {}).get(pattern, 0))
                for pattern, count in now[file].items()
            }
    kept = {file: {p: n for p, n in words.items() if n} for file, words in now.items()}
    kept = {file: words for file, words in kept.items() if words}
    ALLOWED.write_text(json.dumps(kept, indent=1) + "\n")
    print(sum(sum(words.values()) for words in kept.values()), "are allowed")


if __name__ == "__main__":
    main()
