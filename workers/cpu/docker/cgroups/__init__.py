"""Control groups of a container: how a grant is written and taken back. This file stays without imports."""
