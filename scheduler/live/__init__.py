"""The driver with a clock: between a broker, a journal and the core."""
