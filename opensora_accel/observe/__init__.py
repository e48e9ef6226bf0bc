"""What a step does, seen from outside, on real ranks or on one rank of a world that is not there.

Verifier, profiler and planner read a step through this room: where it is, what it computes, sends and holds, whether
ranks agree, and the stand-ins under which it runs without a GPU or without other ranks.
"""
