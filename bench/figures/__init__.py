"""The figures of this machine: speed, lag, share of CPU, growth of memory, live runs against simulated ones.

`make figures` measures them, prints each beside its last values, and says which ones moved. It is no gate: a figure depends on the
machine and on what else the machine does, so it has no bound. What must hold on every machine is a test.

| module | what it is for |
|---|---|
| `registry.py` | what a figure is, and which ones there are |
| `history.py` | the values of earlier runs, and whether a value has moved |
| `__main__.py` | the command |
| `bench/tools.py` | what figures and other benchmarks need: CPU time, peak memory, a stack |
| the others | the figures, by what they measure: each is a function that returns a number |

A figure that shares a costly run with others takes it from a cached function of its module.
"""
