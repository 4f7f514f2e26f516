"""The contract for methods: what every method of the library is held to, for a method of your own.

>>> import rookery as rk
>>> from rookery.testing import check_method
>>> report = check_method(rk.FedAvg(step=0.05), exchanges=1, only=["trace", "keys"])
>>> report.ok
True
"""

from rookery.testing.cases import Case
from rookery.testing.contract import NAMES, Check, Report, Result, check_method, checks
from rookery.testing.runs import Outcome, outcome

__all__ = ["NAMES", "Case", "Check", "Outcome", "Report", "Result", "check_method", "checks", "outcome"]
