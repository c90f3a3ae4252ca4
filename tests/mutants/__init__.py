"""Small defects of the product, and for each the test that finds it.

| file | what is in it |
|---|---|
| `*.toml` | the defects: a line or two of the product, what stands there instead, why that matters, and the test that must fail |
| `running.py` | applies each in a copy of the tree, and runs its test there |
| `__main__.py` | `make mutants`: all of them on all cores |

A test that is removed or loosened lets a defect survive. So `make mutants` says which defect nobody would find any more.
"""
