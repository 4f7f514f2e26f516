"""Building blocks that two or more algorithms share."""
