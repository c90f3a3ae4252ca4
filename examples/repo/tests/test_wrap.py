"""Wrapping and justifying."""

import unittest

from textkit.synth import documents
from textkit.wrap import justify, wrap


class Wrap(unittest.TestCase):
    """Lines of a given width."""

    def test_lines_break_between_words(self) -> None:
        """As late as possible."""
        self.assertEqual(wrap("aa bb cc", 5), ["aa bb", "cc"])

    def test_a_line_may_be_full(self) -> None:
        """The width itself is allowed."""
        self.assertEqual(wrap("aaa bbb", 7), ["aaa bbb"])

    def test_long_words_are_cut(self) -> None:
        """There is no other way."""
        self.assertEqual(wrap("abcdefg", 3), ["abc", "def", "g"])

    def test_nothing_wraps_to_nothing(self) -> None:
        """No empty line for an empty text."""
        self.assertEqual(wrap("  ", 5), [])

    def test_width_must_be_positive(self) -> None:
        """Nothing fits into no width."""
        with self.assertRaises(ValueError):
            wrap("a", 0)

    def test_justified_lines_have_the_width(self) -> None:
        """The spare space goes to the first gaps."""
        self.assertEqual(justify("a b c", 8), "a   b  c")

    def test_narrow_columns_lose_nothing(self) -> None:
        """No line is too long and no word is lost."""
        self._check_widths(range(8, 20))

    def test_columns_lose_nothing(self) -> None:
        """As in a newspaper."""
        self._check_widths(range(20, 36))

    def test_wide_columns_lose_nothing(self) -> None:
        """As in a letter."""
        self._check_widths(range(36, 56))

    def test_pages_lose_nothing(self) -> None:
        """As in a book."""
        self._check_widths(range(56, 80))

    def _check_widths(self, widths: range) -> None:
        for text in documents(20, 640, seed=3):
            for width in widths:
                lines = wrap(text, width)
                self.assertLessEqual(max(map(len, lines)), width)
                self.assertEqual(" ".join(lines).split(), text.split())
                self.assertTrue(all(len(justify(line, width)) == width for line in lines if " " in line))
