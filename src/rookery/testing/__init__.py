"""The contract that every method of the library passes, for your own methods.

>>> import rookery as rk
>>> from rookery.testing import check_method
>>> report = check_method(rk.FedAvg(step=0.05), exchanges=1, only=["trace", "keys"])
>>> report.ok
True
"""

from rookery.testing.cases import Case
from rookery.testing.contract import NAMES
from rookery.testing.runner import Check, Report, Result, check_method, checks
from rookery.testing.runs import Outcome, outcome

__all__ = ["NAMES", "Case", "Check", "Outcome", "Report", "Result", "check_method", "checks", "outcome"]
