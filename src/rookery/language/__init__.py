"""The language of algorithms: the federation, clients and their oracles, channels, the ledger, hyperparameters."""
