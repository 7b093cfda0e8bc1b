"""An island in rounds whose slices travel between nodes: the rank that leads takes part for all of them."""
