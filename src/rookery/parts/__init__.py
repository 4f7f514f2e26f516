"""Parts: what two algorithms share."""
