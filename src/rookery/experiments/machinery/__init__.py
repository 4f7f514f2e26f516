"""What the experiments share: configurations, claims, searches, curves, and the code that runs them."""
