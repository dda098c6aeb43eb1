"""German and English sentences of a small grammar: what a dry run takes instead of a downloaded corpus."""

import io
import random
import tarfile
from pathlib import Path

# English, German, gender
NOUNS = [
    ("dog", "Hund", "m"),
    ("tree", "Baum", "m"),
    ("teacher", "Lehrer", "m"),
    ("river", "Fluss", "m"),
    ("cat", "Katze", "f"),
    ("city", "Stadt", "f"),
    ("teacher's daughter", "Lehrerstochter", "f"),
    ("bridge", "Brücke", "f"),
    ("house", "Haus", "n"),
    ("child", "Kind", "n"),
    ("horse", "Pferd", "n"),
    ("village", "Dorf", "n"),
]
ADJECTIVES = [
    ("small", "klein"),
    ("old", "alt"),
    ("red", "rot"),
    ("quiet", "still"),
    ("young", "jung"),
    ("foreign", "fremd"),
]
VERBS = [
    ("sees", "sieht"),
    ("loves", "liebt"),
    ("looks for", "sucht"),
    ("finds", "findet"),
    ("hears", "hört"),
    ("remembers", "merkt sich"),
]
ADVERBS = [("today", "heute"), ("often", "oft"), ("here", "hier"), ("in the morning", "am Morgen"), ("never", "nie")]
NOMINATIVE = {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")}
ACCUSATIVE = {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")}


def _phrase(rng: random.Random, case: dict) -> tuple[str, str]:
    english, german, gender = rng.choice(NOUNS)
    article, ending = case[gender]
    if rng.random() < 0.6:
        adjective = rng.choice(ADJECTIVES)
        return f"the {adjective[0]} {english}", f"{article} {adjective[1]}{ending} {german}"
    return f"the {english}", f"{article} {german}"


def pairs(n: int, seed: int) -> list[tuple[str, str]]:
    """``n`` sentences, (English, German)."""
    rng, found = random.Random(seed), []
    for _ in range(n):
        subject, verb, thing, adverb = (
            _phrase(rng, NOMINATIVE),
            rng.choice(VERBS),
            _phrase(rng, ACCUSATIVE),
            rng.choice(ADVERBS),
        )
        verb_german, _, reflexive = verb[1].partition(" ")
        german = f"{adverb[1]} {verb_german} {subject[1]} {reflexive} {thing[1]}."
        english = f"{adverb[0]}, {subject[0]} {verb[0]} {thing[0]}."
        found.append(tuple(" ".join((side[0].upper() + side[1:]).split()) for side in (english, german)))
    return found


# What cleaning has to deal with: an empty side, invisible characters and separators within a line, unequal and overlong pairs.
DIRTY = [
    ("An empty translation.", ""),
    ("\ufeffThe old\u00ad dog hears\u2028the child.\r", "Der alte Hund hört\u200b das Kind."),
    (
        "Yes.",
        "Ja, und das alte rote Haus in der stillen kleinen Stadt an der Brücke liebt der junge Lehrer heute, morgen und oft.",
    ),
    ("the dog " * 300, "der Hund " * 300),
]
N_DIRTY_KEPT = 1


def write_archive(path: Path, members: dict[str, str]) -> None:
    """A tar archive, compressed, with these files."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            data = text.encode("utf-8")
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def lines(sentences: list[str]) -> str:
    return "".join(f"{sentence}\n" for sentence in sentences)


def segments(sentences: list[str]) -> str:
    """As the evaluation campaigns write their test sets."""
    escaped = (sentence.replace("&", "&amp;") for sentence in sentences)
    inner = "".join(f'<seg id="{i}"> {sentence} </seg>\n' for i, sentence in enumerate(escaped, 1))
    return f'<refset setid="sample" srclang="any" trglang="any">\n<doc docid="sample">\n<p>\n{inner}</p>\n</doc>\n</refset>\n'
