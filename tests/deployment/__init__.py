"""The deployment by compose: its files, and its services as plain processes."""
