"""The figure, ablation and rates of ASFBO."""

from rookery.experiments.asfbo import ablation, fig1, hetero, rates

EXPERIMENTS = (fig1.fig1, ablation.ablation, hetero.hetero, rates.rates)
