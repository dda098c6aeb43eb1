"""Translation recipes: archives to text, text to pieces, translations to BLEU."""

import contextlib
import html
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from common import corpus, sample
from common.download import Archive, digest, fetch
from common.errors import RecipeError
from common.recipe import TINY_LAYERS, Flags, Recipe, words

BEAM = 4
SPLITS = ("train", "valid", "test")
SAMPLE_PAIRS = {"train": 400, "valid": 20, "test": 20}  # of a dry run
MARKED_UP = (".sgm", ".xml")
Members = dict[str, tuple[tuple[str, str], ...]]  # split -> names in an archive, source and target


def read_sentences(text: str, mark: str) -> dict[int, str]:
    """Of fairseq-generate's output, by number, the sentences that a mark begins: D- detokenised hypotheses, T- references."""
    found = {}
    for line in text.splitlines():
        if line.startswith(mark):
            number, _, rest = line[len(mark) :].partition("\t")
            found[int(number)] = rest.partition("\t")[2] if mark == "D-" else rest  # a hypothesis has its score first
    return found


def read_hypotheses(text: str, count: int) -> list[str]:
    """The detokenised hypotheses of fairseq-generate's output, in the split's order.

    Raises:
        RecipeError: a sentence has no hypothesis (fairseq leaves out sentences over its length limit).
    """
    hypotheses = read_sentences(text, "D-")
    missing = sorted(set(range(count)) - set(hypotheses))
    if missing:
        raise RecipeError(
            f"every test sentence must be translated, got {len(hypotheses)} of {count}; missing: {missing[:5]}"
        )
    return [hypotheses[i] for i in range(count)]


class Translation(Recipe):
    """From ``source`` to ``target`` with one vocabulary of sentencepiece pieces for both."""

    source: str
    target: str
    archives: dict[Archive, Members]  # what each holds
    kind_of_pieces, coverage = "bpe", 1.0
    keeps = staticmethod(corpus.fits)  # training pairs, by their numbers of pieces
    pieces: int
    tiny_pieces = 200
    n_test: int  # sentences that the test split must have
    valid_every = 0  # takes every so many-th training pair for validation; 0 where the archives hold a validation split
    lower_case = False
    tiny: ClassVar[Flags] = TINY_LAYERS | {"--max-tokens": 512, "--warmup-updates": 4, "--lr": 5e-3}
    length_penalty = 0.6
    generation: ClassVar[Flags] = {}  # further flags of fairseq-generate

    @classmethod
    def add_arguments(cls, parser) -> None:
        parser.add_argument(
            "--downloads",
            type=Path,
            metavar="DIR",
            help="where the archives lie or will lie (default: downloads/ in --out); they may be brought by other means",
        )

    def inputs(self) -> dict:
        archives = [
            [archive.url, archive.sha256, members] for archive, members in getattr(self, "archives", {}).items()
        ]
        made = {"translation.py": digest(Path(__file__)), "archives": json.loads(json.dumps(archives))}
        return made | {"pieces": self.n_pieces, "valid_every": self.valid_every, "lower_case": self.lower_case}

    @property
    def n_pieces(self) -> int:
        return self.tiny_pieces if self.args.dry_run else self.pieces

    # ---- data

    def make_data(self, folder: Path) -> dict:
        text, pieces = folder / "text", folder / "pieces"
        text.mkdir()
        pieces.mkdir()
        told = self.write_splits(text)
        sides = (self.source, self.target)
        self.say(f"data: learning {self.n_pieces:,} sentencepiece pieces")
        train = tuple(text / f"train.{side}" for side in sides)
        learned = {"kind": self.kind_of_pieces, "coverage": self.coverage, "threads": self.args.threads}
        corpus.train_sentencepiece(list(train), folder / "spm.model", self.n_pieces, **learned)
        model = corpus.Pieces(folder / "spm.model")
        model.write_dictionary(folder / "dict.txt")
        with self.display.task("pieces") as show:
            kept, dropped = model.encode_pairs(
                train, tuple(pieces / f"train.{side}" for side in sides), self.keeps, show
            )
        for path in sorted(text.iterdir()):
            if path in train:
                path.unlink()
            else:
                model.encode_file(path, pieces / path.name)
        self.say("data: fairseq-preprocess")
        arguments = ["--source-lang", self.source, "--target-lang", self.target, "--joined-dictionary"]
        self.binarize(folder, folder / "bin", [*arguments, *(f"--{split}pref={pieces / split}" for split in SPLITS)])
        self.finish_data(folder)
        shutil.rmtree(pieces)
        return told | {"train": kept, "too long or unequal": dropped}

    def binarize(self, folder: Path, target: Path, arguments: list[str]) -> None:
        arguments += [
            "--srcdict",
            str(folder / "dict.txt"),
            "--destdir",
            str(target),
            "--workers",
            str(self.args.threads),
        ]
        self.tool("binarizing", "fairseq_cli.preprocess", arguments, target.with_suffix(".log"))

    def finish_data(self, folder: Path) -> None:
        """What a recipe makes of the pieces beside."""

    def write_splits(self, text: Path) -> dict:
        """Writes SPLIT.LANGUAGE to ``text``; returns how many pairs each split has, and what else is worth telling."""
        return self.write_text(self.fetch_archives(), text, text.with_name("raw"))

    def fetch_archives(self) -> dict[Path, Members]:
        """The archives' files, checked, and what each holds. A dry run takes a sample in their form."""
        if self.args.dry_run:
            self.write_sample(self.out / "downloads")
        folder = (
            self.out / "downloads"
            if self.args.dry_run
            else (self.args.downloads or self.args.out / "downloads").resolve()
        )
        found = {}
        for archive, members in self.archives.items():
            known = Archive(archive.url) if self.args.dry_run else archive  # the sample has its own size and checksum
            with self.display.task(archive.name) as show:
                found[fetch(known, folder, self.say, show)] = members
        return found

    def write_sample(self, folder: Path) -> None:
        """Archives of the same names and members, with sentences of a small grammar."""
        folder.mkdir(parents=True)
        for number, (archive, members) in enumerate(self.archives.items()):
            files = {}
            for split, names in members.items():
                for i, both in enumerate(names):
                    pairs = sample.pairs(SAMPLE_PAIRS[split], seed=100 * number + 10 * i + len(split))
                    pairs += sample.DIRTY if split == "train" else []
                    for language, name in zip((self.source, self.target), both, strict=True):
                        sentences = [pair[("en", "de").index(language)] for pair in pairs]
                        form = sample.segments if name.endswith(MARKED_UP) else sample.lines
                        files[name] = form(sentences)
            sample.write_archive(folder / archive.name, files)

    def write_text(self, archives: dict[Path, Members], text: Path, raw: Path) -> dict:
        """Writes SPLIT.LANGUAGE, cleaned; returns how many pairs each split has, and how many had an empty side."""
        counts = dict.fromkeys((*SPLITS, "empty"), 0)
        with contextlib.ExitStack() as stack, self.display.task("cleaning") as show:
            files = {
                split: [
                    stack.enter_context((text / f"{split}.{side}").open("w", encoding="utf-8"))
                    for side in (self.source, self.target)
                ]
                for split in SPLITS
            }
            for archive, members in archives.items():
                self.say(f"data: unpacking {archive.name}")
                paths = unpack(archive, [name for names in members.values() for both in names for name in both], raw)
                for split, names in members.items():
                    for both in names:
                        for pair in zip_longest(*(self.sentences(paths[name]) for name in both)):
                            if None in pair:
                                raise RecipeError(
                                    f"data: {' and '.join(both)} of {archive.name} must have as many sentences as one another; "
                                    "move the archive away to fetch it again"
                                )
                            pair = [corpus.clean(side.lower() if self.lower_case else side) for side in pair]
                            goes_to = self.goes_to(split, pair, counts)
                            counts[goes_to] += 1
                            for file, sentence in zip(files.get(goes_to, ()), pair, strict=False):
                                file.write(sentence + "\n")
                            if counts[goes_to] % corpus.BATCH_LINES == 0:
                                show(0.0, f"{sum(counts.values()):,} pairs")
                shutil.rmtree(raw)
        if not self.args.dry_run and counts["test"] != self.n_test:
            raise RecipeError(
                f"the test split must have {self.n_test:,} sentences, got {counts['test']:,}: not the archives that this recipe knows"
            )
        return counts

    def goes_to(self, split: str, pair: list[str], counts: dict[str, int]) -> str:
        if split == "train" and not all(pair):
            return "empty"
        if split == "train" and self.valid_every and (counts["train"] + counts["valid"] + 1) % self.valid_every == 0:
            return "valid"
        return split

    def sentences(self, path: Path) -> Iterator[str]:
        """Of one unpacked file."""
        if path.name.endswith(MARKED_UP):
            found = (re.search(r"<seg id=\"\d+\">(.*)</seg>", line) for line in corpus.read_lines(path))
            return (html.unescape(segment[1]) for segment in found if segment)
        return corpus.read_lines(path)

    # ---- evaluation

    def score(self, checkpoint: Path, folder: Path) -> dict:
        """BLEU by sacrebleu of the translated test split."""
        import sacrebleu

        text, raw = self.data / "text" / f"test.{self.target}", folder / "generate.txt"
        references = (
            list(corpus.read_lines(text)) if text.exists() else []
        )  # a user's binarized data has no text beside it
        flags: Flags = {"--path": checkpoint, "--gen-subset": "test", "--beam": BEAM, "--lenpen": self.length_penalty}
        flags |= {"--max-tokens": 4096, "--max-len-a": 1.2, "--max-len-b": 10, "--no-progress-bar": True}
        flags |= {"--remove-bpe": "sentencepiece" if references else None, **self.generation, **self.device()}
        flags |= (
            {"--max-len-a": 0, "--max-len-b": 20} if self.args.dry_run else {}
        )  # that model does not know when to stop

        def done() -> tuple[float, str]:
            n = raw.read_bytes().count(b"\nD-") if raw.exists() else 0
            return n / max(1, len(references)), f"{n:,} of {len(references) or 'the'} sentences"

        self.tool("translating", "ls_plugin.cli.generate", [str(self.data / "bin"), *words(flags)], raw, done)
        output = raw.read_text(encoding="utf-8")
        if not references:
            told = read_sentences(output, "T-")
            references = [told[i] for i in range(len(told))]
        hypotheses = read_hypotheses(output, len(references))
        (folder / "hypotheses.txt").write_text(sample.lines(hypotheses), encoding="utf-8")
        metric = sacrebleu.BLEU()
        bleu = metric.corpus_score(hypotheses, [references])
        chrf = sacrebleu.corpus_chrf(hypotheses, [references]).score
        summary = f"{bleu} {metric.get_signature()}"
        return {"bleu": bleu.score, "chrf": chrf, "signature": str(metric.get_signature()), "summary": summary}


def unpack(archive: Path, names: list[str], folder: Path) -> dict[str, Path]:
    """Writes these members to ``folder``, in one pass; returns their paths.

    Raises:
        RecipeError: one is not there.
    """
    folder.mkdir()
    paths = {name: folder / name.replace("/", "_") for name in names}
    missing = set(names)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if name in missing:
                with tar.extractfile(member) as source, paths[name].open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                missing.discard(name)
            if not missing:
                return paths
    raise RecipeError(f"{archive} must hold {', '.join(sorted(missing))}: it is not the archive that this recipe knows")
