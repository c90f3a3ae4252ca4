"""The kinds of engine a service can have: one interface, one file per kind."""
