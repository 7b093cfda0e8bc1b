"""The dashboard: a page, served by the coordinator itself, on which people watch a run.

``recorder`` and ``snapshot`` read the run on its own loop; everything else sees immutable snapshots on a
thread of its own. Only ``web`` and ``page`` import NiceGUI, and that once somebody opens the page.
"""
