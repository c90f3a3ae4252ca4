"""The tests, as a package that no installed package of this name hides."""
