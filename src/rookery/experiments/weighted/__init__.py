"""The tables, figures and theory of federated learning on adaptively weighted nodes."""

from rookery.experiments.weighted import covtype, rates, table3, tables45, theory

EXPERIMENTS = (theory.theory, rates.rates, table3.table3, table3.digits, tables45.sizes, covtype.covtype)
