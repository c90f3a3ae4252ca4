"""The index."""

import tempfile
import unittest
from collections import Counter
from pathlib import Path

from textkit.index import SHARDS, build, count, load, search
from textkit.synth import documents


def indexed(texts: list[str], jobs: int) -> dict[str, Counter[str]]:
    """Build and read the index of `texts`."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for number, text in enumerate(texts):
            (corpus / f"d{number:02}.txt").write_text(text)
        build(corpus, Path(folder, "shards"), jobs)
        return load(Path(folder, "shards"))


class Index(unittest.TestCase):
    """Counting n-grams, and searching."""

    def test_ngrams_up_to_three_are_counted(self) -> None:
        """And no longer ones."""
        self.assertEqual(count("a b a b"), Counter({"a": 2, "b": 2, "a b": 2, "b a": 1, "a b a": 1, "b a b": 1}))

    def test_every_document_is_in_the_index(self) -> None:
        """Also when there are more than shards."""
        self.assertEqual(len(indexed(["a"] * (SHARDS + 3), jobs=1)), SHARDS + 3)

    def test_the_index_is_the_same_on_any_number_of_processes(self) -> None:
        """Shards do not depend on who counts them."""
        texts = documents(24, 900, seed=5)
        self.assertEqual(indexed(texts, jobs=1), indexed(texts, jobs=3))

    def test_the_document_with_more_hits_comes_first(self) -> None:
        """And one without does not come."""
        found = search(indexed(["cat cat dog", "cat bird fish", "bird"], jobs=1), "Cat")
        self.assertEqual([name for name, _ in found], ["d00", "d01"])

    def test_rare_words_weigh_more(self) -> None:
        """A word of every document says nothing."""
        found = search(indexed(["the cat", "the dog", "the the the"], jobs=1), "the dog")
        self.assertEqual([name for name, _ in found], ["d01"])
