"""Optimised MLA paths and adapters to other libraries, one file each, all held to the same judge.

Nothing here falls back: outside its contract a backend is unsupported, with a reason.
"""
