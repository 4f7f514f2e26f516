"""What knows nothing of federations: trees, arguments, random draws, jaxprs, the content of values, processes."""
