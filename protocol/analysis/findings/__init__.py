"""The type that every detector returns."""

from .finding import Finding as Finding
from .finding import FindingKind as FindingKind
from .finding import State as State
