"""The program in the sandbox, below a line `OPERATOR = "…"`: it answers calls of the hidden function, or judges an operator."""

import sys

OPERATORS = ("+", "-", "*", "%")
INPUTS = range(10)


def apply(operator: str, x: int) -> int:
    """Return the last digit of `x operator 3`."""
    if operator not in OPERATORS:
        raise ValueError(f"{operator!r} is no operator")
    return eval(f"x {operator} 3", {"x": x}) % 10


if __name__ == "__main__":
    action, text = sys.argv[1:]
    if action == "call":
        print(apply(OPERATOR, int(text)))  # noqa: F821
    else:
        print(sum(apply(text, x) == apply(OPERATOR, x) for x in INPUTS) / len(INPUTS))  # noqa: F821
