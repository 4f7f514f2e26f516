"""The plan: a round traced once, what it says in words, and how its losses are computed."""
