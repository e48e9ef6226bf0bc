"""Proposes a policy for a model that has none: drafted from a traced forward, proven on CPU ranks."""

from opensora_accel.proposal import command
from opensora_accel.proposal.propose import Attempt, Proposal, as_code, propose_policy

__all__ = ["Attempt", "Proposal", "as_code", "command", "propose_policy"]
