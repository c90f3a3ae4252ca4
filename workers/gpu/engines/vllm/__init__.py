"""The engine whose model is computed by a vLLM server, a process of its own. `engine.py` tells how it lives."""
