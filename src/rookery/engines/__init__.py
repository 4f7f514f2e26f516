"""Engines: what gives the primitives of `fed` their meaning."""
