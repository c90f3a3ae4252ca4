"""Suites of sandboxes again, on a kernel that has control groups version 2 alone and is booted for them."""
