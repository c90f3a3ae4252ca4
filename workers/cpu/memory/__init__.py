"""The memory of environments, granted by action: control groups that pause at an allowance, and one thread that watches them all."""
