"""The scheduler: a core without input and output in rooms by floor (docs/architecture.md), and two drivers, virtual time and live."""
