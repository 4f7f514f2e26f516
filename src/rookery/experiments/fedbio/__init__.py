"""The applications and rates of FedBiO: Li, Huang and Huang, NeurIPS 2023."""

from rookery.experiments.fedbio import cleaning, fair, hyperrep, rates

EXPERIMENTS = (cleaning.cleaning_experiment, hyperrep.hyperrep_experiment, fair.fair_experiment, rates.rates)
