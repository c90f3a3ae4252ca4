"""GPU cells: which instance of a service stands where, and which waiting action starts on it."""
