"""Which method for which problem: our own experiment."""

from rookery.experiments.choice import problems

EXPERIMENTS = (problems.problems,)
