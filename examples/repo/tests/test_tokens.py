"""Words, sentences and n-grams."""

import unittest

from textkit.synth import documents
from textkit.tokens import ngrams, sentences, words


class Words(unittest.TestCase):
    """How text falls apart."""

    def test_words_are_lower_case(self) -> None:
        """Capitals do not make another word."""
        self.assertEqual(words("One TWO three"), ["one", "two", "three"])

    def test_apostrophe_belongs_to_its_word(self) -> None:
        """But quotes around a word do not."""
        self.assertEqual(words("'Don't' stop"), ["don't", "stop"])

    def test_digits_and_letters_are_kept_apart(self) -> None:
        """A number is a word of its own."""
        self.assertEqual(words("route 66b_x"), ["route", "66", "b", "x"])

    def test_sentences_end_with_their_marks(self) -> None:
        """The mark stays with the sentence."""
        self.assertEqual(sentences("Yes. No? Well!  "), ["Yes.", "No?", "Well!"])

    def test_ngrams_are_neighbours(self) -> None:
        """Every run of n, and none where there are fewer."""
        self.assertEqual(list(ngrams(["a", "b", "c"], 2)), [("a", "b"), ("b", "c")])
        self.assertEqual(list(ngrams(["a"], 2)), [])

    def test_ngrams_refuse_zero(self) -> None:
        """There is no run of nothing."""
        with self.assertRaises(ValueError):
            ngrams(["a"], 0)

    def test_a_text_of_n_words_has_n_plus_1_minus_k_kgrams(self) -> None:
        """For every text and k."""
        for text in documents(140, 1000, seed=1):
            found = words(text)
            for n in (1, 2, 3, 4):
                self.assertEqual(sum(1 for _ in ngrams(found, n)), len(found) + 1 - n)
