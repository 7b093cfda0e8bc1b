"""A run of several sites on one machine: behind links of given rate and delay, or as bare processes."""
