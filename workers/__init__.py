"""Workers: what carries actions out on a node. Imports nothing by itself, so that its small scripts start fast."""
