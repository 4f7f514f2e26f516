"""Foundations that know nothing of federations: trees, arguments, random draws, jaxprs, digests, processes."""
