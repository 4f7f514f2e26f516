"""Sentences that the applications of FedBiO share."""

OURS_TO_SET = "The paper names this application; its text at hand has no numbers for it. The whole set-up is ours."
ENDS = "*End* is the mean over the last tenth of the rounds."
