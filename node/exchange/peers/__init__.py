"""Rounds whose slices travel between nodes: who carries, who reduces, and who fetches them."""
