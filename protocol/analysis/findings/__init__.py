"""The type that every detector returns."""

from .finding import Finding as Finding
from .finding import State as State
