"""FLamby's tables of Fed-Heart-Disease and Fed-TCGA-BRCA."""

from rookery.experiments.flamby import heart, tcga

EXPERIMENTS = (heart.heart, tcga.tcga)
