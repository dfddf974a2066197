"""Ranks, their hosts, and the evidence about them: control link, agents, stacks, inspections."""
