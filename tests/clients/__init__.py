"""The compatibility matrix: which method of which client works here, and the tests that show each row.

    python -m tests.clients            runs all rows and prints the table
    python -m tests.clients agents     runs those of one environment

* `rows.py` gathers the rows. A row is a claim about one method of one client, with the tests that show it.
* Those tests run the client itself, unchanged, in an interpreter of its own (`environments.py`), against a stack from the wheels.
  Clients that have no package on PyPI are shown by requests as they send them.
* A row counts as shown where all its tests passed. One that says `differs` or `missing` has a test that shows the difference.
"""
