"""The test suite of textkit."""
