"""How many machines a trace needs: a search over simulations, and how far simulations are from live runs."""
