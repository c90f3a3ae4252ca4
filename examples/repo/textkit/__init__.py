"""A small text library: words, slugs, wrapping, statistics, an n-gram index and near-duplicates."""
