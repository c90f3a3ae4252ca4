"""On how many units the actions of a queue start: the ways of the policies that serve queues in order, on cores and on cells."""
