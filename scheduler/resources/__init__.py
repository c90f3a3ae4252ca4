"""The kinds of resource and how each is held: cores and pods, GPU cells and services, quotas."""
