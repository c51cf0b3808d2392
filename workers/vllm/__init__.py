"""Launches vLLM's own gRPC server as a worker with the settings that the router builds on.

vLLM and its servicer live in an environment of their own (`--python`), and
nothing here imports them: the launcher composes their command line, judges
their versions, waits until they serve and stops them properly.
"""
