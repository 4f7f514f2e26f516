"""What an algorithm is written in: the primitives, the client's oracles, channels, the ledger, hyperparameters."""
