"""The journal in SQL: tables, writing, questions, retention and the scheduler's lock."""
