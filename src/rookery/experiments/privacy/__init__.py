"""What privacy costs nested methods: our own experiments."""

from rookery.experiments.privacy import accuracy, groups, records

EXPERIMENTS = (accuracy.accuracy, groups.groups, records.records)
