"""Checkers for what users write: does it keep what its template promises?"""

from tianji.testing.algorithm import check_algorithm
from tianji.testing.env import check_env
from tianji.testing.transport import check_transport

__all__ = ["check_algorithm", "check_env", "check_transport"]
