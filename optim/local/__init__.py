"""Methods with local steps: every node trains by itself for K batches, then the nodes agree on one
pseudo-gradient."""
